"""Compiling every kernel before the first request: by several processes, while the weights load.

``start`` sets the processes to work; they need no GPU, and fill Triton's cache on disk under the keys of the launches to come.
After ``WarmUp.join``, ``preload`` takes the kernels from there onto the GPU, so that serving compiles nothing. Ranks on one
machine share the cache: let one of them call ``start`` and ``join``, and all of them ``preload`` once it has.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from vllm_dsv4.kernels._launch import Capability, Launch
from vllm_dsv4.kernels._specializations import Shapes, launches

logger = logging.getLogger("vllm.vllm_dsv4")

_LOG_SECONDS = 5.0


@dataclass(frozen=True)
class Share:
    """What one worker compiles: every ``num_parts``-th kernel from the ``part``-th on."""

    shapes: Shapes
    capability: Capability
    num_sms: int | None
    part: int
    num_parts: int


@dataclass
class _Progress:
    """What a worker has reported."""

    total: int = 0
    done: int = 0
    kernel: str | None = None
    """In work."""
    failures: list[str] = field(default_factory=list)
    other_output: list[str] = field(default_factory=list)


def start(shapes: Shapes, capability: Capability, num_workers: int, num_sms: int) -> WarmUp:
    """Begin to compile in ``num_workers`` processes, for a GPU of ``capability`` with ``num_sms`` multiprocessors."""
    return WarmUp([Share(shapes, capability, num_sms, part, num_workers) for part in range(num_workers)])


class WarmUp:
    """Workers that compile the ``shares``, one each."""

    def __init__(self, shares: list[Share]):
        self._share = shares[0]
        self._since = time.monotonic()
        self._progress = [_Progress() for _ in shares]
        # No worker shall open a GPU.
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        self._workers = [
            subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
            )
            for _ in shares
        ]
        # Threads, so that no worker waits for its reports to be read.
        jobs = zip(shares, self._workers, self._progress, strict=True)
        self._readers = [threading.Thread(target=self._follow, args=job, daemon=True) for job in jobs]
        for reader in self._readers:
            reader.start()

    @property
    def launches(self) -> list[Launch]:
        """What the workers compile together."""
        return launches(self._share.shapes, self._share.capability, self._share.num_sms)

    def join(self) -> None:
        """Wait for the workers. What one of them could not compile is logged: ``preload`` will try again, and raise."""
        next_log = self._since + _LOG_SECONDS
        for reader in self._readers:
            while reader.is_alive():
                reader.join(timeout=0.2)
                if time.monotonic() >= next_log:
                    self._log_progress()
                    next_log = time.monotonic() + _LOG_SECONDS
        self._log_progress()
        for worker, progress in zip(self._workers, self._progress, strict=True):
            self._log_failures(worker.wait(), progress)

    def _log_progress(self) -> None:
        total = max(progress.total for progress in self._progress)
        done = sum(progress.done for progress in self._progress)
        logger.info("kernels: %d/%d compiled after %.0f s", done, total, time.monotonic() - self._since)

    @staticmethod
    def _log_failures(status: int, progress: _Progress) -> None:
        for failure in progress.failures:
            logger.warning("kernels: %s", failure)
        if status:
            output = "\n".join(progress.other_output[-20:])
            logger.warning("kernels: a worker ended with status %d while compiling %s\n%s", status, progress.kernel or "nothing", output)

    @staticmethod
    def _follow(share: Share, worker: subprocess.Popen[bytes], progress: _Progress) -> None:
        assert worker.stdin is not None and worker.stdout is not None
        try:
            with worker.stdin as stdin:
                pickle.dump(share, stdin)
        except BrokenPipeError:
            pass  # it has ended, and its status will be seen
        for line in worker.stdout:
            _record(line.decode(errors="replace").rstrip(), progress)


def _record(line: str, progress: _Progress) -> None:
    try:
        kind, value = json.loads(line)
    except (ValueError, TypeError):
        progress.other_output.append(line)
        return
    if kind == "total":
        progress.total = value
    elif kind == "begin":
        progress.kernel = value
    else:
        progress.done += kind == "end"
        progress.failures += [value] if kind == "failure" else []
        progress.kernel = None


def preload(launches: Iterable[Launch]) -> None:
    """Load the kernels of ``launches`` onto the current GPU, compiling those that Triton's cache does not have.

    Raises:
        RuntimeError: a kernel cannot be compiled, or the GPU cannot run it.
    """
    since, number = time.monotonic(), 0
    for launch in launches:
        try:
            compiled = launch.kernel.warmup(*launch.args, grid=(1,), **launch.options)
            number += compiled.run is not None  # which Triton makes, with the kernel on the GPU, when it is first asked for
        except Exception as error:
            raise RuntimeError(f"kernel {name_of(launch)} cannot be prepared for this GPU: {error}") from error
    logger.info("kernels: %d loaded in %.1f s", number, time.monotonic() - since)


def name_of(launch: Launch) -> str:
    return f"{launch.kernel.__module__.rpartition('.')[2]}.{launch.kernel.__name__}"


def compile_share(share: Share, report: Callable[[str, object], None]) -> None:
    """The work of one worker."""
    from vllm_dsv4.kernels._compile import compile_kernel  # noqa: PLC0415 - the serving process does without

    found = launches(share.shapes, share.capability, share.num_sms)
    make_launcher = _launcher_maker()
    report("total", len(found))
    for launch in found[share.part :: share.num_parts]:
        report("begin", name_of(launch))
        try:
            make_launcher(compile_kernel(launch, share.capability))
        except Exception as error:
            report("failure", f"{name_of(launch)} does not compile: {error}")
        else:
            report("end", name_of(launch))


def _launcher_maker() -> Callable[[Any], object]:
    """Compiles the C function by which Triton, to 3.6, launches a kernel; to link it takes NVIDIA's library, but no GPU."""
    from triton.backends.nvidia import driver  # noqa: PLC0415

    try:
        driver.CudaUtils()  # kept in the cache, too
    except Exception:
        return lambda compiled: None
    if not hasattr(driver, "make_launcher"):
        return lambda compiled: None
    return lambda compiled: driver.CudaLauncher(compiled.src, compiled.metadata)


def main() -> None:
    share: Share = pickle.load(sys.stdin.buffer)
    compile_share(share, lambda kind, value: print(json.dumps([kind, value]), flush=True))


if __name__ == "__main__":
    main()
