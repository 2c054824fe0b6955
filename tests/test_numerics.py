"""Number formats and quantisers of the reference, against values computed here from their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from vllm_dsv4.reference import numerics

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def ceil_log2(x: float) -> int:
    mantissa, exponent = math.frexp(x)  # x = mantissa * 2^exponent, 0.5 <= mantissa < 1
    return exponent - 1 if mantissa == 0.5 else exponent


def nearest_even(x: float, values: list[float]) -> float:
    """The nearest of ``values`` (ascending; the index of a code is its position), ties to the even code."""
    return min(range(len(values)), key=lambda code: (abs(values[code] - x), code % 2))


def test_scale_exponents_of_the_specification() -> None:
    fp8 = {0.0: -22, 1.0: -8, 3.5: -7, 448.0: 0, 448.1: 1}
    fp4 = {6.0: 0, 6.01: 1, 3.0: -1, 0.1: -5, 0.0: -126}
    assert numerics.fp8_scale_exponent(torch.tensor(list(fp8))).tolist() == list(fp8.values())
    assert numerics.fp4_scale_exponent(torch.tensor(list(fp4))).tolist() == list(fp4.values())
    assert numerics.exponent_to_e8m0(numerics.fp8_scale_exponent(torch.tensor([0.0, 1.0, 448.1]))).tolist() == [105, 119, 128]


@pytest.mark.parametrize(("function", "maximum", "floor"), [("fp8_scale_exponent", 448, 1e-4), ("fp4_scale_exponent", 6, 6 * 2.0**-126)])
def test_scale_exponents_at_random_magnitudes(function: str, maximum: int, floor: float, generator: torch.Generator) -> None:
    powers = maximum * 2.0 ** torch.arange(-20, 20)
    amax = torch.cat(
        (
            (torch.rand(500, generator=generator) * 160 - 140).exp2(),
            torch.nextafter(powers, powers * 2),
            powers,
            torch.nextafter(powers, powers / 2),
            torch.tensor([2.0**-149, 3e38]),
        )
    )
    expected = [ceil_log2(float(np.float32(max(np.float32(floor), a)) * np.float32(1 / maximum))) for a in amax.numpy()]
    assert getattr(numerics, function)(amax).tolist() == expected


def test_e8m0_is_exact() -> None:
    byte = torch.arange(255, dtype=torch.uint8)
    value = numerics.e8m0_to_float(byte)
    assert value.double().tolist() == [math.ldexp(1.0, int(b) - 127) for b in byte]
    assert torch.equal(numerics.float_to_e8m0(value), byte)
    assert numerics.e8m0_to_float(torch.tensor([255], dtype=torch.uint8)).isnan().all()
    for bad in (3.0, 0.0, -2.0, math.inf, math.nan, 2.0**-128):
        with pytest.raises(ValueError, match="powers of two"):
            numerics.float_to_e8m0(torch.tensor([1.0, bad]))


def test_e4m3_rounds_to_nearest_even(generator: torch.Generator) -> None:
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().tolist()  # 0 .. 448, ascending
    midpoints = [(a + b) / 2 for a, b in zip(values[:-1], values[1:], strict=True)]
    ties = torch.tensor(midpoints)
    ties = torch.cat((torch.nextafter(ties, 2 * ties), ties, torch.nextafter(ties, 0 * ties)))
    inputs = torch.cat((torch.tensor([*values, 447.9, 448.1, 460.0, 1e9, math.inf, 1e-9]), ties))
    inputs = torch.cat((inputs, torch.randn(500, generator=generator) * 200))
    expected = [nearest_even(min(abs(x), 448.0), values) | (128 if math.copysign(1, x) < 0 else 0) for x in inputs.tolist()]
    assert numerics.quantize_e4m3(inputs).view(torch.uint8).tolist() == expected


def test_e2m1_rounds_to_nearest_even(generator: torch.Generator) -> None:
    midpoints = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    assert numerics.decode_e2m1(numerics.quantize_e2m1(torch.tensor(midpoints))).tolist() == [0, 1, 1, 2, 2, 4, 4]
    ties = torch.tensor(midpoints)
    ties = torch.cat((torch.nextafter(ties, 2 * ties), ties, torch.nextafter(ties, 0 * ties)))
    inputs = torch.cat((torch.tensor([*E2M1, 7.0, 1e9, math.inf]), ties, torch.randn(500, generator=generator) * 3))
    inputs = torch.cat((inputs, -inputs))
    expected = [nearest_even(min(abs(x), 6.0), list(E2M1)) | (8 if math.copysign(1, x) < 0 else 0) for x in inputs.tolist()]
    assert numerics.quantize_e2m1(inputs).tolist() == expected
    assert numerics.decode_e2m1(torch.arange(16, dtype=torch.uint8)).tolist() == [*E2M1, *(-v for v in E2M1)]


def test_nibbles() -> None:
    assert numerics.pack_nibbles(torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)).tolist() == [[0x21, 0x0F]]
    byte = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(numerics.pack_nibbles(numerics.unpack_nibbles(byte)), byte)
    assert numerics.unpack_nibbles(torch.tensor([0x21], dtype=torch.uint8)).tolist() == [1, 2]


@pytest.mark.parametrize("n", [1, 2, 64, 128])
def test_hadamard(n: int, generator: torch.Generator) -> None:
    sign = [[-1.0 if (row & column).bit_count() % 2 else 1.0 for column in range(n)] for row in range(n)]
    x = torch.randn(5, 3, n, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(numerics.hadamard(x), x @ torch.tensor(sign, dtype=torch.float64) / math.sqrt(n), rtol=0, atol=1e-13)


def test_hadamard_refuses_other_sizes() -> None:
    with pytest.raises(ValueError, match="96"):
        numerics.hadamard(torch.ones(96))


def test_block_fp8_weights(generator: torch.Generator) -> None:
    rows, columns = 200, 300  # neither a multiple of 128
    weight = torch.randn(2, rows, columns, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 2, 3, generator=generator)
    value = numerics.dequantize_block_fp8(weight, scale, torch.float64)
    for expert, row, column in [(0, 0, 0), (0, 127, 128), (1, 128, 127), (1, 199, 299), (0, 128, 256)]:
        expected = float(weight[expert, row, column]) * float(scale[expert, row // 128, column // 128])
        assert float(value[expert, row, column]) == expected
    assert value.shape == weight.shape
    powers = scale.log2().ceil().exp2()
    assert torch.equal(numerics.dequantize_block_fp8(weight, powers).double(), numerics.dequantize_block_fp8(weight, powers, torch.float64))


def test_mxfp4_weights(generator: torch.Generator) -> None:
    packed = torch.randint(0, 256, (3, 32), generator=generator, dtype=torch.uint8)
    sf = torch.randint(0, 255, (3, 2), generator=generator, dtype=torch.uint8)
    value = numerics.dequantize_mxfp4(packed, sf, torch.float64)
    for row in range(3):
        for column in range(64):
            code = int(packed[row, column // 2]) >> (4 * (column % 2)) & 0xF
            magnitude = E2M1[code & 7] * math.ldexp(1.0, int(sf[row, column // 32]) - 127)
            assert float(value[row, column]) == (-magnitude if code & 8 else magnitude)


def test_mxfp4_quantisation(generator: torch.Generator) -> None:
    x = torch.randn(50, 96, generator=generator) * (torch.rand(50, 1, generator=generator) * 20 - 10).exp2()
    x[0], x[1] = 0.0, 2.0**-140
    packed, sf = numerics.quantize_mxfp4(x)
    for row in range(50):
        for block in range(3):
            values = x[row, 32 * block : 32 * block + 32]
            amax = np.float32(max(float(values.abs().max()), 6 * 2.0**-126))
            exponent = ceil_log2(float(amax * np.float32(1 / 6)))
            assert int(sf[row, block]) == exponent + 127
            codes = [nearest_even(abs(v) * 2.0**-exponent, list(E2M1)) | (8 if math.copysign(1, v) < 0 else 0) for v in values.tolist()]
            expected = [low | high << 4 for low, high in zip(codes[0::2], codes[1::2], strict=True)]
            assert packed[row, 16 * block : 16 * block + 16].tolist() == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "columns", "group_size"), [(7, 300, 128), (1, 1, 128), (0, 256, 128), (3, 256, 64)])
def test_fp8_round_trip(rows: int, columns: int, group_size: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    """Every value by the definition; the last group may be short."""
    x = (torch.randn(rows, columns, generator=generator) * (torch.rand(rows, 1, generator=generator) * 40 - 20).exp2()).to(dtype)
    e4m3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().tolist()
    expected = []
    for row in x.double().tolist():
        for start in range(0, columns, group_size):
            group = row[start : start + group_size]
            amax = np.float32(max(1e-4, max(map(abs, group))))
            scale = math.ldexp(1.0, ceil_log2(float(amax * np.float32(1 / 448))))
            expected += [math.copysign(e4m3[nearest_even(min(abs(v) / scale, 448.0), e4m3)] * scale, v) for v in group]
    out = numerics.fp8_round_trip(x, group_size)
    assert out.dtype == torch.float64 and out.shape == x.shape
    assert out.flatten().tolist() == expected


def test_quantisers_have_no_bias() -> None:
    x = torch.rand(200_000, 128, generator=torch.Generator().manual_seed(0)) + 0.5  # all positive: a bias cannot cancel
    q, exponent = numerics.quantize_fp8_groups(x, 128)
    fp8 = q.float() * exponent.float().exp2().repeat_interleave(128, -1)
    fp4 = numerics.dequantize_mxfp4(*numerics.quantize_mxfp4(x))
    # The mean of 2.6e7 rounding errors of half a step at most: 2^-4 / sqrt(3 · 2.6e7) = 7e-6 for E4M3; E2M1 steps are 4 times wider.
    assert abs((fp8 - x).mean().item()) < 1e-4
    assert abs((fp4 - x).mean().item()) < 2e-3


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_non_finite_values_stay_visible(bad: float) -> None:
    x = torch.ones(2, 128)
    x[0, 70] = bad
    q, exponent = numerics.quantize_fp8_groups(x, 64)
    value = q.float().unflatten(-1, (2, 64)) * numerics.e8m0_to_float(numerics.exponent_to_e8m0(exponent)).unsqueeze(-1)
    assert value[0, 1].isnan().all() and not value[0, 0].isnan().any() and not value[1].isnan().any()
    value = numerics.dequantize_mxfp4(*numerics.quantize_mxfp4(x))
    assert value[0, 64:96].isnan().all() and value[0, :64].eq(1).all() and value[1].eq(1).all()
