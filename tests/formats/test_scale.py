"""Scale bytes from a block's largest magnitude, and the values of scale bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from formats.reference import ELEMENTS, MODES, round_to_codes, scale_bytes
from mxquant.formats import ELEMENT_FORMATS, nvfp4_per_tensor_scale, nvfp4_row_scale
from mxquant.formats.scale import e4m3_from_amax, e4m3_to_float, e8m0_from_amax, e8m0_reciprocal, e8m0_to_float

INFINITY = 0x7F800000


def bytes_of(bits: np.ndarray, element: str, mode: str) -> np.ndarray:
    return (
        e8m0_from_amax(torch.from_numpy(bits.astype(np.int32)), ELEMENT_FORMATS[element], mode).numpy().astype(np.uint8)
    )


def bytes_by_definition(bits: np.ndarray, element: str, mode: str) -> np.ndarray:
    return scale_bytes(bits.astype(np.uint32).view(np.float32).astype(np.float64), ELEMENTS[element], mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("element", ELEMENTS)
def test_all_exponents_around_every_threshold(element: str, mode: str) -> None:
    """Every exponent of fp32 with the mantissas at which some mode or format changes its mind, and their neighbours."""
    thresholds = [0, 1 << 22, 3 << 21, 7 << 20, 15 << 19, 1 << 23]  # 1, 1.5, 1.75, 1.875, 1.9375, 2
    mantissas = sorted({m + d for m in thresholds for d in (-2, -1, 0, 1, 2) if 0 <= m + d < 1 << 23})
    bits = ((np.arange(255) << 23)[:, None] | np.array(mantissas)[None, :]).ravel()
    np.testing.assert_array_equal(bytes_of(bits, element, mode), bytes_by_definition(bits, element, mode))


@settings(max_examples=60, deadline=None)
@given(bits=st.integers(0, INFINITY - 1))
def test_any_finite_magnitude_follows_the_definition(bits: int) -> None:
    for element in ELEMENTS:
        for mode in MODES:
            assert bytes_of(np.array([bits]), element, mode) == bytes_by_definition(np.array([bits]), element, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("element", ELEMENTS)
def test_zero_infinity_and_nan(element: str, mode: str) -> None:
    bits = np.array([0, INFINITY, INFINITY + 1, 0x7FC00000, 0x7FFFFFFF])
    assert bytes_of(bits, element, mode).tolist() == [0, 255, 255, 255, 255]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("element", ELEMENTS)
def test_bytes_grow_with_the_magnitude_and_stay_in_range(element: str, mode: str) -> None:
    bits = np.append(np.arange(0, INFINITY, 65521), INFINITY - 1)
    scale = bytes_of(bits, element, mode).astype(int)
    assert (np.diff(scale) >= 0).all()
    assert scale.min() == 0
    assert scale.max() <= min(254, 255 - ELEMENTS[element].max_exponent)


@pytest.mark.parametrize("element", ELEMENTS)
def test_rceil_is_the_smallest_scale_that_does_not_saturate(element: str) -> None:
    bits = np.random.default_rng(0).integers(1, INFINITY, 4000)
    amax = bits.astype(np.uint32).view(np.float32).astype(np.float64)
    scale = 2.0 ** (bytes_of(bits, element, "rceil").astype(np.float64) - 127)
    largest = ELEMENTS[element].max_value
    assert ((amax <= largest * scale) | (scale == 2.0**127)).all()
    assert ((amax > largest * scale / 2) | (scale == 2.0**-127)).all()


@pytest.mark.parametrize("element", ELEMENTS)
def test_the_modes_are_ordered(element: str) -> None:
    """floor <= even_fp4, even, rceil <= ceil <= floor + 1."""
    bits = np.random.default_rng(1).integers(0, INFINITY, 4000)
    floor, even, even_fp4, rceil, ceil = (
        bytes_of(bits, element, mode).astype(int) for mode in ("floor", "even", "even_fp4", "rceil", "ceil")
    )
    for middle in (even, even_fp4, rceil):
        assert (floor <= middle).all()
        assert (middle <= ceil).all()
    assert (ceil <= floor + 1).all()
    assert (even <= even_fp4).all()
    if element == "e2m1":
        assert (even == even_fp4).all()


@pytest.mark.parametrize(
    "below_or_above, exponent",
    [
        (np.nextafter(np.float32(2.0**-20), np.float32(0)), -21),
        (np.float32(2.0**-20), -20),
        (np.float32(6 * 2.0**10), 12),
    ],
)
def test_an_ulp_from_a_power_of_two(below_or_above: np.float32, exponent: int) -> None:
    """Logarithms in fp32 round 2^-20 (1 - 2^-24) up to 2^-20 (byte 105 for 104) and 6 * 2^10 (1 + 2^-23) down."""
    bits = np.array([below_or_above]).view(np.int32)
    assert bytes_of(bits, "e2m1", "floor") == exponent - 2 + 127
    above = np.array([np.nextafter(np.float32(6 * 2.0**10), np.float32(np.inf))]).view(np.int32)
    assert bytes_of(above, "e2m1", "rceil") == 138


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'round'.*floor"):
        e8m0_from_amax(torch.zeros(1, dtype=torch.int32), ELEMENT_FORMATS["e2m1"], "round")


def test_every_byte_is_a_power_of_two_and_255_is_nan() -> None:
    """Byte 134 is 128, and 255 alone is NaN; byte 0 is 2^-127, a subnormal of fp32 and bf16."""
    byte = torch.arange(256, dtype=torch.uint8)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        values = e8m0_to_float(byte, dtype)
        assert values.dtype == dtype
        assert values[:255].double().tolist() == [2.0 ** (b - 127) for b in range(255)]
        assert values.isnan().tolist() == [False] * 255 + [True]


def test_the_reciprocal_of_every_scale_that_a_block_can_have() -> None:
    reciprocal = e8m0_reciprocal(torch.arange(255, dtype=torch.int32)).double()
    assert reciprocal.tolist() == [2.0 ** (127 - b) for b in range(255)]


def test_nvfp4_per_tensor_scale_is_amax_over_2688() -> None:
    x = torch.tensor([[1.0, -2688.0, 0.5]])
    assert nvfp4_per_tensor_scale(x) == 1
    assert nvfp4_per_tensor_scale(x).shape == ()
    assert nvfp4_per_tensor_scale(torch.tensor([7.0])) == np.float32(7) / np.float32(2688)
    assert nvfp4_per_tensor_scale(torch.zeros(3, 16)) == 1


def test_nvfp4_row_scale() -> None:
    x = torch.tensor([[2688.0, 1.0], [0.0, 0.0], [-26.88, 3.0]])
    scale = nvfp4_row_scale(x)
    assert scale.shape == (3, 1)
    assert scale[:2, 0].tolist() == [1, 1]
    assert scale[2, 0] == np.float32(26.88) / np.float32(2688)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_nvfp4_per_tensor_scale_is_fp32_arithmetic_whatever_the_type(dtype: torch.dtype) -> None:
    x = torch.randn(64, 64).to(dtype)
    scale = nvfp4_per_tensor_scale(x)
    assert scale.dtype == torch.float32
    assert scale == np.abs(x.float().numpy()).max() / np.float32(2688)


@pytest.mark.parametrize("g", [1.0, 2.0**-20, 3e-30, 7e20])
def test_nvfp4_block_scales_are_amax_over_six_g(g: float) -> None:
    """Rounded to nearest even in E4M3, within 2^-9 and 448; 1 for a zero block."""
    g32 = np.float32(g)
    ratio = np.concatenate([2.0 ** np.linspace(-14, 10, 3001), [0.0]])
    amax = (ratio * 6 * float(g32)).astype(np.float32)
    quotient = np.clip(amax / (np.float32(6) * g32), np.float32(2.0**-9), np.float32(448))
    expected = round_to_codes(np.where(amax == 0, 1, quotient).astype(np.float64), ELEMENTS["e4m3"])
    scale = e4m3_from_amax(torch.from_numpy(amax), torch.tensor(g32))
    np.testing.assert_array_equal(scale.numpy(), expected)
    assert scale[-1] == 0x38
    assert e4m3_to_float(scale).min() == 2.0**-9
    assert e4m3_to_float(scale).max() == 448
