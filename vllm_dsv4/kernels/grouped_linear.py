"""``grouped_linear`` on GPUs."""

from __future__ import annotations

import torch

from vllm_dsv4.kernels import _product
from vllm_dsv4.kernels._product import Tile

_SPLIT_TOKENS = 1024
"""Beyond, the result has enough tiles to occupy a GPU, and nobody splits sums."""


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, weight_sf: torch.Tensor | None = None) -> torch.Tensor:
    """See ``reference/grouped_linear.py``."""
    num_tokens, num_groups, _ = x.shape
    x = x if x.stride(2) == 1 else x.contiguous()
    out = torch.empty(num_tokens, num_groups, weight.shape[1], dtype=x.dtype, device=x.device)
    if num_tokens == 1:
        _product.one_token(x, weight, weight_sf, out, quantize=False)
    elif num_tokens <= 64:
        _product.tiled(x, None, weight, weight_sf, out, Tile(16 if num_tokens <= 16 else 64, 64, 128, 8, 3))
    else:
        if weight_sf is not None:
            weight = _product.widen(weight, weight_sf, x.dtype)
        _multiply(x.transpose(0, 1), weight.transpose(1, 2), out.transpose(0, 1))
    return out


def _multiply(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """``x`` [G, T, K] times ``weight`` [G, K, R] into ``out`` [G, T, R]."""
    if x.is_cuda and x.dtype.itemsize == 2 and x.shape[1] <= _SPLIT_TOKENS:
        # With a narrow result cuBLAS may also add parts of a sum in it.
        out.copy_(torch.bmm(x, weight, out_dtype=torch.float32))
    else:
        torch.bmm(x, weight, out=out)
