"""Every kernel compiles for every architecture, within the architecture's shared memory, and without spills in decode.

One variant of each kernel here; ``scripts/compile_kernels.py`` compiles all of them, and writes docs/kernels.md.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from triton import knobs

from vllm_dsv4.kernels._compile import Resources
from vllm_dsv4.kernels._warmup import name_of

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import compile_kernels  # noqa: E402

pytestmark = pytest.mark.skipif(knobs.runtime.interpret, reason="Triton's interpreter compiles nothing")

CAPABILITIES = list(compile_kernels.CHIPS)
ROW = compile_kernels.Row((8, 6), "an_op", "a_kernel", (1, 64), {}, Resources(100, 0, 99 * 1024))


def one_of_each(capability: tuple[int, int]) -> list[tuple[tuple[int, int], int, int]]:
    """For every kernel the variant for the fewest tokens."""
    first: dict[tuple[str, str], int] = {}
    kernels = compile_kernels.kernels_of(capability, 1)
    for index in sorted(range(len(kernels)), key=lambda index: kernels[index].num_tokens[0]):
        first.setdefault((kernels[index].op, kernels[index].kernel), index)
    return [(capability, 1, index) for index in first.values()]


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES, ids=compile_kernels.architecture)
def test_kernels_compile_within_limits(capability: tuple[int, int]) -> None:
    rows = compile_kernels.compile_all(one_of_each(capability), jobs=1)
    assert len(rows) > len({row.op for row in rows}) > 20
    assert not [failure for row in rows if (failure := row.failure())]


@pytest.mark.parametrize(
    "change, complaint",
    [
        ({"resources": Resources(100, 0, 99 * 1024 + 1)}, "takes 101377 bytes of shared memory; the chip has 101376"),
        ({"resources": Resources(255, 8, 0)}, "spills 8 bytes a thread, in decode"),
        ({"resources": None, "error": "no such instruction"}, "does not compile: no such instruction"),
        ({"resources": Resources(255, 8, 0), "num_tokens": (129, 8192)}, None),
        ({}, None),
    ],
)
def test_what_counts_as_a_failure(change: dict[str, object], complaint: str | None) -> None:
    failure = replace(ROW, **change).failure()
    assert failure is None if complaint is None else complaint in (failure or "")


def test_the_page_lists_every_kernel() -> None:
    listed = set(re.findall(r"^\| (\w+) \| `([\w.]+)` \|", (ROOT / "docs/kernels.md").read_text(), re.MULTILINE))
    kernels = {(found.op, name_of(found.launch)) for capability in CAPABILITIES for found in compile_kernels.kernels_of(capability, 1)}
    assert listed == kernels, "run python scripts/compile_kernels.py --markdown docs/kernels.md"


def test_the_page_shows_spills_and_what_was_not_compiled() -> None:
    page = compile_kernels.markdown([ROW, replace(ROW, capability=(9, 0), kernel="another", resources=Resources(255, 16, 512))])
    assert "| an_op | `a_kernel` | 100 / 99 | - |" in page
    assert "| an_op | `another` | - | 255 / 0.5 **16** |" in page
