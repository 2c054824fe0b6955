"""``inverse_rope``: against complex multiplication in float64, rounded once."""

from __future__ import annotations

import pytest
import torch
from tolerances import assert_matches

from vllm_dsv4 import ops


def table(num_positions: int, rope_dim: int, generator: torch.Generator) -> torch.Tensor:
    angle = torch.rand(num_positions, rope_dim // 2, generator=generator) * 6
    return torch.cat((angle.cos(), angle.sin()), -1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "head_dim", "rope_dim"), [(63, 64, 512, 64), (1, 128, 512, 64), (5, 3, 96, 32), (0, 4, 512, 64)]
)
def test_rotates_back(
    num_tokens: int, num_heads: int, head_dim: int, rope_dim: int, dtype: torch.dtype, generator: torch.Generator, device: torch.device
) -> None:
    x = torch.randn(num_tokens, num_heads, head_dim, generator=generator).to(dtype)
    positions = torch.randint(0, 300, (num_tokens,), generator=generator)
    cos_sin = table(300, rope_dim, generator)
    before = x.clone()
    out = ops.inverse_rope(x.to(device), positions.to(device), cos_sin.to(device)).cpu()

    turn = torch.complex(*cos_sin[positions].double().chunk(2, -1)).unsqueeze(1).conj()
    pairs = torch.view_as_complex(x[..., head_dim - rope_dim :].double().unflatten(-1, (rope_dim // 2, 2)))
    assert out.dtype == dtype and torch.equal(x, before)
    nope = head_dim - rope_dim
    assert torch.equal(out[..., :nope], x[..., :nope])
    assert_matches(out[..., nope:], torch.view_as_real(pairs * turn).flatten(-2))


@pytest.mark.parametrize(("num_tokens", "num_heads", "head_dim", "rope_dim"), [(63, 64, 512, 64), (5, 3, 96, 32), (0, 4, 512, 64)])
def test_in_place(num_tokens: int, num_heads: int, head_dim: int, rope_dim: int, generator: torch.Generator, device: torch.device) -> None:
    x = torch.randn(num_tokens, num_heads, head_dim, generator=generator).bfloat16().to(device)
    positions = torch.randint(0, 300, (num_tokens,), generator=generator).to(device)
    cos_sin = table(300, rope_dim, generator).to(device)
    expected = ops.inverse_rope(x, positions, cos_sin)
    assert ops.inverse_rope(x, positions, cos_sin, out=x) is x
    assert torch.equal(x, expected)


def test_does_not_depend_on_the_batch(generator: torch.Generator, device: torch.device) -> None:
    x = torch.randn(70, 64, 512, generator=generator).bfloat16().to(device)
    positions = torch.arange(70, device=device) * 3
    cos_sin = table(300, 64, generator).to(device)
    together = ops.inverse_rope(x, positions, cos_sin)
    for token in (0, 33, 69):
        assert torch.equal(ops.inverse_rope(x[token : token + 1], positions[token : token + 1], cos_sin)[0], together[token])
