"""``indexer_topk``: against scores written token by token in float64, and a sort."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tolerances import LargestTensor
from torch.utils.flop_counter import FlopCounterMode

from vllm_dsv4 import ops
from vllm_dsv4.reference.indexer_query import IndexerQuery
from vllm_dsv4.reference.numerics import gather_entries, hadamard, scatter_entries

MakeCache = Callable[..., tuple[torch.Tensor, torch.Tensor]]
ENTRY_BYTES = {"fp8": 132, "mxfp4": 68}


def make_keys(format: str, num_pages: int, page_size: int, make_cache: MakeCache, generator: torch.Generator):
    """A cache full of random keys, and their stored values [slots, 128] float64 (the codec has its own tests)."""
    packed = format in ENTRY_BYTES
    cache, _ = make_cache(num_pages, page_size, ENTRY_BYTES.get(format, 128), torch.uint8 if packed else torch.bfloat16)
    slots = torch.arange(num_pages * page_size, device=cache.device)
    keys = torch.randn(len(slots), 128, generator=generator).bfloat16()
    scatter_entries(cache, slots, (hadamard(keys.double()).bfloat16() if format == "mxfp4" else keys).to(cache.device))
    return cache, gather_entries(cache, slots).cpu().double()


def make_query(format: str, num_tokens: int, num_heads: int, generator: torch.Generator, device: torch.device) -> IndexerQuery:
    q = torch.randn(num_tokens, num_heads, 128, generator=generator).bfloat16().to(device)
    weights = torch.randn(num_tokens, num_heads, generator=generator).bfloat16().to(device)
    positions, no_turn = torch.zeros(num_tokens, dtype=torch.long, device=device), torch.tensor([[1.0] * 32 + [0.0] * 32], device=device)
    return ops.indexer_query(q, weights, positions, no_turn, format)


def query_values(query: IndexerQuery) -> torch.Tensor:
    """[T, H, 128] float64; E2M1 decoded afresh."""
    if query.q_sf is None:
        return query.q.cpu().double()
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    code = torch.stack((query.q.cpu() & 15, query.q.cpu() >> 4), -1).flatten(-2).long()
    values = torch.where(code >= 8, -1.0, 1.0) * magnitudes[code % 8]
    return values * torch.exp2(query.q_sf.cpu().double() - 127).repeat_interleave(32, -1)


def check(
    indices: torch.Tensor,
    query: IndexerQuery,
    keys: torch.Tensor,
    block_table: torch.Tensor,
    page_size: int,
    requests: torch.Tensor,
    num_entries: torch.Tensor,
    topk: int,
) -> None:
    q = query_values(query)
    for token, row in enumerate(indices.tolist()):
        count = num_entries[token].item()
        entry = torch.arange(count)
        slots = block_table[requests[token].item(), entry // page_size].long() * page_size + entry % page_size
        scores = (q[token] @ keys[slots].T).relu().mul(query.weights[token].cpu().double().unsqueeze(1)).sum(0)
        ranked = sorted(range(count), key=lambda e: (-scores[e].item(), e))
        chosen = [e for e in row if e >= 0]
        assert len(row) == topk and row.count(-1) == max(0, topk - count) and len(set(chosen)) == len(chosen)
        if set(chosen) != set(ranked[:topk]):  # only a tie within float32's error may be decided otherwise
            lowest = min(scores[e].item() for e in chosen)
            assert query.q.is_cuda and abs(lowest - scores[ranked[topk - 1]].item()) < 1e-5 * scores.abs().max()


@pytest.mark.parametrize("format", ["fp8", "mxfp4", "rows"])
@pytest.mark.parametrize(("page_size", "topk", "num_heads"), [(64, 32, 16), (61, 7, 64), (2, 20, 16)])
def test_mixed_batch(
    format: str, page_size: int, topk: int, num_heads: int, make_cache: MakeCache, generator: torch.Generator, device: torch.device
) -> None:
    """A prefill of 90 tokens beside single tokens, with nothing, less and more to choose from than ``topk``."""
    num_pages = 4 * (350 // page_size + 1)
    cache, keys = make_keys(format, num_pages, page_size, make_cache, generator)
    block_table = torch.randperm(num_pages, generator=generator, dtype=torch.int32).view(4, -1)
    requests = torch.tensor([0, 1] + [2] * 90 + [3], dtype=torch.int32)
    num_entries = torch.tensor([0, topk, *(torch.arange(100, 190) // 4).tolist(), 350], dtype=torch.int32)
    query = make_query(format, len(requests), num_heads, generator, device)
    indices = ops.indexer_topk(query, cache, *(t.to(device) for t in (block_table, requests, num_entries)), topk)
    assert indices.dtype == torch.int32
    check(indices.cpu(), query, keys, block_table, page_size, requests, num_entries, topk)


def test_all_fit_or_no_tokens(make_cache: MakeCache, generator: torch.Generator, device: torch.device) -> None:
    cache, _ = make_keys("fp8", 2, 64, make_cache, generator)
    query = make_query("fp8", 3, 16, generator, device)
    table, requests = torch.arange(2, dtype=torch.int32, device=device).view(1, 2), torch.zeros(3, dtype=torch.int32, device=device)
    counts = torch.tensor([0, 1, 8], dtype=torch.int32, device=device)
    indices = ops.indexer_topk(query, cache, table, requests, counts, 8)
    assert [sorted(row) for row in indices.tolist()] == [[-1] * 8, [-1] * 7 + [0], list(range(8))]
    empty = IndexerQuery(query.q[:0], None, query.weights[:0])
    assert ops.indexer_topk(empty, cache, table, requests[:0], counts[:0], 8).shape == (0, 8)


def test_among_equals_the_lower_index_wins(make_cache: MakeCache, device: torch.device) -> None:
    """Scores of zero: relu clips every head for every entry but two."""
    cache, _ = make_cache(2, 64, 128, torch.float32)
    keys = torch.full((128, 128), -1.0, device=device)
    keys[[70, 90]] = 1.0
    scatter_entries(cache, torch.arange(128, device=device), keys)
    query = IndexerQuery(torch.ones(1, 4, 128, device=device), None, torch.ones(1, 4, device=device))
    table, request = torch.arange(2, dtype=torch.int32, device=device).view(1, 2), torch.zeros(1, dtype=torch.int32, device=device)
    indices = ops.indexer_topk(query, cache, table, request, torch.tensor([100], dtype=torch.int32, device=device), 5)
    assert sorted(indices[0].tolist()) == [0, 1, 2, 70, 90]


def test_ties_everywhere(make_cache: MakeCache, generator: torch.Generator, device: torch.device) -> None:
    """Small integers: exact in every precision, with many equal scores on either side of the boundary and below zero."""
    topk, page_size = 9, 61
    cache, _ = make_cache(8, page_size, 128, torch.float32)
    keys = torch.randint(-1, 2, (8 * page_size, 128), generator=generator).float() * (torch.arange(128) < 5)
    scatter_entries(cache, torch.arange(len(keys), device=device), keys.to(device))
    block_table = torch.randperm(8, generator=generator, dtype=torch.int32).view(2, 4)
    requests = torch.tensor([0] * 20 + [1] * 20, dtype=torch.int32)
    num_entries = torch.tensor([0, topk - 1, topk, topk + 1, *range(229, 245)] * 2, dtype=torch.int32)
    q = torch.randint(-1, 2, (40, 4, 128), generator=generator).float()
    weights = torch.randint(-2, 3, (40, 4), generator=generator).float()
    query = IndexerQuery(q.to(device), None, weights.to(device))
    indices = ops.indexer_topk(query, cache, *(t.to(device) for t in (block_table, requests, num_entries)), topk).cpu()
    for token in range(40):
        entry = torch.arange(int(num_entries[token]))
        slots = block_table[requests[token], entry // page_size].long() * page_size + entry % page_size
        scores = ((q[token] @ keys[slots].T).relu() * weights[token].unsqueeze(1)).sum(0).tolist()
        ranked = sorted(range(len(entry)), key=lambda e, scores=scores: (-scores[e], e))
        assert sorted(e for e in indices[token].tolist() if e >= 0) == sorted(ranked[:topk])


@pytest.mark.parametrize("format", ["fp8", "mxfp4", "rows"])
def test_only_visible_entries_are_read(format: str, make_cache: MakeCache, generator: torch.Generator, device: torch.device) -> None:
    """Behind a request's entries lie NaN, or another request's; block tables are padded with pages that do not exist."""
    cache, keys = make_keys(format, 6, 64, make_cache, generator)
    requests, num_entries = torch.tensor([0, 0, 1], dtype=torch.int32), torch.tensor([99, 100, 130], dtype=torch.int32)
    query = make_query(format, 3, 16, generator, device)
    block_table = torch.tensor([[2, 0, -1, -1], [5, 3, 1, -1]], dtype=torch.int32)
    inputs = (block_table.to(device), requests.to(device), num_entries.to(device))
    clean = ops.indexer_topk(query, cache, *inputs, 24)
    check(clean.cpu(), query, keys, block_table, 64, requests, num_entries, 24)
    used = torch.cat(
        [2 * 64 + torch.arange(64), torch.arange(36), 5 * 64 + torch.arange(64), 3 * 64 + torch.arange(64), 64 + torch.arange(2)]
    )
    values = gather_entries(cache, used.to(device)).bfloat16()
    cache.view(torch.uint8).fill_(0xFF)
    scatter_entries(cache, used.to(device), values)
    assert torch.equal(gather_entries(cache, used.to(device)).bfloat16(), values)
    assert torch.equal(ops.indexer_topk(query, cache, *inputs, 24), clean)


@pytest.mark.parametrize("format", ["fp8", "mxfp4", "rows"])
def test_does_not_depend_on_the_batch(format: str, make_cache: MakeCache, generator: torch.Generator, device: torch.device) -> None:
    cache, _ = make_keys(format, 24, 64, make_cache, generator)
    block_table = torch.randperm(24, generator=generator, dtype=torch.int32).view(4, 6).to(device)
    requests = torch.tensor([0, 0, 1, 2, 2, 2, 3], dtype=torch.int32, device=device)
    num_entries = torch.tensor([300, 301, 50, 200, 200, 201, 384], dtype=torch.int32, device=device)
    query = make_query(format, 7, 16, generator, device)
    together = ops.indexer_topk(query, cache, block_table, requests, num_entries, 24)
    for token in range(7):
        row = slice(token, token + 1)
        one = IndexerQuery(query.q[row], None if query.q_sf is None else query.q_sf[row], query.weights[row])
        alone = ops.indexer_topk(one, cache, block_table, requests[row], num_entries[row], 24)
        assert sorted(alone[0].tolist()) == sorted(together[token].tolist())


@pytest.mark.parametrize("num_heads", [16, 64])
def test_equal_keys_tie_in_every_batch(num_heads: int, make_cache: MakeCache, generator: torch.Generator, device: torch.device) -> None:
    """37 float32 keys, each repeated 55 times: sums depend on their order in the last bits, and these must not decide."""
    cache, _ = make_cache(32, 64, 128, torch.float32)
    keys, which = torch.randn(37, 128, generator=generator), torch.randint(0, 37, (2048,), generator=generator)
    scatter_entries(cache, torch.arange(2048, device=device), keys[which].to(device))
    q, weights = torch.randn(24, num_heads, 128, generator=generator), torch.randn(24, num_heads, generator=generator)
    table, requests = torch.arange(32, dtype=torch.int32, device=device).view(1, -1), torch.zeros(24, dtype=torch.int32, device=device)
    num_entries = torch.randint(1500, 2049, (24,), generator=generator, dtype=torch.int32)

    def select(rows: slice) -> list[list[int]]:
        query = IndexerQuery(q[rows].to(device), None, weights[rows].to(device))
        return [sorted(row) for row in ops.indexer_topk(query, cache, table, requests[rows], num_entries[rows].to(device), 100).tolist()]

    together = select(slice(0, 24))
    for token, count in enumerate(num_entries.tolist()):
        scores = ((keys.double() @ q[token].double().T).relu() @ weights[token].double()).tolist()
        ranked = sorted(range(count), key=lambda e, scores=scores: (-scores[which[e]], e))
        assert together[token] == select(slice(token, token + 1))[0] == sorted(ranked[:100])


def test_nan_of_one_request_leaves_the_others_alone(make_cache: MakeCache, generator: torch.Generator, device: torch.device) -> None:
    cache, _ = make_keys("rows", 8, 64, make_cache, generator)
    query = make_query("rows", 4, 16, generator, device)
    table = torch.arange(8, dtype=torch.int32, device=device).view(2, 4)
    requests, num_entries = (torch.tensor(values, dtype=torch.int32, device=device) for values in ([0, 0, 1, 1], [200, 201, 202, 203]))
    clean = ops.indexer_topk(query, cache, table, requests, num_entries, 12)
    cache[:2, 5] = torch.nan  # entries 5 and 69 of request 0
    query.weights[3] = torch.nan
    indices = ops.indexer_topk(query, cache, table, requests, num_entries, 12)
    assert torch.equal(indices[2], clean[2])
    for row in indices.tolist():
        assert len(set(row)) == 12 and min(row) >= 0 and max(row) < 203
    assert not {5, 69} & set(indices[:2].flatten().tolist())


def test_short_requests_do_not_pay_for_a_long_one(make_cache: MakeCache, generator: torch.Generator, device: torch.device) -> None:
    """Doubling the longest request costs a batch exactly what it costs that request alone."""
    if device.type != "cpu":
        pytest.skip("counts the multiplications of the PyTorch implementation")
    cache, _ = make_keys("rows", 512, 64, make_cache, generator)
    table = torch.arange(512, dtype=torch.int32).expand(32, -1)

    def flops(short: list[int], long: int) -> int:
        """Of tokens with 500 entries, in the requests ``short``, before one with ``long`` entries."""
        requests, counts = [*short, 31], [500] * len(short) + [long]
        query = make_query("rows", len(counts), 16, generator, device)
        with FlopCounterMode(display=False) as counter:
            ops.indexer_topk(query, cache, table, *(torch.tensor(t, dtype=torch.int32) for t in (requests, counts)), 64)
        return counter.get_total_flops()

    alone = flops([], 32_768) - flops([], 16_384)
    assert alone >= 2 * 16_384 * 16 * 128  # a multiplication and an addition for each entry, head and dimension
    for short in (list(range(31)), [0] * 31):  # single tokens of 31 requests; a prefill
        assert flops(short, 32_768) - flops(short, 16_384) == alone


def test_addresses_beyond_int32(generator: torch.Generator, device: torch.device) -> None:
    """The last pages of a cache of 2.2 GB, of which only they are touched: their bytes' offsets need 64 bits."""
    pages, page_bytes = 250_000, 8_640
    cache = torch.empty(pages, page_bytes, dtype=torch.uint8, device=device)[:, : 64 * 132].unflatten(1, (64, 132))
    assert (pages - 1) * page_bytes > 2**31
    slots = torch.arange((pages - 3) * 64, pages * 64, device=device)
    scatter_entries(cache, slots, torch.randn(192, 128, generator=generator).bfloat16().to(device))
    keys = gather_entries(cache[-3:].clone(), slots - slots[0]).cpu().double()  # the same pages at small addresses
    query = make_query("fp8", 2, 16, generator, device)
    requests, num_entries = torch.zeros(2, dtype=torch.int32), torch.tensor([191, 192], dtype=torch.int32)
    table = torch.tensor([[pages - 1, pages - 3, pages - 2]], dtype=torch.int32)
    indices = ops.indexer_topk(query, cache, *(t.to(device) for t in (table, requests, num_entries)), 20)
    check(indices.cpu(), query, keys, table - (pages - 3), 64, requests, num_entries, 20)


