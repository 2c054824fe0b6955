"""Triton kernel of ``token_to_req``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_dsv4.kernels._launch import launch

_TOKENS = 128
_REQUESTS = 128


def token_to_req(query_start_loc: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """See ``reference/token_to_req.py``."""
    requests = torch.empty(num_tokens, dtype=torch.int32, device=query_start_loc.device)
    launch(
        _requests_kernel,
        (triton.cdiv(num_tokens, _TOKENS),),
        query_start_loc,
        requests,
        num_tokens,
        query_start_loc.shape[0] - 1,
        TOKENS=_TOKENS,
        REQUESTS=_REQUESTS,
        num_warps=4,
    )
    return requests


@triton.jit(do_not_specialize=["num_tokens", "num_reqs"])
def _requests_kernel(query_start_loc_ptr, requests_ptr, num_tokens, num_reqs, TOKENS: tl.constexpr, REQUESTS: tl.constexpr):
    """One program: ``TOKENS`` tokens. A token's request is the number of requests that end at or before it."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    ended = tl.zeros((TOKENS,), tl.int32)
    for first in range(0, num_reqs, REQUESTS):
        request = first + tl.arange(0, REQUESTS)
        end = tl.load(query_start_loc_ptr + 1 + request, mask=request < num_reqs, other=2**31 - 1)
        ended += tl.sum((end[None, :] <= token[:, None]).to(tl.int32), axis=1)
    tl.store(requests_ptr + token, tl.minimum(ended, num_reqs - 1), mask=token < num_tokens)
