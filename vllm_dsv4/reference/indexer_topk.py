"""Scores of the indexer over its cached keys, and the best entries for each token (model.md 3.6)."""

from __future__ import annotations

import torch

from vllm_dsv4.reference.entry_slots import entry_slots_ref
from vllm_dsv4.reference.indexer_query import IndexerQuery
from vllm_dsv4.reference.numerics import dequantize_mxfp4, gather_entries, row_tiles

SCORE_BYTES = 256 << 20
"""An implementation on GPUs holds no more scores at once than fit into this, or those of one token."""
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

    A score is a float32 number (5.3), rounded once: what is left of the order of summation does not decide between equal keys.
    Among equal scores the lower index wins; NaN comes last, so that one bad request does not stop the others. Nothing is
    scored where all visible entries fit. Scratch memory is bounded, and the cost of a token is linear in its own entries.

    Args:
        query: see ``IndexerQuery``; it is faster when tokens of a request stand next to each other.
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
    for tile in row_tiles(scored.numel(), max(largest // 4, (1 << 20) // _TOKEN_TILE)):
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
    """Scores [N, largest num_entries] float32 of ``tokens`` [N], -inf for NaN and for entries that a token does not see."""
    q, weights = _queries(query, tokens), query.weights[tokens].double()
    requests, counts = request.unique_consecutive(return_counts=True)
    scores = torch.full((len(tokens), int(num_entries.max())), -torch.inf, dtype=torch.float32, device=tokens.device)
    for tile in row_tiles(scores.shape[1], len(requests) * (int(counts.max()) * q.shape[1] + q.shape[2])):
        seeing = (num_entries > tile.start).nonzero().squeeze(-1)
        inputs = q[seeing], weights[seeing], request[seeing], num_entries[seeing]
        scores[seeing, tile] = _score_tile(*inputs, k_cache, block_table, tile).float()
    entry = torch.arange(scores.shape[1], device=scores.device)
    return scores.masked_fill_(scores.isnan() | (entry >= num_entries.unsqueeze(-1)), -torch.inf)


def _score_tile(
    q: torch.Tensor,
    weights: torch.Tensor,
    request: torch.Tensor,
    num_entries: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    tile: slice,
) -> torch.Tensor:
    """Scores of queries q [N, H, d], weights [N, H] for the entries ``tile`` of their requests → [N, len] float64."""
    requests, row, counts = request.unique_consecutive(return_inverse=True, return_counts=True)
    column = torch.arange(len(q), device=q.device) - (counts.cumsum(0) - counts)[row]
    padded = q.new_zeros(len(requests), int(counts.max()), *q.shape[1:])
    padded[row, column] = q
    visible = num_entries.new_zeros(len(requests)).scatter_reduce_(0, row, num_entries, "amax")
    keys = _keys(k_cache, block_table[requests.long()], visible, tile)
    products = torch.einsum("rqhd,red->rqhe", padded, keys).relu_()[row, column]
    return torch.einsum("nh,nhe->ne", weights, products)


def _queries(query: IndexerQuery, tokens: torch.Tensor) -> torch.Tensor:
    if query.q_sf is None:
        return query.q[tokens].double()
    return dequantize_mxfp4(query.q[tokens], query.q_sf[tokens], torch.float64)


def _keys(k_cache: torch.Tensor, block_table: torch.Tensor, visible: torch.Tensor, tile: slice) -> torch.Tensor:
    """Keys of entries ``tile`` of the requests in ``block_table`` [R, num_blocks] → [R, len, d]; zeros from ``visible`` [R] on."""
    row = torch.arange(len(visible), device=visible.device, dtype=torch.int32)
    entry = torch.arange(tile.start, tile.stop, device=visible.device, dtype=torch.int32).expand(len(row), -1)
    return gather_entries(k_cache, entry_slots_ref(visible, row, block_table, k_cache.shape[1], topk_indices=entry)).double()


def _select(scores: torch.Tensor, topk: int) -> torch.Tensor:
    """Columns of the ``topk`` largest of each row, ascending [N, topk]; every row sees more than ``topk`` entries."""
    threshold = scores.topk(topk, dim=-1).values[:, -1:]
    above, equal = scores > threshold, scores == threshold
    missing = topk - above.sum(-1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= missing))
    return chosen.nonzero()[:, 1].view(-1, topk).int()
