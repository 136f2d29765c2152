"""FP8 activations: one fp32 scale a row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from formats.reference import ELEMENTS, decode_codes, round_to_codes
from formats.samples import gaussian, heavy_tailed
from torch import Tensor

from mxquant.formats import FORMATS
from mxquant.reference.fake_quantize import fake_quantize

FP8 = {"fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}


def quantized(x: Tensor, name: str, static: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Values in units of the scales, and the scales."""
    values, scale = fake_quantize(x, FORMATS[name], None, static, torch.float64)
    assert scale is not None
    return values, scale


def nearest(y: np.ndarray, element: str) -> np.ndarray:
    """The element format's values, by the numpy reference; that of -0 is 0."""
    return decode_codes(round_to_codes(y.astype(np.float64), ELEMENTS[element]), ELEMENTS[element]) + 0.0


@pytest.mark.parametrize("name, element", FP8.items())
def test_the_scale_is_amax_over_the_largest_value(name: str, element: str) -> None:
    largest = np.float32(ELEMENTS[element].max_value)
    for x in (gaussian(16, 100), heavy_tailed(16, 33), gaussian(8, 64) * np.float32(1e20), gaussian(1, 1)):
        values, scale = quantized(torch.from_numpy(x), name)
        expected = np.abs(x).max(axis=-1, keepdims=True) / largest
        np.testing.assert_array_equal(scale.numpy(), expected)
        np.testing.assert_array_equal(values.numpy(), nearest(x / expected, element))
        assert (values.abs().amax(-1) == largest).all()


@pytest.mark.parametrize("name, element", FP8.items())
def test_the_error_is_half_a_step(name: str, element: str) -> None:
    fmt, x = ELEMENTS[element], gaussian(32, 256)
    values, scale = quantized(torch.from_numpy(x), name)
    y = x / scale.numpy()
    half_step = np.maximum(np.abs(y) * 2.0 ** -(fmt.mantissa_bits + 1), fmt.magnitudes[1] / 2)
    assert (np.abs(values.numpy() - y) <= half_step * (1 + 2.0**-20)).all()  # y itself is rounded to fp32


@pytest.mark.parametrize("name", FP8)
def test_equal_values_give_equal_bytes_whatever_the_type(name: str) -> None:
    x = torch.from_numpy(gaussian(16, 96)).half().bfloat16().half().float()
    expected = quantized(x, name)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert all(map(torch.equal, quantized(x.to(dtype), name), expected))


@pytest.mark.parametrize("name", FP8)
def test_an_all_zero_row_has_scale_one(name: str) -> None:
    values, scale = quantized(torch.tensor([[0.0, -0.0, 0.0], [1.0, 2.0, -4.0]]), name)
    assert scale[0] == 1
    assert values[0].tolist() == [0, 0, 0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", FP8)
def test_a_row_that_is_not_finite_is_nan_and_the_others_are_not(name: str, value: float) -> None:
    x = torch.from_numpy(gaussian(3, 40))
    expected = quantized(x, name)
    x[1, 7] = value
    values, scale = quantized(x, name)
    assert scale.isnan().squeeze(-1).tolist() == [False, True, False]
    assert torch.equal(values[::2], expected[0][::2])
    assert torch.equal(scale[::2], expected[1][::2])


@pytest.mark.parametrize("name, element", FP8.items())
def test_a_static_scale_is_used_as_given_and_saturates(name: str, element: str) -> None:
    largest, x = ELEMENTS[element].max_value, gaussian(8, 64)
    static = np.float32(0.5 / largest)
    values, scale = quantized(torch.from_numpy(x), name, torch.tensor(static))
    assert scale.shape == (8, 1)
    assert (scale == static).all()
    np.testing.assert_array_equal(values.numpy(), nearest(x / static, element))
    assert values.abs().max() == largest


@pytest.mark.parametrize("amax", [2.0**-149, 2.0**-130, 1e-30, 3e38])
@pytest.mark.parametrize("name, element", FP8.items())
def test_rows_of_extreme_magnitude(name: str, element: str, amax: float) -> None:
    """The scale never underflows to 0, so that no row becomes NaN."""
    in_units, scale = quantized(torch.full((1, 4), amax), name)
    values = (in_units * scale.double()).numpy()
    assert np.isfinite(values).all()
    assert (scale > 0).all()
    assert np.abs(values - amax).max() <= max(amax * 2.0**-3, 2.0**-126 * ELEMENTS[element].magnitudes[1])


@pytest.mark.parametrize("name", FP8)
def test_views_and_no_rows(name: str) -> None:
    x = torch.randn(6, 40)
    values, _ = quantized(x, name)
    assert torch.equal(quantized(x[::2], name)[0], values[::2])
    assert torch.equal(quantized(x.t().contiguous().t(), name)[0], values)
    empty, empty_scale = quantized(torch.empty(0, 40), name)
    assert empty.shape == (0, 40)
    assert empty_scale.shape == (0, 1)
