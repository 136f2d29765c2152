"""Faults that users of comparable quantizers reported, each as its smallest trigger."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from formats.reference import ELEMENTS, midpoints, round_to_codes, unpack
from formats.samples import MX_FORMATS
from mxquant.formats import ELEMENT_FORMATS, FORMATS, dequantize_blocks, quantize_blocks
from mxquant.formats.element import encode
from mxquant.formats.scale import e8m0_to_float


def one_block(amax: float, name: str, mode: str) -> tuple[int, np.ndarray]:
    """Scale byte and codes of a block of `amax`, -amax and zeros."""
    x = torch.zeros(32)
    x[0], x[1] = amax, -amax
    qdata, scale = quantize_blocks(x, FORMATS[name], mode)
    return scale.item(), unpack(qdata.numpy(), FORMATS[name].element.bits, 32)


@pytest.mark.parametrize("mode", ["floor", "even", "rceil"])
def test_the_exponent_of_amax_over_six_is_not_truncated(mode: str) -> None:
    """2.7: truncating the exponent of 2.7 / 6 gives byte 125, where the code saturates."""
    byte, codes = one_block(2.7, "mxfp4", mode)
    assert byte == 126
    assert codes[:2].tolist() == [7, 15]
    assert one_block(2.7, "mxfp8_e4m3", mode)[0] == 127 - 7


@pytest.mark.parametrize("mode", ["floor", "even", "ceil", "rceil"])
@pytest.mark.parametrize("amax", [0.3, 1.0, 5.0, 0.0123, 7e-5, 3e-9])
@pytest.mark.parametrize("name", MX_FORMATS)
def test_the_element_exponent_is_subtracted_once_and_rounded_down(name: str, amax: float, mode: str) -> None:
    """Twice loses a factor of four; a cast of a negative logarithm to int rounds it towards zero."""
    element = FORMATS[name].element
    byte, codes = one_block(amax, name, mode)
    y = float(np.float32(amax)) / 2.0 ** (byte - 127)
    highest = {
        "floor": 2.0,
        "even": 2 - 2.0 ** -(element.mantissa_bits + 1),
        "ceil": 1.0,
        "rceil": element.max_value / 2.0**element.max_exponent,
    }[mode] * 2.0**element.max_exponent
    assert highest / 2 <= y <= highest
    assert codes[1] == ELEMENTS[element.name].negated(int(codes[0]))


def test_decoding_then_encoding_gives_the_same_bytes() -> None:
    for amax in (0.3, 1.0, 5.0):
        x = (torch.randn(8, 32).clamp(-1, 1) * amax).index_fill(1, torch.tensor(0), amax)
        for name in MX_FORMATS:
            fmt = FORMATS[name]
            qdata, scale = quantize_blocks(x, fmt, "even")
            values = dequantize_blocks(qdata, scale, fmt, 32)
            assert all(map(torch.equal, quantize_blocks(values, fmt, "even"), (qdata, scale)))


def test_e2m3_scales_are_not_one_too_small() -> None:
    """7.5 fits under byte 127 and 7.75 rounds up to 8, byte 128; below 7.75 nothing is cut, only rounded to 7.5."""
    assert one_block(7.5, "mxfp6_e2m3", "even")[0] == 127
    assert one_block(7.75, "mxfp6_e2m3", "even")[0] == 128
    below = float(np.nextafter(np.float32(7.75), np.float32(0)))
    byte, codes = one_block(below, "mxfp6_e2m3", "even")
    assert byte == 127
    assert codes[0] == 31  # 7.5 is the nearest value: half a step away at most


def test_only_byte_255_is_nan() -> None:
    """Seen elsewhere: 134 decoded to NaN and 255 did not."""
    values = e8m0_to_float(torch.arange(256, dtype=torch.uint8))
    assert values.isnan().nonzero().tolist() == [[255]]
    assert values[134] == 128


@pytest.mark.parametrize("name", [*MX_FORMATS, "nvfp4"])
def test_a_padded_half_block_changes_nothing(name: str) -> None:
    """48 elements: the second block is that of its own 16, and what lies beyond the end has no influence."""
    fmt, x = FORMATS[name], torch.randn(4, 40)
    g = torch.tensor(0.01) if fmt.per_tensor else None
    qdata, scale = quantize_blocks(x, fmt, per_tensor_scale=g)
    tail, tail_scale = quantize_blocks(x[:, 32:], fmt, per_tensor_scale=g)
    assert torch.equal(qdata[:, fmt.packed_size(32) :], tail)
    assert torch.equal(scale[:, fmt.num_blocks(32) :], tail_scale)
    values = dequantize_blocks(qdata, scale, fmt, 40, per_tensor_scale=g)
    for length in (33, 37, 39):
        # The bytes of 40 elements read as fewer: the codes beyond the end are there, and ignored.
        size, blocks = fmt.packed_size(length), fmt.num_blocks(length)
        fewer = dequantize_blocks(qdata[:, :size], scale[:, :blocks], fmt, length, per_tensor_scale=g)
        assert torch.equal(fewer, values[:, :length])


@pytest.mark.parametrize("mode", ["floor", "even", "rceil"])
def test_mxfp8_uses_all_binades_of_e4m3(mode: str) -> None:
    """448 gives byte 127: leaving the element's largest exponent out puts everything eight binades lower."""
    assert one_block(448.0, "mxfp8_e4m3", mode)[0] == 127
    x = torch.randn(64, 32)
    values = dequantize_blocks(*quantize_blocks(x, FORMATS["mxfp8_e4m3"], mode), FORMATS["mxfp8_e4m3"], 32)
    if mode == "rceil":  # the others saturate now and then
        normal = x.abs() > x.abs().amax(-1, keepdim=True) * 2.0**-13
        assert ((values - x).abs() <= x.abs() * 2.0**-4)[normal].all()
    assert (values - x).norm() / x.norm() < 2.0**-4


def test_a_large_scale_decodes_to_fp16_where_the_values_fit() -> None:
    """Byte 145 is 2^18, which fp16 does not hold: with code 0 the value fits, with 0.5 it is infinite, never NaN."""
    qdata = torch.tensor([[0x10] * 16], dtype=torch.uint8)  # codes 0 and 0.5
    for byte, value in ((141, 2.0**13), (143, 2.0**15), (145, math.inf)):
        values = dequantize_blocks(
            qdata, torch.tensor([[byte]], dtype=torch.uint8), FORMATS["mxfp4"], 32, dtype=torch.float16
        )
        assert values[0, :2].tolist() == [0.0, value]


def test_e4m3_is_not_rounded_twice() -> None:
    """fp32 values that bf16 would round onto a tie of E4M3."""
    middle = midpoints(ELEMENTS["e4m3"])
    values = np.concatenate([middle * (1 + 2.0**-10), middle * (1 - 2.0**-10)]).astype(np.float32)
    codes = encode(torch.from_numpy(values), ELEMENT_FORMATS["e4m3"]).numpy()
    np.testing.assert_array_equal(codes, round_to_codes(values.astype(np.float64), ELEMENTS["e4m3"]))
    twice = encode(torch.from_numpy(values).bfloat16().float(), ELEMENT_FORMATS["e4m3"]).numpy()
    assert (twice != codes).mean() > 0.4
