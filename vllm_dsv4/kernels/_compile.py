"""Compiling recorded launches ahead of time, for any GPU and without one."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_dsv4.kernels._launch import Capability, Launch

_OPTIONS = {"num_warps", "num_stages", "num_ctas", "maxnreg"}
_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}


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
    source = _source(launch)
    options = {name: value for name, value in launch.options.items() if name in _OPTIONS}
    target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
    compiled = triton.compile(source, target=target, options=options)
    registers, local_bytes = _cubin_usage(compiled.asm["cubin"])
    return Resources(registers, local_bytes, compiled.metadata.shared)


def _source(launch: Launch) -> ASTSource:
    kernel = launch.kernel
    names = [parameter.name for parameter in kernel.params]
    values = dict(zip(names, launch.args, strict=False)) | {name: launch.options[name] for name in names if name in launch.options}
    signature: dict[str, str] = {}
    constexprs: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], list[list[object]]] = {}
    for index, parameter in enumerate(kernel.params):
        value = values.get(parameter.name, parameter.default)
        is_one = type(value) is int and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or is_one:
            signature[parameter.name], constexprs[(index,)] = "constexpr", value
            continue
        signature[parameter.name] = _argument_type(parameter.name, value)
        aligned = isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
        if aligned and not parameter.do_not_specialize:
            attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)


def _argument_type(name: str, value: object) -> str:
    if isinstance(value, torch.Tensor) and value.dtype in _POINTERS:
        return _POINTERS[value.dtype]
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    if isinstance(value, float):
        return "fp32"
    found = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
    raise TypeError(f"kernel argument {name!r} is of type {found}; pass float8 tensors as uint8 views")


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
