"""Which implementation of the ops a device gets: the one place where that is decided."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from vllm_dsv4 import envs

BACKENDS = {"reference": "vllm_dsv4.reference"}
"""Backend name to the package that holds its ops."""


@dataclass(frozen=True)
class Backend:
    name: str
    reason: str


def select_backend(device: torch.device | str) -> Backend:
    """Choose the implementation for ``device``; ``VLLM_DSV4_BACKEND`` overrides.

    Raises:
        ValueError: the variable names no backend.
    """
    return _select(torch.device(device).type, envs.backend())


@cache
def _select(device_type: str, override: str | None) -> Backend:
    if override is not None:
        if override not in BACKENDS:
            raise ValueError(f"VLLM_DSV4_BACKEND={override!r} is not a backend; choose one of {sorted(BACKENDS)}")
        return Backend(override, "chosen by VLLM_DSV4_BACKEND")
    if device_type == "cpu":
        return Backend("reference", "the CPU runs the reference ops (PyTorch)")
    return Backend("reference", f"no {device_type} kernels in this version: the reference ops (PyTorch) run, slowly")
