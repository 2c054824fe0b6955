"""The benchmarks' command: what can be checked of it without a GPU."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest
import torch

from benchmarks import kernels
from vllm_dsv4.ops import OPS

RESULTS = {
    "machine": {"device": "A made-up GPU"},
    "ceilings": {"copy_bytes_per_s": 1e12, "matmul_flops_per_s": 1e14},
    "rows": [
        {"op": "linear", "case": "1 token", "us": 3.0, "of_copy": 0.5},
        {"op": "linear", "case": "8192 tokens", "us": 3e3, "of_copy": 0.1, "of_matmul": 0.7},
        {"op": "router", "case": "no ceiling", "us": 2.0},
    ],
    "failures": {},
}


def test_every_op_has_a_benchmark() -> None:
    assert set(kernels.OPS) >= set(OPS)
    for op in kernels.OPS:
        assert callable(import_module(f"benchmarks.bench_{op}").cases)


def test_shares_are_of_what_bounds_the_case() -> None:
    assert kernels.shares(RESULTS) == {"linear": {"1 token": 0.5, "8192 tokens": 0.7}}


def test_figures_can_be_plotted_again(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="draws with matplotlib (extra: bench)")
    figures, plot = tmp_path / "figures.json", tmp_path / "plot.png"
    figures.write_text(json.dumps(RESULTS))
    assert kernels.main(["--replot", str(figures), "--plot", str(plot)]) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_failure_is_shown_and_told_by_the_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "figures.json"
    figures.write_text(json.dumps(RESULTS | {"failures": {"router": "an illegal memory access"}}))
    assert kernels.main(["--replot", str(figures)]) == 1
    assert "router failed:\nan illegal memory access" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks at what a machine without a GPU is told")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(SystemExit, match="need a CUDA GPU"):
        kernels.main([])


def test_unknown_ops_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        kernels.main(["--only", "no_such_op"])
    assert "no_such_op" in capsys.readouterr().err
