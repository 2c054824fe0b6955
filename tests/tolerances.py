"""How closely an op must match its exact result, by where it ran, and what it may take."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

RELATIVE_NORM = {torch.bfloat16: 2e-3, torch.float16: 5e-4, torch.float32: 1e-5}
"""Bound on ‖out − exact‖ / ‖exact‖ for a GPU kernel: what one rounding to the dtype costs on average, with little to spare."""

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels run on the CPU, in Triton's interpreter, which rounds to bfloat16 towards zero."""


def is_kernel_output(out: torch.Tensor) -> bool:
    return out.is_cuda or INTERPRETED


def assert_matches(out: torch.Tensor, exact: torch.Tensor) -> None:
    """``exact`` is float64, on the CPU, and evaluated otherwise than by the op.

    A reference op, on the CPU, must round it correctly: both are exact to 2^-45 or so, and rounding to ``out``'s dtype hides
    that. A kernel must come close: within the bound of its norm, or be a correct rounding.
    """
    assert out.shape == exact.shape
    assert not out.isnan().any()
    if not is_kernel_output(out) and out.dtype != torch.float64:
        assert torch.equal(out, exact.to(out.dtype))
        return
    error = (out.cpu().double() - exact).abs()
    bound = RELATIVE_NORM.get(out.dtype, 1e-12) * (4 if INTERPRETED else 1)
    assert error.norm() <= bound * exact.norm() or _is_rounding(out.dtype, error, exact)


def _is_rounding(dtype: torch.dtype, error: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether every element is as close to the exact one as its dtype allows, up to the error of sums in float32.

    One rounding to bfloat16 costs 1.5e-3 on average, but up to 2^-8 = 3.9e-3 for a single value: of random correct outputs a
    quarter exceed the bound of the norm with one or two elements, and with 33 still one in ten.
    """
    nearest = (exact.to(dtype).double() - exact).abs()
    return bool((error <= nearest + RELATIVE_NORM[torch.float32] * exact.norm()).all())


def assert_matches_experts(out: torch.Tensor, exact: torch.Tensor) -> None:
    """For the routed experts, whose sum is float32 but whose terms have passed through roundings to bfloat16 and to FP8.

    ``exact`` rounds at the same places. Sums in float32 seldom fall to the other side of a tie there: simulated on 120 cases of
    ``test_experts.py`` that cost 3e-4 at most, while leaving out the rounding of gate and up, or of what w2 reads, cost 2.4e-3
    at least.
    """
    if not is_kernel_output(out):
        assert_matches(out, exact)
        return
    assert out.shape == exact.shape
    bound = 5e-2 if INTERPRETED else 2e-3
    assert (out.cpu().double() - exact).norm() <= bound * exact.norm()


def assert_independent_of_batch(op: Callable[[slice], torch.Tensor], num_tokens: int) -> None:
    """``op`` gives the rows [N, ...] of the tokens of a slice: each token's must be the same, bit for bit, in any company.

    A kernel may sum in another order for another batch size.
    """
    together = op(slice(0, num_tokens))
    for start, stop in ((0, 1), (num_tokens // 2, num_tokens // 2 + 1), (num_tokens - 1, num_tokens), (1, num_tokens)):
        alone = op(slice(start, stop))
        if is_kernel_output(together):
            assert_matches(alone, together[start:stop].cpu().double())
        else:
            assert torch.equal(alone, together[start:stop])


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any op allocates: views of its arguments do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        new = (tensor.numel() for tensor in _tensors(result) if tensor.untyped_storage().data_ptr() not in given)
        self.elements = max(self.elements, *new, 0)
        return result


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
