"""How closely an op must match its exact result, by where it ran."""

from __future__ import annotations

import torch

RELATIVE_NORM = {torch.bfloat16: 2e-3, torch.float16: 5e-4, torch.float32: 1e-5}
"""Bound on ‖out − exact‖ / ‖exact‖ for a GPU kernel: what one rounding to the dtype costs on average, with little to spare."""


def assert_matches(out: torch.Tensor, exact: torch.Tensor) -> None:
    """``exact`` is float64, on the CPU, and evaluated otherwise than by the op.

    A reference op, on the CPU, must round it correctly: both are exact to 2^-45 or so, and rounding to ``out``'s dtype hides
    that. A kernel must come close.
    """
    assert out.shape == exact.shape
    assert not out.isnan().any()
    if out.device.type == "cpu" and out.dtype != torch.float64:
        assert torch.equal(out, exact.to(out.dtype))
        return
    bound = RELATIVE_NORM.get(out.dtype, 1e-12)
    assert (out.cpu().double() - exact).norm() <= bound * exact.norm()
