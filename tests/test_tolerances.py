"""The bounds themselves: right kernels pass, whatever the size of their output, and wrong ones fail."""

from __future__ import annotations

import pytest
import tolerances
import torch
from tolerances import assert_matches, assert_matches_experts


@pytest.fixture
def as_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors are held to the bounds of kernels on a GPU."""
    monkeypatch.setattr(tolerances, "INTERPRETED", False)
    monkeypatch.setattr(tolerances, "is_kernel_output", lambda out: True)


SIZES = [1, 2, 33, 4096]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_in_float32_rounded_once_pass(dtype: torch.dtype, size: int, as_a_kernel: None, generator: torch.Generator) -> None:
    for _ in range(50):
        exact = torch.randn(size, dtype=torch.float64, generator=generator)
        noise = torch.randn(size, dtype=torch.float64, generator=generator) * 1e-7 * exact.norm() * size**-0.5
        assert_matches((exact + noise).float().to(dtype), exact)


@pytest.mark.parametrize("size", SIZES)
def test_one_step_too_far_fails(size: int, as_a_kernel: None) -> None:
    """1.25 is a bfloat16 number; its neighbour is 6e-3 away."""
    exact = torch.full((size,), 1.25, dtype=torch.float64)
    with pytest.raises(AssertionError):
        assert_matches((exact + 2**-7).bfloat16(), exact)


def test_rounding_towards_zero_fails(as_a_kernel: None, generator: torch.Generator) -> None:
    exact = torch.randn(4096, generator=generator)
    truncated = (exact.view(torch.int32) >> 16 << 16).view(torch.float32).bfloat16()
    with pytest.raises(AssertionError):
        assert_matches(truncated, exact.double())


@pytest.mark.parametrize("check", [assert_matches, assert_matches_experts])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_fails(check, value: float, as_a_kernel: None) -> None:
    exact = torch.ones(3, dtype=torch.float64)
    with pytest.raises(AssertionError):
        check(torch.tensor([1.0, value, 1.0]), exact)


@pytest.mark.skipif(tolerances.INTERPRETED, reason="kernels run in Triton's interpreter")
def test_a_reference_must_be_rounded_correctly() -> None:
    """1 + 2^-8 lies halfway between two bfloat16 numbers, of which the even one is right."""
    exact = torch.tensor([1 + 2**-8], dtype=torch.float64)
    assert_matches(torch.tensor([1.0]).bfloat16(), exact)
    with pytest.raises(AssertionError):
        assert_matches(torch.tensor([1 + 2**-7]).bfloat16(), exact)
