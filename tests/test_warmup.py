"""The warm-up: its workers fill Triton's cache with what launches will look for, and say what fails."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
from triton import knobs

from vllm_dsv4.checkpoint.tiny import preset_config
from vllm_dsv4.config import Dsv4Config
from vllm_dsv4.kernels import _compile, _warmup
from vllm_dsv4.kernels._specializations import Shapes
from vllm_dsv4.kernels._warmup import Share, WarmUp, compile_share

pytestmark = pytest.mark.skipif(knobs.runtime.interpret, reason="Triton's interpreter compiles nothing")

_SHAPES = Shapes(Dsv4Config.from_hf(preset_config("tiny")))
_PARTS = 30


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path


def shares(number: int) -> list[Share]:
    """Of a few kernels each."""
    return [Share(_SHAPES, (8, 0), 108, part, _PARTS) for part in range(number)]


def test_workers_compile_what_launches_look_for(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="vllm.vllm_dsv4")
    warm_up = WarmUp(shares(2))
    warm_up.join()
    compiled = set(cache.iterdir())
    expected = warm_up.launches[0::_PARTS] + warm_up.launches[1::_PARTS]
    assert len(compiled) >= len(expected) > 1
    assert f"kernels: {len(expected)}/{len(warm_up.launches)} compiled" in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    for launch in expected:
        _compile.compile_kernel(launch, (8, 0))
    assert set(cache.iterdir()) == compiled


def test_a_kernel_that_does_not_compile_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(launch: object, capability: object) -> None:
        raise ValueError("no such instruction")

    monkeypatch.setattr(_compile, "compile_kernel", fail)
    reports: list[tuple[str, object]] = []
    compile_share(shares(1)[0], lambda kind, value: reports.append((kind, value)))
    assert ("failure", f"{reports[1][1]} does not compile: no such instruction") in reports
    assert "end" not in dict(reports)


def test_a_worker_that_dies_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    program = tmp_path / "python"
    program.write_text(
        f'#!{sys.executable}\nprint(\'["total", 7]\\n["begin", "_product._tile_kernel"]\\nout of memory\', flush=True)\nexit(3)\n'
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    WarmUp(shares(1)).join()
    assert "a worker ended with status 3 while compiling _product._tile_kernel\nout of memory" in caplog.text


def test_preload_names_the_kernel_that_fails() -> None:
    launch = WarmUp.launches.fget(type("", (), {"_share": shares(1)[0]}))[0]
    with pytest.raises(RuntimeError, match=rf"kernel {_warmup.name_of(launch)} cannot be prepared"):
        _warmup.preload([launch])  # there is no GPU
