"""The request that each token of a step belongs to."""

from __future__ import annotations

import torch


def token_to_req_ref(query_start_loc: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Rows of a step's block tables, by token.

    Args:
        query_start_loc: [R + 1] int32, not decreasing: where each request's tokens begin, and where the last one's end.
        num_tokens: T; tokens past the last request are padding.

    Returns:
        [T] int32 in [0, R): padding takes the last row.
    """
    token = torch.arange(num_tokens, device=query_start_loc.device, dtype=query_start_loc.dtype)
    requests = torch.searchsorted(query_start_loc[1:].contiguous(), token, right=True)
    return requests.clamp(max=query_start_loc.shape[0] - 2).int()
