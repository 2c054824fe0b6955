"""The table of cosines and sines, and the rotation, against transformers and against complex multiplication."""

from __future__ import annotations

import pytest
import torch

from vllm_dsv4.config import YarnScaling
from vllm_dsv4.reference.rope import apply_rope, build_cos_sin_cache, rope_frequencies

FLASH_YARN = YarnScaling(factor=16, original_max_position_embeddings=65536, beta_fast=32, beta_slow=1)


def test_frequencies_of_the_specification() -> None:
    compress = {0: 1.0, 1: 0.687656, 15: 3.635539e-3, 16: 2.265625e-3, 20: 2.969778e-4, 24: 1.953125e-5, 25: 5.372312e-6, 31: 5.680529e-7}
    frequencies = rope_frequencies(160000.0, FLASH_YARN, 64)
    assert frequencies[list(compress)].tolist() == pytest.approx(list(compress.values()), rel=5e-7)
    main = rope_frequencies(10000.0, None, 64)
    assert main[[1, 16]].tolist() == pytest.approx([0.7498942, 0.01], rel=5e-7)


def test_table_is_float32_under_another_default_dtype() -> None:
    """vLLM builds models with the checkpoint's dtype as torch's default."""
    expected = build_cos_sin_cache(10000.0, None, 64, 300)
    torch.set_default_dtype(torch.bfloat16)
    try:
        table = build_cos_sin_cache(10000.0, None, 64, 300)
    finally:
        torch.set_default_dtype(torch.float32)
    assert table.dtype == expected.dtype == torch.float32
    assert torch.equal(table, expected)


@pytest.mark.parametrize(
    ("theta", "yarn", "rope_dim", "head_dim", "exact"),
    [
        (160000.0, FLASH_YARN, 64, 512, True),
        (160000.0, YarnScaling(16, 64, 32, 1), 64, 512, True),
        (10000.0, YarnScaling(4, 512, 16, 2), 48, 96, True),
        # A factor that is no power of two: transformers multiplies where we divide, and differs in the last bit.
        (50000.0, YarnScaling(40, 4096, 32, 1), 32, 128, False),
        (10000.0, None, 64, 512, True),
        (123456.0, None, 32, 128, True),
    ],
)
def test_table_equals_transformers(theta: float, yarn: YarnScaling | None, rope_dim: int, head_dim: int, exact: bool) -> None:
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    scaling = yarn or FLASH_YARN
    config = transformers.DeepseekV4Config(
        num_hidden_layers=2,
        compress_ratios=[0, 4],
        head_dim=head_dim,
        qk_rope_head_dim=rope_dim,
        rope_theta=theta if yarn is None else 10000.0,
        compress_rope_theta=theta,
        max_position_embeddings=1 << 20,
        rope_scaling={"type": "yarn", "rope_type": "yarn", **vars(scaling)},
    )
    module = modeling.DeepseekV4RotaryEmbedding(config)
    positions = torch.tensor([0, 1, 2, 127, 4095, 65537, (1 << 20) - 1])
    cos, sin = module(torch.zeros(1), positions[None], layer_type="main" if yarn is None else "compress")
    cache = build_cos_sin_cache(theta, yarn, rope_dim, 1 << 20)
    assert cache.shape == (1 << 20, rope_dim) and cache.dtype == torch.float32
    expected = torch.cat((cos[0], sin[0]), -1)
    torch.testing.assert_close(cache[positions], expected, rtol=0, atol=0.0 if exact else 2e-7)


def test_ramp_of_no_width() -> None:
    # Both correction pairs floor and ceil to 0: everything but pair 0 is interpolated.
    frequencies = rope_frequencies(10000.0, YarnScaling(8, 4, 32, 1), 16)
    plain = 10000.0 ** (-torch.arange(0, 16, 2) / 16)
    assert frequencies.tolist() == pytest.approx([1.0, *(plain[1:] / 8).tolist()], rel=1e-6)


@pytest.mark.parametrize(("head_dim", "rope_dim"), [(512, 64), (128, 64), (16, 16), (10, 2)])
def test_rotation_is_complex_multiplication(head_dim: int, rope_dim: int, generator: torch.Generator, device: torch.device) -> None:
    x = torch.randn(5, 3, head_dim, generator=generator, dtype=torch.float64).to(device)
    angle = torch.rand(5, rope_dim // 2, generator=generator).to(device) * 6
    cos_sin = torch.cat((angle.cos(), angle.sin()), -1)
    turn = torch.complex(*cos_sin.double().chunk(2, -1)).unsqueeze(1)
    pairs = torch.view_as_complex(x[..., head_dim - rope_dim :].unflatten(-1, (-1, 2)))
    for inverse, factor in ((False, turn), (True, turn.conj())):
        rotated = apply_rope(x, cos_sin.unsqueeze(1), inverse=inverse)
        assert torch.equal(rotated[..., : head_dim - rope_dim], x[..., : head_dim - rope_dim])
        expected = torch.view_as_real(pairs * factor).flatten(-2)
        torch.testing.assert_close(rotated[..., head_dim - rope_dim :], expected, rtol=0, atol=1e-14)
    assert apply_rope(x.bfloat16(), cos_sin.unsqueeze(1)).dtype == torch.float32
