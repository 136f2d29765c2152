"""NVFP4: blocks of 16 with an E4M3 scale, and one fp32 multiplier for the tensor (or for each row)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from formats.reference import (
    ELEMENTS,
    decode_codes,
    midpoints,
    nvfp4_per_tensor_scale,
    per_element,
    quantize_nvfp4,
    round_to_codes,
    unpack,
)
from formats.samples import gaussian, heavy_tailed
from mxquant.formats import FORMATS, dequantize_blocks, quantize_blocks

NVFP4 = FORMATS["nvfp4"]
ONE = 0x38


def quantized(x: torch.Tensor, g: float | torch.Tensor | None = None, **options: bool) -> tuple[np.ndarray, np.ndarray]:
    g = torch.tensor(g, dtype=torch.float32) if isinstance(g, float) else g
    qdata, scale = quantize_blocks(x, NVFP4, per_tensor_scale=g, **options)
    return unpack(qdata.numpy(), 4, x.shape[-1]), scale.numpy()


def assert_follows_the_definition(x: np.ndarray, g: np.float32) -> None:
    codes, scale = quantize_nvfp4(x, g)
    ours, our_scale = quantized(torch.from_numpy(x), float(g))
    np.testing.assert_array_equal(our_scale, scale)
    np.testing.assert_array_equal(ours, codes)
    # (scale * g) * code, each product rounded to fp32.
    product = decode_codes(scale, ELEMENTS["e4m3"]).astype(np.float32) * g
    values = per_element(product, 16, x.shape[-1]) * decode_codes(codes, ELEMENTS["e2m1"]).astype(np.float32)
    qdata, scale_bytes = quantize_blocks(torch.from_numpy(x), NVFP4, per_tensor_scale=torch.tensor(g))
    decoded = dequantize_blocks(qdata, scale_bytes, NVFP4, x.shape[-1], per_tensor_scale=torch.tensor(g))
    np.testing.assert_array_equal(decoded.numpy(), values)


@pytest.mark.parametrize("magnitude", [1.0, 2.0**-40, 2.0**60])
@pytest.mark.parametrize("length", [1, 5, 15, 16, 17, 31, 33, 40, 100])
def test_random_blocks_of_any_length(length: int, magnitude: float) -> None:
    for x in (gaussian(32, length), heavy_tailed(32, length)):
        x = x * np.float32(magnitude)
        assert_follows_the_definition(x, nvfp4_per_tensor_scale(x))


@pytest.mark.parametrize("g", [1.0, 1 / 2688, 0.00013, 3.7e-5, 2.0**-20, 77.7])
def test_ties_of_the_quotient_by_the_rounded_scale_product(g: float) -> None:
    """x = tie * (scale * g) in fp32, and its neighbours: a multiplication by a reciprocal moves some across the tie."""
    g32 = np.float32(g)
    product = decode_codes(np.arange(1, 127), ELEMENTS["e4m3"]).astype(np.float32) * g32
    middle = midpoints(ELEMENTS["e2m1"]).astype(np.float32)
    on_tie = product[:, None] * np.concatenate([middle, -middle])[None, :]
    largest = product[:, None] * np.float32(6)
    for x in (on_tie, np.nextafter(on_tie, np.float32(0)), np.nextafter(on_tie, np.float32(np.inf))):
        blocks = np.concatenate([x, largest, -largest], axis=1)
        assert_follows_the_definition(blocks, g32)
        _, scale = quantize_nvfp4(blocks, g32)
        assert (scale[:, 0] == np.arange(1, 127)).all()
    y = (on_tie * (np.float32(1) / product)[:, None]).astype(np.float64)
    by_reciprocal = round_to_codes(y, ELEMENTS["e2m1"])
    exact = quantize_nvfp4(np.concatenate([on_tie, largest, -largest], axis=1), g32)[0][:, :14]
    assert (by_reciprocal != exact).any()


@settings(max_examples=40, deadline=None)
@given(
    x=hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 3), st.integers(1, 40)),
        elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
    )
)
def test_any_finite_input(x: np.ndarray) -> None:
    assert_follows_the_definition(x.copy(), nvfp4_per_tensor_scale(x))


def test_the_per_tensor_scale_is_that_of_the_whole_tensor_unless_given() -> None:
    x = torch.from_numpy(gaussian(32, 64))
    codes, scale = quantized(x)
    given, given_scale = quantized(x, float(nvfp4_per_tensor_scale(x.numpy())))
    np.testing.assert_array_equal(codes, given)
    np.testing.assert_array_equal(scale, given_scale)
    assert scale.max() == 0x7E  # the block that holds the largest element has the largest scale


def test_an_all_zero_tensor() -> None:
    codes, scale = quantized(torch.zeros(2, 40))
    assert (codes == 0).all()
    assert (scale == ONE).all()
    negative, _ = quantized(torch.full((2, 40), -0.0))
    assert (negative == 8).all()


def test_a_zero_block_has_scale_one() -> None:
    x = torch.ones(1, 48)
    x[0, 16:32] = 0
    codes, scale = quantized(x)
    assert scale.tolist() == [[0x7E, ONE, 0x7E]]
    assert (codes[0, 16:32] == 0).all()


@pytest.mark.parametrize(
    "ratio, byte, code",
    [
        (2.0**-6, 0x08, 7),
        (1.5 * 2.0**-9, 0x02, 6),  # a tie of the scale, which goes to the even byte
        (2.0**-9, 0x01, 7),
        (2.0**-10, 0x01, 5),
        (2.0**-30, 0x01, 0),
    ],
)
def test_tiny_blocks_have_a_subnormal_scale_and_never_zero(ratio: float, byte: int, code: int) -> None:
    """ratio: amax / (6 g), the block scale before rounding."""
    codes, scale = quantized(torch.full((1, 16), 6 * ratio), 1.0)
    assert scale.item() == byte
    assert (codes == code).all()


def test_the_largest_scale_saturates() -> None:
    """A per-tensor scale that is too small for the tensor: scale 448 and code 6, nothing wraps around."""
    codes, scale = quantized(torch.full((1, 16), -1e6), 1.0)
    assert scale.item() == 0x7E
    assert (codes == 15).all()


@pytest.mark.parametrize("amax", [2.0**-149, 2.0**-140, 1e-36, 1e-30, 3e38])
def test_tensors_of_extreme_magnitude_decode_to_finite_values(amax: float) -> None:
    x = torch.full((1, 32), amax)
    qdata, scale = quantize_blocks(x, NVFP4)
    g = torch.tensor(nvfp4_per_tensor_scale(x.numpy()))
    values = dequantize_blocks(qdata, scale, NVFP4, 32, per_tensor_scale=g)
    assert values.isfinite().all()
    if amax > 1e-34:  # below, the per-tensor scale is at its floor and the blocks subnormal
        torch.testing.assert_close(
            values, x, rtol=2.0**-3, atol=0.0
        )  # half a step of E2M1 is 1/8 of the value at worst


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_block_that_is_not_finite_is_nan_and_does_not_reach_the_rest(value: float) -> None:
    x = torch.from_numpy(gaussian(4, 64))
    x[3, 0] = 100.0  # the largest element, so that the per-tensor scale stays
    rest, rest_scale = quantized(x)
    x[0, 20] = value
    codes, scale = quantized(x)
    expected, expected_scale = rest.copy(), rest_scale.copy()
    expected[0, 16:32] = 0
    expected_scale[0, 1] = 255
    np.testing.assert_array_equal(codes, expected)
    np.testing.assert_array_equal(scale, expected_scale)
    qdata, scale_bytes = quantize_blocks(x, NVFP4)
    values = dequantize_blocks(qdata, scale_bytes, NVFP4, 64, per_tensor_scale=torch.tensor(0.5))
    assert values.isnan().nonzero().tolist() == [[0, column] for column in range(16, 32)]


def test_one_scale_a_row() -> None:
    """A row's bytes are those that it has alone, so that they do not depend on its batch mates."""
    x = torch.from_numpy(gaussian(5, 40) * np.array([[1e-3], [1], [50], [0], [1e4]], np.float32))
    g = torch.tensor([[nvfp4_per_tensor_scale(row)] for row in x.numpy()])
    codes, scale = quantized(x, g)
    for row in range(5):
        alone, alone_scale = quantized(x[row : row + 1], g[row])
        np.testing.assert_array_equal(codes[row], alone[0])
        np.testing.assert_array_equal(scale[row], alone_scale[0])
    batched = x.reshape(5, 1, 40).expand(5, 3, 40)
    codes3, _ = quantized(batched, g.reshape(5, 1, 1))
    np.testing.assert_array_equal(codes3[:, 2], codes)


