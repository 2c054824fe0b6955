"""Compiling recorded launches ahead of time, for any GPU and without one.

Triton's own launch path does it, up to the launch: so what is compiled, and the key under which Triton's cache on disk keeps
it, are those of the launch that is to come.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from vllm_dsv4.kernels._launch import Capability, Launch

_FLOAT8 = {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu}


@dataclass(frozen=True)
class Resources:
    """What one block of a compiled kernel takes: registers a thread, bytes of local memory a thread (spills), shared bytes."""

    registers: int
    local_bytes: int
    shared_bytes: int


def compile_launch(launch: Launch, capability: Capability) -> Resources:
    """Compile ``launch`` for a GPU of ``capability``; Triton keeps the result in its cache.

    Raises:
        TypeError: an argument of a type that kernels do not take, such as a float8 tensor instead of its bytes.
    """
    compiled = compile_kernel(launch, capability)
    registers, local_bytes = _cubin_usage(compiled.asm["cubin"])
    return Resources(registers, local_bytes, compiled.metadata.shared)


def compile_kernel(launch: Launch, capability: Capability) -> Any:
    """Triton's compiled kernel of ``launch``, from its cache if it is there."""
    check_arguments(launch)
    with driver_of(capability):
        return launch.kernel.warmup(*launch.args, grid=(1,), **launch.options)


def check_arguments(launch: Launch) -> None:
    for parameter, value in zip(launch.kernel.params, launch.args, strict=False):
        if isinstance(value, torch.Tensor) and value.dtype in _FLOAT8:
            raise TypeError(f"kernel argument {parameter.name!r} is of type {value.dtype}; pass float8 tensors as uint8 views")


class _Driver:
    """Answers what Triton asks its driver before it compiles, for a GPU that need not be here."""

    def __init__(self, capability: Capability):
        self.target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> GPUTarget:
        # The key of Triton's cache in this process, where devices are numbers: no kernel of a real one is taken or replaced.
        return self.target

    def get_current_stream(self, device: object) -> int:
        return 0


@contextmanager
def driver_of(capability: Capability) -> Iterator[None]:
    """Let Triton take this for a machine with a GPU of ``capability``, as far as compiling goes."""
    before = driver._active  # ``driver.active`` would look for a GPU
    driver.set_active(_Driver(capability))
    try:
        yield
    finally:
        driver._active = before


def _cubin_usage(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack) a thread, as NVIDIA's cuobjdump, which Triton brings, reads them from the binary."""
    tool = Path(triton.backends.nvidia.__file__).parent / "bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+)", listing)
    assert usage is not None, listing
    return int(usage[1]), int(usage[2])
