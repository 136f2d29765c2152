"""FP8 activations: one fp32 scale a row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from formats.reference import ELEMENTS, decode_codes, round_to_codes
from formats.samples import gaussian, heavy_tailed
from mxquant.formats import FORMATS, quantize_rows

FP8 = {"fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}


@pytest.mark.parametrize("name, element", FP8.items())
def test_the_scale_is_amax_over_the_largest_value(name: str, element: str) -> None:
    fmt = ELEMENTS[element]
    for x in (gaussian(16, 100), heavy_tailed(16, 33), gaussian(8, 64) * np.float32(1e20), gaussian(1, 1)):
        codes, scale = quantize_rows(torch.from_numpy(x), FORMATS[name])
        expected = np.abs(x).max(axis=-1, keepdims=True) / np.float32(fmt.max_value)
        assert codes.shape == x.shape
        assert codes.dtype == torch.uint8
        np.testing.assert_array_equal(scale.numpy(), expected)
        np.testing.assert_array_equal(codes.numpy(), round_to_codes((x / expected).astype(np.float64), fmt))
        assert ((codes & 0x7F).amax(-1) == fmt.finite_codes - 1).all()  # the largest element is the largest code


@pytest.mark.parametrize("name, element", FP8.items())
def test_the_error_is_half_a_step(name: str, element: str) -> None:
    fmt, x = ELEMENTS[element], gaussian(32, 256)
    codes, scale = quantize_rows(torch.from_numpy(x), FORMATS[name])
    y = x / scale.numpy()
    error = np.abs(decode_codes(codes.numpy(), fmt) - y)
    half_step = np.maximum(np.abs(y) * 2.0 ** -(fmt.mantissa_bits + 1), fmt.magnitudes[1] / 2)
    assert (error <= half_step * (1 + 2.0**-20)).all()  # y itself is rounded to fp32


@pytest.mark.parametrize("name", FP8)
def test_equal_values_give_equal_bytes_whatever_the_type(name: str) -> None:
    x = torch.from_numpy(gaussian(16, 96)).half().bfloat16().half().float()
    expected = quantize_rows(x, FORMATS[name])
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert all(map(torch.equal, quantize_rows(x.to(dtype), FORMATS[name]), expected))


@pytest.mark.parametrize("name", FP8)
def test_an_all_zero_row_has_scale_one(name: str) -> None:
    x = torch.tensor([[0.0, -0.0, 0.0], [1.0, 2.0, -4.0]])
    codes, scale = quantize_rows(x, FORMATS[name])
    assert scale[0] == 1
    assert codes[0].tolist() == [0, 0x80, 0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", FP8)
def test_a_row_that_is_not_finite_is_nan_and_the_others_are_not(name: str, value: float) -> None:
    x = torch.from_numpy(gaussian(3, 40))
    expected = quantize_rows(x, FORMATS[name])
    x[1, 7] = value
    codes, scale = quantize_rows(x, FORMATS[name])
    assert scale.isnan().squeeze(-1).tolist() == [False, True, False]
    assert (codes[1] == 0).all()
    assert torch.equal(codes[::2], expected[0][::2])
    assert torch.equal(scale[::2], expected[1][::2])


@pytest.mark.parametrize("name, element", FP8.items())
def test_a_static_scale_is_used_as_given_and_saturates(name: str, element: str) -> None:
    fmt, x = ELEMENTS[element], gaussian(8, 64)
    static = np.float32(0.5 / fmt.max_value)
    codes, scale = quantize_rows(torch.from_numpy(x), FORMATS[name], torch.tensor(static))
    assert scale.shape == (8, 1)
    assert (scale == static).all()
    expected = round_to_codes((x / static).astype(np.float64), fmt)
    np.testing.assert_array_equal(codes.numpy(), expected)
    assert (expected & 0x7F).max() == fmt.finite_codes - 1


@pytest.mark.parametrize("amax", [2.0**-149, 2.0**-130, 1e-30, 3e38])
@pytest.mark.parametrize("name, element", FP8.items())
def test_rows_of_extreme_magnitude(name: str, element: str, amax: float) -> None:
    """The scale never underflows to 0, so that no row becomes NaN."""
    codes, scale = quantize_rows(torch.full((1, 4), amax), FORMATS[name])
    values = decode_codes(codes.numpy(), ELEMENTS[element]) * scale.numpy().astype(np.float64)
    assert np.isfinite(values).all()
    assert (scale > 0).all()
    assert np.abs(values - amax).max() <= max(amax * 2.0**-3, 2.0**-126 * ELEMENTS[element].magnitudes[1])


@pytest.mark.parametrize("name", FP8)
def test_shapes_and_memory(name: str) -> None:
    fmt, x = FORMATS[name], torch.randn(6, 4, 40)
    codes, scale = quantize_rows(x, fmt)
    assert scale.shape == (6, 4, 1)
    for view, expected in ((x[::2], codes[::2]), (x.transpose(0, 1), codes.transpose(0, 1)), (x[0, 0], codes[0, 0])):
        assert torch.equal(quantize_rows(view, fmt)[0], expected)
    empty, empty_scale = quantize_rows(torch.empty(0, 40), fmt)
    assert empty.shape == (0, 40)
    assert empty_scale.shape == (0, 1)
