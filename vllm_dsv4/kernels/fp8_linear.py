"""``fp8_linear`` on GPUs."""

from __future__ import annotations

import torch

from vllm_dsv4.kernels import _product
from vllm_dsv4.kernels._product import Tile


def fp8_linear(x: torch.Tensor, weight: torch.Tensor, weight_sf: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """See ``reference/fp8_linear.py``."""
    num_tokens = x.shape[0]
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(num_tokens, weight.shape[0], dtype=out_dtype or x.dtype, device=x.device)
    if num_tokens == 1:
        _product.one_token(x[:, None], weight[None], weight_sf[None], out[:, None], quantize=True)
    elif num_tokens <= 16:
        _product.tiled(x[:, None], None, weight[None], weight_sf[None], out[:, None], Tile(16, 32, 128, 4, 4), quantize=True)
    else:
        q, sf = _product.quantize(x, fold=False)
        tile = Tile(64, 32, 128, 4, 3) if num_tokens <= 64 else Tile(128, 128, 64, 8, 3)
        _product.tiled(q[:, None], sf, weight[None], weight_sf[None], out[:, None], tile)
    return out
