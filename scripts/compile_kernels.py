"""Compile every kernel that serving DeepSeek-V4-Flash can meet, for every architecture, and check what the kernels take.

    python scripts/compile_kernels.py --markdown docs/kernels.md

No GPU is needed. It is a failure (status 1) if a kernel does not compile, if a block takes more shared memory than the chip has
for one, or if a kernel of decode steps spills registers to local memory. Triton's cache makes a second run fast.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from vllm_dsv4.checkpoint.tiny import preset_config
from vllm_dsv4.config import Dsv4Config
from vllm_dsv4.kernels._compile import Resources, compile_launch
from vllm_dsv4.kernels._launch import Capability
from vllm_dsv4.kernels._specializations import Shapes, Specialization, specialization_key, specializations
from vllm_dsv4.kernels._warmup import name_of

DECODE_TOKENS = 128
"""A kernel is of decode if a step of so many tokens, or fewer, runs it."""


@dataclass(frozen=True)
class Chip:
    """GPUs of one compute capability."""

    names: str
    num_sms: tuple[int, ...]
    """Numbers of multiprocessors, few and many: kernels choose by them."""
    shared_kib: int
    """Shared memory that one block can have."""


CHIPS: dict[Capability, Chip] = {
    (8, 0): Chip("A100", (98, 108), 163),
    (8, 6): Chip("A10, A40, RTX 30", (72, 84), 99),
    (8, 9): Chip("L4, L40S, RTX 40", (58, 142), 99),
    (9, 0): Chip("H100, H200", (114, 132), 227),
    (10, 0): Chip("B200", (148,), 227),
    (12, 0): Chip("RTX 50, RTX PRO 6000", (70, 188), 99),
    (12, 1): Chip("GB10", (48,), 99),
}


@dataclass(frozen=True)
class Row:
    """One compiled kernel."""

    capability: Capability
    op: str
    kernel: str
    num_tokens: tuple[int, int]
    """The fewest and the most (of those tried) that it is for."""
    constants: dict[str, object]
    resources: Resources | None
    """None: it did not compile."""
    error: str = ""

    @property
    def is_decode(self) -> bool:
        return self.num_tokens[0] <= DECODE_TOKENS

    def failure(self) -> str | None:
        """What is wrong with it."""
        limit = CHIPS[self.capability].shared_kib * 1024
        if self.resources is None:
            what = f"does not compile: {self.error}"
        elif self.resources.shared_bytes > limit:
            what = f"takes {self.resources.shared_bytes} bytes of shared memory; the chip has {limit} for a block"
        elif self.is_decode and self.resources.local_bytes:
            what = f"spills {self.resources.local_bytes} bytes a thread, in decode"
        else:
            return None
        first, last = self.num_tokens
        return f"{architecture(self.capability)} {self.op}: {self.kernel} for {first} to {last} tokens {what} {self.constants}"


def architecture(capability: Capability) -> str:
    return f"sm_{capability[0]}{capability[1]}"


def flash_shapes(tensor_parallel_size: int) -> Shapes:
    return Shapes(Dsv4Config.from_hf(preset_config("flash")), tensor_parallel_size)


@cache
def kernels_of(capability: Capability, tensor_parallel_size: int) -> list[Specialization]:
    """What is compiled for GPUs of ``capability``, whichever number of multiprocessors they have."""
    shapes = flash_shapes(tensor_parallel_size)
    found = {}
    for num_sms in CHIPS[capability].num_sms:
        for specialization in specializations(shapes, capability, num_sms):
            found.setdefault(specialization_key(specialization.launch), specialization)
    return list(found.values())


Task = tuple[Capability, int, int]
"""Capability, tensor-parallel size and place in ``kernels_of``: launches themselves do not travel between processes."""


def compile_one(task: Task) -> Row:
    capability, tensor_parallel_size, index = task
    found = kernels_of(capability, tensor_parallel_size)[index]
    resources, error = None, ""
    try:
        resources = compile_launch(found.launch, capability)
    except Exception as exception:  # of any kind: it is the kernel's, and the others are still to be compiled
        error = f"{type(exception).__name__}: {exception}"
    constants = {name: str(value) for name, value in found.constants.items()}
    tokens = (found.num_tokens[0], found.num_tokens[-1])
    return Row(capability, found.op, name_of(found.launch), tokens, constants, resources, error)


def compile_all(tasks: Iterable[Task], jobs: int) -> list[Row]:
    """The rows of ``tasks``, in their order."""
    tasks = list(tasks)
    if jobs == 1:
        return [compile_one(task) for task in tasks]
    # Not forked: the parent may run threads.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(compile_one, task): index for index, task in enumerate(tasks)}
        rows = {}
        for future in as_completed(futures):
            rows[futures[future]] = future.result()
            if sys.stderr.isatty():
                print(f"\r{len(rows)}/{len(tasks)}", end="", file=sys.stderr, flush=True)
    return [rows[index] for index in range(len(tasks))]


def all_tasks(capabilities: Iterable[Capability], tensor_parallel_size: int) -> list[Task]:
    return [
        (capability, tensor_parallel_size, index)
        for capability in capabilities
        for index in range(len(kernels_of(capability, tensor_parallel_size)))
    ]


def table(rows: list[Row]) -> str:
    """All rows, as text."""
    lines = [f"{'':6} {'op':20} {'kernel':44} {'tokens':>13} {'registers':>9} {'local':>6} {'shared':>7}"]
    for row in rows:
        tokens = f"{row.num_tokens[0]}..{row.num_tokens[1]}"
        used = row.resources
        figures = f"{used.registers:9} {used.local_bytes:6} {used.shared_bytes:7}" if used else "does not compile"
        lines.append(f"{architecture(row.capability):6} {row.op:20} {row.kernel:44} {tokens:>13} {figures}")
    return "\n".join(lines)


_INTRODUCTION = """# What the kernels take

