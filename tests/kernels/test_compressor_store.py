"""``compressor_store``: rows of the state cache, bit for bit."""

from __future__ import annotations

import pytest
import torch

from vllm_dsv4 import ops

SHAPES = [(1024, 4, 4), (512, 128, 8), (256, 4, 4), (40, 4, 3)]  # width, ratio, page size


def make_inputs(width: int, ratio: int, num_tokens: int, num_slots: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    slots = torch.randperm(num_slots, generator=generator)[:num_tokens]
    slots[torch.rand(num_tokens, generator=generator) < 0.2] = -1
    return {
        "kv": torch.randn(num_tokens, width, generator=generator),
        "gate": torch.randn(num_tokens, width, generator=generator),
        "ape": torch.randn(ratio, width, generator=generator),
        "positions": torch.randint(0, 1 << 20, (num_tokens,), generator=generator),
        "slot_mapping": slots,
    }


@pytest.mark.parametrize(("width", "ratio", "page_size"), SHAPES)
@pytest.mark.parametrize("num_tokens", [0, 1, 63])
def test_rows(
    width: int, ratio: int, page_size: int, num_tokens: int, generator: torch.Generator, device: torch.device, make_cache
) -> None:
    inputs = make_inputs(width, ratio, num_tokens, 25 * page_size, generator)
    cache, storage = make_cache(25, page_size, 2 * width, torch.float32)
    expected = storage.cpu().clone()
    rows = expected.view(torch.float32)
    for token, slot in enumerate(inputs["slot_mapping"].tolist()):
        if slot >= 0:
            page, index = divmod(slot, page_size)
            gate = inputs["gate"][token] + inputs["ape"][int(inputs["positions"][token]) % ratio]
            rows[page, 2 * width * index : 2 * width * (index + 1)] = torch.cat((inputs["kv"][token], gate))
    moved = {name: tensor.to(device) for name, tensor in inputs.items()}
    ops.compressor_store(moved["kv"], moved["gate"], moved["ape"], moved["positions"], cache, moved["slot_mapping"])
    assert torch.equal(storage.cpu(), expected)


def test_widens_narrow_projections(generator: torch.Generator, device: torch.device, make_cache) -> None:
    inputs = {name: tensor.to(device) for name, tensor in make_inputs(64, 4, 8, 40, generator).items()}
    kv, gate = inputs["kv"].bfloat16(), inputs["gate"].bfloat16()
    narrow, wide = make_cache(10, 4, 128, torch.float32)[0], make_cache(10, 4, 128, torch.float32)[0]
    ops.compressor_store(kv, gate, inputs["ape"], inputs["positions"], narrow, inputs["slot_mapping"])
    ops.compressor_store(kv.float(), gate.float(), inputs["ape"], inputs["positions"], wide, inputs["slot_mapping"])
    assert torch.equal(narrow.contiguous().view(torch.int32), wide.contiguous().view(torch.int32))


def test_column_slices(generator: torch.Generator, device: torch.device, make_cache) -> None:
    inputs = {name: tensor.to(device) for name, tensor in make_inputs(256, 4, 33, 100, generator).items()}
    merged = torch.cat((torch.full((33, 7), torch.nan, device=device), inputs["kv"], inputs["gate"]), dim=1)
    kv, gate = merged[:, 7 : 7 + 256], merged[:, 7 + 256 :]
    (sliced, sliced_storage), (whole, whole_storage) = (make_cache(25, 4, 512, torch.float32) for _ in range(2))
    ops.compressor_store(kv, gate, inputs["ape"], inputs["positions"], sliced, inputs["slot_mapping"])
    ops.compressor_store(inputs["kv"], inputs["gate"], inputs["ape"], inputs["positions"], whole, inputs["slot_mapping"])
    assert torch.equal(sliced_storage, whole_storage)


def test_all_slots_absent(generator: torch.Generator, device: torch.device, make_cache) -> None:
    inputs = {name: tensor.to(device) for name, tensor in make_inputs(256, 4, 33, 100, generator).items()}
    cache, storage = make_cache(25, 4, 512, torch.float32)
    inputs["slot_mapping"].fill_(-1)
    ops.compressor_store(inputs["kv"], inputs["gate"], inputs["ape"], inputs["positions"], cache, inputs["slot_mapping"])
    assert storage.eq(0xFF).all()


def test_addresses_beyond_int32(generator: torch.Generator, device: torch.device) -> None:
    """The last page of a cache of 9 GB, of which only it is touched: its rows' offsets need 64 bits, as elements too."""
    inputs = {name: tensor.to(device) for name, tensor in make_inputs(512, 128, 8, 8, generator).items()}
    cache = torch.empty(270_000, 8, 1024, device=device)
    cache[-1] = 0.0
    small = torch.zeros_like(cache[-1:])
    assert cache[:-1].numel() > 2**31
    far = torch.where(inputs["slot_mapping"] >= 0, inputs["slot_mapping"] + 8 * (len(cache) - 1), -1)
    ops.compressor_store(inputs["kv"], inputs["gate"], inputs["ape"], inputs["positions"], small, inputs["slot_mapping"])
    ops.compressor_store(inputs["kv"], inputs["gate"], inputs["ape"], inputs["positions"], cache, far)
    assert small.any() and torch.equal(cache[-1:], small)


@pytest.mark.parametrize(("width", "ratio", "page_size"), SHAPES[:3])
def test_equals_the_compiled_op(width: int, ratio: int, page_size: int, generator: torch.Generator, compiled_op) -> None:
    save = compiled_op("save_partial_states_cpu")
    inputs = make_inputs(width, ratio, 200, 60 * page_size, generator)
    theirs, ours = torch.zeros(60, page_size, 2 * width), torch.zeros(60, page_size, 2 * width)
    save(inputs["kv"], inputs["gate"], inputs["ape"], inputs["positions"], theirs, inputs["slot_mapping"])
    ops.compressor_store(inputs["kv"], inputs["gate"], inputs["ape"], inputs["positions"], ours, inputs["slot_mapping"])
    assert theirs.any() and torch.equal(theirs.view(torch.int32), ours.view(torch.int32))
