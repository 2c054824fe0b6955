"""``linear`` on GPUs."""

from __future__ import annotations

import torch

from vllm_dsv4.kernels import _product


def linear(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """See ``reference/linear.py``."""
    out_dtype = out_dtype or x.dtype
    if x.shape[0] == 1:
        x = x if x.stride(1) == 1 else x.contiguous()
        out = torch.empty(1, weight.shape[0], dtype=out_dtype, device=x.device)
        _product.one_token(x[:, None], weight[None], None, out[:, None], quantize=False)
        return out
    if x.dtype == weight.dtype and x.dtype.itemsize == 2 and x.is_cuda:
        # With a narrow result cuBLAS may also add parts of a sum in it.
        return torch.mm(x, weight.T, out_dtype=torch.float32).to(out_dtype)
    return torch.mm(x.float(), weight.float().T).to(out_dtype)