Written by `python scripts/compile_kernels.py --markdown docs/kernels.md`, which compiles every kernel that serving
DeepSeek-V4-Flash (quantised, one GPU) can meet, for every architecture and without a GPU.

A cell is the most that any variant of the kernel takes: *registers a thread / KiB of shared memory a block*, and in **bold** the
bytes a thread that it spills to local memory, if any. The run fails if a block takes more shared memory than the architecture
has for one, or if a kernel that steps of up to {decode} tokens run spills at all; a few bytes in prefill are shown, and tolerated.
"""


def markdown(rows: list[Row]) -> str:
    """The page: a row a kernel, a column an architecture."""
    capabilities = sorted({row.capability for row in rows})
    heads = [architecture(capability) for capability in capabilities]
    lines = [_INTRODUCTION.format(decode=DECODE_TOKENS), *_limits(capabilities), ""]
    lines += ["| op | kernel | " + " | ".join(heads) + " |", "|---|---|" + "---|" * len(heads)]
    names = sorted({(row.op, row.kernel) for row in rows})
    for op, kernel in names:
        cells = (_cell([row for row in rows if (row.capability, row.op, row.kernel) == (one, op, kernel)]) for one in capabilities)
        lines.append(f"| {op} | `{kernel}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _limits(capabilities: list[Capability]) -> Iterator[str]:
    yield "| architecture | GPUs, among others | shared memory a block |"
    yield "|---|---|---|"
    for capability in capabilities:
        yield f"| {architecture(capability)} | {CHIPS[capability].names} | {CHIPS[capability].shared_kib} KiB |"


def _cell(rows: list[Row]) -> str:
    used = [row.resources for row in rows if row.resources]
    if not used:
        return "-"
    shared = max(resources.shared_bytes for resources in used) / 1024
    spilled = max(resources.local_bytes for resources in used)
    return f"{max(resources.registers for resources in used)} / {shared:.3g}" + (f" **{spilled}**" if spilled else "")


def main() -> int:
    args = _parse_args()
    started = time.monotonic()
    rows = compile_all(all_tasks(args.capabilities, args.tensor_parallel_size), args.jobs)
    print(table(rows))
    if args.markdown:
        args.markdown.write_text(markdown(rows))
    failures = [failure for row in rows if (failure := row.failure())]
    print(f"{len(rows)} kernels in {time.monotonic() - started:.0f} s, {len(failures)} failures")
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--capabilities", type=_capability, nargs="+", default=list(CHIPS), metavar="9.0", help="only these")
    parser.add_argument("--markdown", type=Path, help="write the compact table here")
    return parser.parse_args()


def _capability(text: str) -> Capability:
    major, _, minor = text.partition(".")
    capability = (int(major), int(minor))
    if capability not in CHIPS:
        raise argparse.ArgumentTypeError(f"{text} is none of {', '.join(f'{a}.{b}' for a, b in CHIPS)}")
    return capability


if __name__ == "__main__":
    sys.exit(main())
