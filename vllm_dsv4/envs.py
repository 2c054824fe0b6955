"""Every environment variable that this package reads."""

from __future__ import annotations

import os


def disabled() -> bool:
    """``VLLM_DSV4_DISABLE=1``: register nothing, so that vLLM's in-tree model (if any) is used."""
    return _flag("VLLM_DSV4_DISABLE")


def forced() -> bool:
    """``VLLM_DSV4_FORCE=1``: register also with a vLLM outside the supported version window."""
    return _flag("VLLM_DSV4_FORCE")


def backend() -> str | None:
    """``VLLM_DSV4_BACKEND``: name of the op implementation to use, instead of the choice by device (see ``backend.py``)."""
    return os.environ.get("VLLM_DSV4_BACKEND") or None


def _flag(name: str) -> bool:
    value = os.environ.get(name, "0")
    if value not in ("0", "1", ""):
        raise ValueError(f"{name} must be 0 or 1, got {value!r}")
    return value == "1"
