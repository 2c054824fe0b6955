"""How every kernel is launched, and which hardware it is compiled for.

All launches go through ``launch``, so that they can be recorded instead: ``record_launches`` runs the ops on meta tensors and
collects what they would have compiled. The ahead-of-time check and the warm-up both build on that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton.language as tl

Capability = tuple[int, int]


@dataclass(frozen=True)
class Launch:
    """One launch: the kernel, its positional arguments (meta tensors and numbers) and its keyword arguments."""

    kernel: Any
    args: tuple[Any, ...]
    options: dict[str, Any]


_assumed_capability: Capability | None = None
_assumed_num_sms: int | None = None
_recorded: list[Launch] | None = None


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """``kernel[grid](*args, **options)``; nothing for an empty grid."""
    if _recorded is not None:
        _recorded.append(Launch(kernel, args, options))
    elif all(grid):
        kernel[grid](*args, **options)


@contextmanager
def record_launches(capability: Capability, num_sms: int | None = None) -> Iterator[list[Launch]]:
    """Collect launches for a GPU of ``capability``, with ``num_sms`` multiprocessors, instead of running them."""
    global _recorded, _assumed_num_sms
    with assume_capability(capability):
        _recorded, _assumed_num_sms = [], num_sms
        try:
            yield _recorded
        finally:
            _recorded = _assumed_num_sms = None


@contextmanager
def assume_capability(capability: Capability) -> Iterator[None]:
    """Choose variants as on a GPU of ``capability``, for example software FP8 as on (8, 0), whatever this machine has."""
    global _assumed_capability
    before, _assumed_capability = _assumed_capability, capability
    try:
        yield
    finally:
        _assumed_capability = before


def capability(device: torch.device) -> Capability:
    """The compute capability that kernels for tensors on ``device`` are compiled for."""
    if _assumed_capability is not None:
        return _assumed_capability
    return _cuda_capability(device.index) if device.type == "cuda" else (8, 0)


def has_fp8(device: torch.device) -> bool:
    """Whether the hardware converts float8_e4m3fn; elsewhere kernels do so by integer arithmetic (``_fp8.py``)."""
    return capability(device) >= (8, 9)


def num_sms(device: torch.device) -> int:
    """Streaming multiprocessors of ``device``: how many programs run at once, at least."""
    if _assumed_num_sms is not None:
        return _assumed_num_sms
    return _multi_processor_count(device.index) if device.type == "cuda" else 108


@cache
def _cuda_capability(index: int | None) -> Capability:
    return torch.cuda.get_device_capability(index)


@cache
def _multi_processor_count(index: int | None) -> int:
    return torch.cuda.get_device_properties(torch.device("cuda", index or 0)).multi_processor_count


def dot_dtype(device: torch.device) -> tl.dtype:
    """What ``tl.dot`` takes: bfloat16, in which e4m3, e2m1 and any power-of-two multiple of them are exact. On the CPU, under
    Triton's interpreter, whose bfloat16 products are wrong, float32."""
    return tl.float32 if device.type == "cpu" else tl.bfloat16
