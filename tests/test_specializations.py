"""The list of kernel specialisations: it covers every op, and names exactly what Triton compiles."""

from __future__ import annotations

import inspect
from collections import defaultdict
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from triton import knobs

from vllm_dsv4.checkpoint.tiny import preset_config
from vllm_dsv4.config import Dsv4Config
from vllm_dsv4.kernels import _specializations
from vllm_dsv4.kernels._compile import driver_of
from vllm_dsv4.kernels._launch import Launch
from vllm_dsv4.kernels._specializations import INPUTS, NUM_TOKENS, Shapes, specialization_key, specializations
from vllm_dsv4.ops import OPS

pytestmark = pytest.mark.skipif(knobs.runtime.interpret, reason="Triton's interpreter compiles nothing")

_CAPABILITY = (9, 0)


def flash(**overrides: object) -> Dsv4Config:
    return Dsv4Config.from_hf(preset_config("flash", **overrides))


SHAPES = {
    "flash": Shapes(flash()),
    "tp8": Shapes(flash(), tensor_parallel_size=8, indexer_format="mxfp4", kv_dtype=torch.bfloat16),
    "fp8-experts-ep4": Shapes(flash(expert_dtype="fp8"), tensor_parallel_size=2, data_parallel_size=2, expert_parallel=True),
    "unquantized": Shapes(flash(quantized=False)),
    "pro": Shapes(Dsv4Config.from_hf(preset_config("pro")), tensor_parallel_size=16),
}


def test_every_op_is_covered() -> None:
    missing = set(OPS) - set(INPUTS)
    assert not missing, f"add a function to kernels/_specializations.py that makes the arguments of {sorted(missing)}"
    assert set(INPUTS) <= set(OPS)


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_inputs_fit_the_ops_signatures(shapes: Shapes) -> None:
    for op, inputs in INPUTS.items():
        reference = getattr(import_module(f"vllm_dsv4.reference.{op}"), f"{op}_ref")
        for call in inputs(shapes, 3):
            inspect.signature(reference).bind(*call.args, **call.kwargs)


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_no_other_number_of_tokens_needs_another_kernel(shapes: Shapes) -> None:
    known = {specialization_key(found.launch) for found in specializations(shapes, _CAPABILITY, 132)}
    others = tuple(sorted({*range(1, 150), *range(200, 9000, 397), 4096 + 256, 12288}))
    for found in specializations(shapes, _CAPABILITY, 132, others):
        assert specialization_key(found.launch) in known, f"{found.op}: {found.kernel} for {found.num_tokens} tokens"


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_kernels_serve_ranges_of_numbers_of_tokens(shapes: Shapes) -> None:
    """A kernel for some multiples only is one that Triton specialised on a number that changes from step to step."""
    for found in specializations(shapes, _CAPABILITY, 132):
        between = tuple(size for size in NUM_TOKENS if found.num_tokens[0] <= size <= found.num_tokens[-1])
        assert found.num_tokens == between, f"{found.op}: {found.kernel} needs do_not_specialize: it is for {found.num_tokens} tokens"


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_launches_of_one_key_are_compiled_once(shapes: Shapes, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = defaultdict(set)
    with monkeypatch.context() as patch:
        patch.setattr(_specializations, "specialization_key", id)  # keeps all launches
        everything = specializations(shapes, _CAPABILITY, 132, (1, 2, 16, 17, 500, 4096))
    for found in everything:
        keys[specialization_key(found.launch)].add(_triton_key(found.launch))
    assert all(len(found) == 1 for found in keys.values())
    assert len(keys) == len(set.union(*keys.values())), "different keys of what Triton compiles once"


def _triton_key(launch: Launch) -> str:
    """Under which Triton would keep the compiled kernel in this process, without compiling it."""
    seen: list[str] = []
    launch.kernel.device_caches.clear()  # the hook is called for kernels that this process does not have yet
    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = lambda **what: seen.append(what["key"]) or True
    try:
        with driver_of(_CAPABILITY):
            launch.kernel.warmup(*launch.args, grid=(1,), **launch.options)
    finally:
        knobs.runtime.jit_cache_hook = before
    return f"{launch.kernel.__module__}.{launch.kernel.__name__} {seen[0]}"


def test_capability_and_processors_choose_kernels() -> None:
    names = lambda *gpu: {str(found.constants) for found in specializations(SHAPES["flash"], *gpu, (1,))}  # noqa: E731
    assert names((9, 0), 132) != names((8, 0), 132)
    assert names((8, 9), 142) != names((8, 9), 58)


def test_formats_choose_kernels() -> None:
    flash_shapes = SHAPES["flash"]
    kernels = {
        str(sorted(str(found.constants) for found in specializations(shapes, _CAPABILITY, 132, (1,))))
        for shapes in (flash_shapes, replace(flash_shapes, kv_dtype=torch.bfloat16), replace(flash_shapes, indexer_format="mxfp4"))
    }
    assert len(kernels) == 3