def test_canonical_zero() -> None:
    x = torch.from_numpy(heavy_tailed(16, 64))
    kept, scale = quantized(x)
    folded, same_scale = quantized(x, canonical_zero=True)
    assert (kept == 8).any()
    np.testing.assert_array_equal(folded, np.where(kept == 8, 0, kept))
    np.testing.assert_array_equal(scale, same_scale)


def test_shards_with_the_whole_tensors_scale() -> None:
    x = torch.from_numpy(gaussian(16, 128))
    g = float(nvfp4_per_tensor_scale(x.numpy()))
    codes, scale = quantized(x, g)
    for ways in (2, 4, 8):
        columns = [quantized(shard, g) for shard in x.chunk(ways, dim=1)]
        np.testing.assert_array_equal(np.concatenate([c for c, _ in columns], axis=1), codes)
        np.testing.assert_array_equal(np.concatenate([s for _, s in columns], axis=1), scale)
        rows = [quantized(shard, g) for shard in x.chunk(ways, dim=0)]
        np.testing.assert_array_equal(np.concatenate([c for c, _ in rows]), codes)


def test_an_empty_batch_with_its_scale() -> None:
    qdata, scale = quantize_blocks(torch.empty(0, 40), NVFP4, per_tensor_scale=torch.tensor(1.0))
    assert qdata.shape == (0, 20)
    assert scale.shape == (0, 3)
