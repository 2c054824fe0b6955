"""``fp8_linear`` on GPUs."""

from __future__ import annotations

import torch

from vllm_dsv4.kernels import _product
from vllm_dsv4.kernels._launch import Capability, capability, num_sms
from vllm_dsv4.kernels._product import Tile


def fp8_linear(x: torch.Tensor, weight: torch.Tensor, weight_sf: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """See ``reference/fp8_linear.py``."""
    num_tokens = x.shape[0]
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(num_tokens, weight.shape[0], dtype=out_dtype or x.dtype, device=x.device)
    if num_tokens == 1:
        _product.one_token(x[:, None], weight[None], weight_sf[None], out[:, None], quantize=True)
        return out
    tile, splits = _plan(num_tokens, weight, num_sms(x.device), capability(x.device))
    num_counters = _product.num_tiles(num_tokens, weight.shape[0], tile) if splits > 1 else 0
    q, sf, counters = _product.quantize(x, _product.codes_dtype(x.device), num_counters)
    _product.tiled(q[:, None], sf, weight[None], weight_sf[None], out[:, None], tile, splits, counters)
    return out


def _plan(num_tokens: int, weight: torch.Tensor, num_programs: int, gpu: Capability) -> tuple[Tile, int]:
    """Tiles that do not spill, and programs a tile: two an SM."""
    if num_tokens > 256:
        return (Tile(128, 64, 128, 8, 3) if gpu < (8, 9) else Tile(128, 128, 128 if gpu[0] in (9, 10) else 64, 8, 3)), 1
    tile = Tile(16, 64, 128, 4, 4) if num_tokens <= 16 else Tile(64, 64, 128, 8 if gpu[0] >= 12 else 4, 4)
    size_n, size_k = weight.shape
    splits = 1
    tiles = _product.num_tiles(16 if num_tokens <= 16 else 64 if num_tokens <= 64 else 256, size_n, tile)
    while tiles * splits < 1.5 * num_programs and size_k // splits >= 512 and splits < 8:
        splits *= 2
    return tile, splits