def test_a_million_tokens_of_context(make_cache: MakeCache, generator: torch.Generator, device: torch.device) -> None:
    """262,144 entries of one request, planted best keys far apart; they are not all decoded at once."""
    cache, _ = make_cache(4096, 64, 132, torch.uint8)
    keys = torch.randn(262_144, 128, generator=generator).bfloat16() * 0.1
    best = [0, 77_777, 131_072, 262_143]
    keys[best] = 4.0
    scatter_entries(cache, torch.arange(262_144, device=device), keys.to(device))
    query = ops.indexer_query(
        torch.ones(1, 16, 128, device=device).bfloat16(),
        torch.ones(1, 16, device=device).bfloat16(),
        torch.zeros(1, dtype=torch.long, device=device),
        torch.tensor([[1.0] * 32 + [0.0] * 32], device=device),
        "fp8",
    )
    table, request = torch.arange(4096, dtype=torch.int32, device=device).view(1, -1), torch.zeros(1, dtype=torch.int32, device=device)
    count = torch.tensor([262_144], dtype=torch.int32, device=device)
    with LargestTensor() as largest:
        indices = ops.indexer_topk(query, cache, table, request, count, 4)
    assert sorted(indices[0].tolist()) == best
    if device.type == "cpu":
        assert largest.elements <= 1 << 22  # of the 34 million values of these keys
