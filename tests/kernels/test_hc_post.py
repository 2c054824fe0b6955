"""``hc_post``: against model.md 3.2, stream by stream."""

from __future__ import annotations

import pytest
import torch
from tolerances import assert_independent_of_batch, assert_matches

from vllm_dsv4 import ops


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(5, 4, 96), (1, 4, 4096), (3, 2, 40), (0, 4, 64)], ids=str)
def test_formula(shape: tuple[int, int, int], dtype: torch.dtype, generator: torch.Generator, device: torch.device) -> None:
    num_tokens, m, size = shape
    x = torch.randn(num_tokens, size, generator=generator).to(dtype)
    streams = torch.randn(num_tokens, m, size, generator=generator).to(dtype)
    post, comb = torch.rand(num_tokens, m, generator=generator) * 2, torch.rand(num_tokens, m, m, generator=generator)
    out = ops.hc_post(*(tensor.to(device) for tensor in (x, streams, post, comb)))
    exact = torch.stack(
        [
            post[:, j, None].double() * x.double() + sum(comb[:, i, j, None].double() * streams[:, i].double() for i in range(m))
            for j in range(m)
        ],
        1,
    )
    assert out.dtype == dtype
    assert_matches(out, exact)


def test_mixing_is_transposed(device: torch.device) -> None:
    """A matrix that moves stream 0 to stream 1: ``comb[0, 1] = 1``."""
    streams = torch.stack((torch.full((1, 8), 5.0), torch.full((1, 8), 7.0)), 1).to(device)
    comb = torch.tensor([[[0.0, 1.0], [0.0, 0.0]]], device=device)
    out = ops.hc_post(torch.zeros(1, 8, device=device), streams, torch.zeros(1, 2, device=device), comb).cpu()
    assert torch.equal(out[0, :, 0], torch.tensor([0.0, 5.0]))


def test_does_not_depend_on_the_batch(generator: torch.Generator, device: torch.device) -> None:
    shapes = ((65, 96), (65, 4, 96), (65, 4), (65, 4, 4))
    x, streams, post, comb = (torch.randn(shape, generator=generator).to(device) for shape in shapes)
    assert_independent_of_batch(lambda rows: ops.hc_post(x[rows], streams[rows], post[rows], comb[rows]), 65)
