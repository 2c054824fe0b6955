"""What the benchmarks share: how an op is described, timed, and compared with what the chip can do.

A benchmark file defines ``cases(device) -> Iterator[Work]``; ``benchmarks/kernels.py`` runs all of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

_FLUSH_BYTES = 256 << 20
"""More than any GPU's L2 cache: what a timed run reads must come from memory, as it does in a model of many layers."""


@dataclass(frozen=True)
class Work:
    """One timed case: ``run()`` must move ``bytes`` (each once) and compute ``flops``; 0 = not what bounds it."""

    case: str
    run: Callable[[], object]
    bytes: int = 0
    flops: int = 0


@dataclass(frozen=True)
class Ceilings:
    copy_bytes_per_s: float
    matmul_flops_per_s: float


def time_gpu(run: Callable[[], object], repeats: int = 25) -> float:
    """Median seconds that the GPU takes for ``run``, captured as a CUDA graph, with a cold L2 cache."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        flush.zero_()
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) / 1e3


def measure_ceilings() -> Ceilings:
    """What a large device copy and a large bfloat16 matrix product reach on this chip."""
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / time_gpu(lambda: target.copy_(source))
    size = 8192
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(a)
    return Ceilings(copy, 2 * size**3 / time_gpu(lambda: torch.mm(a, b, out=out)))


def report(op: str, works: Iterator[Work], ceilings: Ceilings) -> list[dict[str, object]]:
    """Time every case, print a line for each, and return the figures."""
    rows: list[dict[str, object]] = []
    for work in works:
        seconds = time_gpu(work.run)
        row: dict[str, object] = {"op": op, "case": work.case, "us": seconds * 1e6}
        line = f"{op:20} {work.case:44} {seconds * 1e6:9.1f} us"
        if work.bytes:
            rate = work.bytes / seconds
            row |= {"bytes_per_s": rate, "of_copy": rate / ceilings.copy_bytes_per_s}
            line += f"  {rate / 1e9:7.0f} GB/s ({rate / ceilings.copy_bytes_per_s:4.0%} of copy)"
        if work.flops:
            rate = work.flops / seconds
            row |= {"flops_per_s": rate, "of_matmul": rate / ceilings.matmul_flops_per_s}
            line += f"  {rate / 1e12:6.1f} TFLOP/s ({rate / ceilings.matmul_flops_per_s:4.0%} of matmul)"
        print(line, flush=True)
        rows.append(row)
    return rows


def main(op: str, cases: Callable[[torch.device], Iterator[Work]]) -> None:
    """Entry point of a single benchmark file."""
    if not torch.cuda.is_available():
        raise SystemExit("the kernel benchmarks need a CUDA GPU, and torch sees none")
    report(op, cases(torch.device("cuda")), measure_ceilings())
