"""Scores of the indexer over its cached keys, and the best entries for each token (model.md 3.6)."""

from __future__ import annotations

import torch

from vllm_dsv4.reference.entry_slots import entry_slots_ref
from vllm_dsv4.reference.indexer_query import IndexerQuery
from vllm_dsv4.reference.numerics import dequantize_mxfp4, gather_entries, row_tiles

# Tokens scored together: enough to share a request's keys in a prefill, few enough to pad batches of single tokens cheaply.
_TOKEN_TILE = 64


def indexer_topk_ref(
    query: IndexerQuery,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    token_to_req: torch.Tensor,
    num_entries: torch.Tensor,
    topk: int,
) -> torch.Tensor:
    """The ``min(topk, num_entries[t])`` entries with the largest ``Σ_h weights[t, h] · relu(q[t, h] · k[w])``.

    Among equal scores the lower index wins. Nothing is scored where all visible entries fit. Scratch memory is bounded, but
    for the scores of one token tile.

    Args:
        query: see ``IndexerQuery``; tokens of a request stand next to each other.
        k_cache: [num_pages, page_size, entry], in the format of the query.
        block_table: [num_reqs, num_blocks] int32.
        token_to_req: [T] int32.
        num_entries: [T] int32, entries that each token sees.

    Returns:
        ``topk_indices`` [T, topk] int32, in ascending order, -1 = none.
    """
    first = torch.arange(topk, device=num_entries.device)
    indices = torch.where(first < num_entries.unsqueeze(-1), first, -1).int()
    scored = (num_entries > topk).nonzero().squeeze(-1)
    if scored.numel() == 0:
        return indices
    largest = int(num_entries.max())
    for tile in row_tiles(scored.numel(), max(largest // 8, (1 << 20) // _TOKEN_TILE)):
        tokens = scored[tile]
        scores = _scores(query, k_cache, block_table, token_to_req[tokens], tokens, num_entries[tokens])
        indices[tokens] = _select(scores, topk)
    return indices


def _scores(
    query: IndexerQuery,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    request: torch.Tensor,
    tokens: torch.Tensor,
    num_entries: torch.Tensor,
) -> torch.Tensor:
    """Scores [N, largest num_entries] float64 of ``tokens`` [N], -inf for entries that a token does not see."""
    requests, row, counts = request.unique_consecutive(return_inverse=True, return_counts=True)
    column = torch.arange(len(tokens), device=tokens.device) - (counts.cumsum(0) - counts)[row]
    q = _queries(query, tokens)
    padded = q.new_zeros(len(requests), int(counts.max()), *q.shape[1:])
    padded[row, column] = q
    weights = query.weights[tokens].double()
    padded_weights = weights.new_zeros(*padded.shape[:3])
    padded_weights[row, column] = weights
    scores = q.new_empty(len(tokens), int(num_entries.max()))
    for tile in row_tiles(scores.shape[1], padded[..., 0].numel() + padded.shape[0] * q.shape[-1]):
        keys = _keys(k_cache, block_table, requests, tile)  # [requests, entries, d]
        products = torch.einsum("rqhd,red->rqhe", padded, keys).relu_()
        scores[:, tile] = torch.einsum("rqh,rqhe->rqe", padded_weights, products)[row, column]
    entry = torch.arange(scores.shape[1], device=scores.device)
    return scores.masked_fill_(entry >= num_entries.unsqueeze(-1), -torch.inf)


def _queries(query: IndexerQuery, tokens: torch.Tensor) -> torch.Tensor:
    if query.q_sf is None:
        return query.q[tokens].double()
    return dequantize_mxfp4(query.q[tokens], query.q_sf[tokens], torch.float64)


def _keys(k_cache: torch.Tensor, block_table: torch.Tensor, requests: torch.Tensor, tile: slice) -> torch.Tensor:
    """Keys of the requests' entries ``tile`` [num_requests, len, d]; beyond a request's end they are whatever the page holds."""
    page_size = k_cache.shape[1]
    entry = torch.arange(tile.start, tile.stop, device=requests.device, dtype=torch.int32).expand(len(requests), -1)
    row = torch.arange(len(requests), device=requests.device, dtype=torch.int32)
    limit = torch.full_like(row, min(tile.stop, block_table.shape[1] * page_size))
    return gather_entries(k_cache, entry_slots_ref(limit, row, block_table[requests.long()], page_size, topk_indices=entry)).double()


def _select(scores: torch.Tensor, topk: int) -> torch.Tensor:
    """Columns of the ``topk`` largest of each row, ascending [N, topk]; every row has more than ``topk`` finite scores."""
    threshold = scores.topk(topk, dim=-1).values[:, -1:]
    above, equal = scores > threshold, scores == threshold
    missing = topk - above.sum(-1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(-1) <= missing))
    return chosen.nonzero()[:, 1].view(-1, topk).int()
