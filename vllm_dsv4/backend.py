"""Which implementation of the ops a device gets: the one place where that is decided."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from vllm_dsv4 import envs

BACKENDS = {"reference": "vllm_dsv4.reference", "triton": "vllm_dsv4.kernels"}
"""Backend name to the package that holds its ops."""

MINIMUM_CAPABILITY = (8, 0)
"""The oldest GPUs that the Triton kernels are compiled for: Ampere."""


@dataclass(frozen=True)
class Backend:
    name: str
    reason: str


def select_backend(device: torch.device | str) -> Backend:
    """Choose the implementation for ``device``; ``VLLM_DSV4_BACKEND`` overrides.

    Raises:
        ValueError: the variable names no backend.
    """
    device = torch.device(device)
    return _select(device.type, device.index, envs.backend())


@cache
def _select(device_type: str, index: int | None, override: str | None) -> Backend:
    if override is not None:
        if override not in BACKENDS:
            raise ValueError(f"VLLM_DSV4_BACKEND={override!r} is not a backend; choose one of {sorted(BACKENDS)}")
        return Backend(override, "chosen by VLLM_DSV4_BACKEND")
    if device_type == "cpu":
        return Backend("reference", "the CPU runs the reference ops (PyTorch)")
    if device_type == "cuda" and torch.cuda.get_device_capability(index) >= MINIMUM_CAPABILITY:
        return Backend("triton", "the portable Triton kernels run on every NVIDIA GPU from sm_80")
    return Backend("reference", f"no kernels for this {device_type} device: the reference ops (PyTorch) run, slowly")
