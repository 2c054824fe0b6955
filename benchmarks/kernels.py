"""All kernel benchmarks with one command: achieved GB/s and TFLOP/s beside what the chip can do.

    python -m benchmarks.kernels --json out.json --plot out.png

Every ``bench_NAME.py`` runs in a process of its own, so that one that fails leaves the others alone. The ceilings, a large
device copy and a large matrix product, are measured once, on the same chip in the same run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Ceilings, measure_ceilings, report
from benchmarks.plots import plot_shares

OPS = tuple(sorted(path.stem.removeprefix("bench_") for path in Path(__file__).parent.glob("bench_*.py")))

Results = dict[str, Any]
"""``machine`` (device, versions), ``ceilings``, ``rows`` (of ``harness.report``) and ``failures`` (by op)."""


def main(arguments: list[str] | None = None) -> int:
    args = _parse_args(arguments)
    if args.child is not None:
        _print_rows(args.child)
        return 0
    results = json.loads(args.replot.read_text()) if args.replot else run_all(args.only)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    if args.plot:
        plot_shares(args.plot, shares(results), f"Share of what the chip can do: {results['machine']['device']}")
    for op, output in results["failures"].items():
        print(f"\n{op} failed:\n{output}", file=sys.stderr)
    return 1 if results["failures"] else 0


def run_all(ops: list[str]) -> Results:
    """Every benchmark of ``ops``, one after the other.

    Raises:
        SystemExit: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise SystemExit("the kernel benchmarks need a CUDA GPU, and torch sees none")
    ceilings = measure_ceilings()
    machine = _machine()
    print(f"{machine['device']}: copy {ceilings.copy_bytes_per_s / 1e9:.0f} GB/s, matmul {ceilings.matmul_flops_per_s / 1e12:.0f} TFLOP/s")
    results: Results = {"machine": machine, "ceilings": asdict(ceilings), "rows": [], "failures": {}}
    for op in ops:
        rows, error = _run_one(op, ceilings)
        results["rows"] += rows
        if error:
            results["failures"][op] = error
    return results


def _machine() -> dict[str, str]:
    import triton  # noqa: PLC0415 - not needed to plot

    return {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}


def _run_one(op: str, ceilings: Ceilings) -> tuple[list[dict[str, object]], str | None]:
    """Its rows, each printed when it is there, and the end of its output if it failed."""
    command = [sys.executable, "-m", "benchmarks.kernels", "--child", json.dumps([op, *asdict(ceilings).values()])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    rows, others = [], []
    for line in process.stdout:
        if line.startswith("["):
            rows = json.loads(line)
        else:
            print(line, end="", flush=True)
            others.append(line)
    return rows, "".join(others[-15:]) if process.wait() else None


def _print_rows(job: str) -> None:
    op, *ceilings = json.loads(job)
    cases = import_module(f"benchmarks.bench_{op}").cases
    print(json.dumps(report(op, cases(torch.device("cuda")), Ceilings(*ceilings))), flush=True)


def shares(results: Results) -> dict[str, dict[str, float]]:
    """By op and case: the larger of the shares of copy and matmul."""
    found: dict[str, dict[str, float]] = {}
    for row in results["rows"]:
        values = [row[name] for name in ("of_copy", "of_matmul") if name in row]
        if values:
            found.setdefault(row["op"], {})[row["case"]] = max(values)
    return found


def _parse_args(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="OP", nargs="+", choices=OPS, default=list(OPS), help="only these ops")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures here")
    parser.add_argument("--plot", metavar="FILE.png", type=Path, help="draw them here")
    parser.add_argument("--replot", metavar="FILE.json", type=Path, help="take figures that --json wrote instead of measuring")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
