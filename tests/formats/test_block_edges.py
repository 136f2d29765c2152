"""Blocks at the ends: zeros, signs of zero, subnormals, the largest numbers, NaN and infinity, and round trips."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from formats.reference import ELEMENT_OF_FORMAT, ELEMENTS, MODES, decode_codes, pack, quantize_mx, unpack
from formats.samples import MX_FORMATS, everything, heavy_tailed
from mxquant.formats import FORMATS, dequantize_blocks, quantize_blocks

FP32_MAX = float(np.finfo(np.float32).max)
LARGEST_THAT_STAYS_FINITE = float(np.nextafter(np.float32(1.75 * 2.0**127), np.float32(0)))


def block(*values: float) -> torch.Tensor:
    """[1, 32]: the values, then zeros."""
    return torch.nn.functional.pad(torch.tensor([values], dtype=torch.float32), (0, 32 - len(values)))


def quantized(x: torch.Tensor, name: str, mode: str, **options: bool) -> tuple[list[int], int]:
    """Codes and the scale byte of one block."""
    qdata, scale = quantize_blocks(x, FORMATS[name], mode, **options)
    return unpack(qdata.numpy(), FORMATS[name].element.bits, x.shape[-1])[0].tolist(), scale.item()


def decoded(x: torch.Tensor, name: str, mode: str) -> torch.Tensor:
    return dequantize_blocks(*quantize_blocks(x, FORMATS[name], mode), FORMATS[name], x.shape[-1])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MX_FORMATS)
class TestEveryFormatAndMode:
    def test_a_zero_block_is_byte_0_and_keeps_its_signs(self, name: str, mode: str) -> None:
        negative = ELEMENTS[ELEMENT_OF_FORMAT[name]].negated(0)
        assert quantized(torch.zeros(1, 32), name, mode) == ([0] * 32, 0)
        assert quantized(torch.full((1, 32), -0.0), name, mode) == ([negative] * 32, 0)
        assert quantized(block(-0.0, 0.0, -0.0), name, mode)[0][:4] == [negative, 0, negative, 0]

    def test_canonical_zero_leaves_no_negative_zero(self, name: str, mode: str) -> None:
        x = torch.from_numpy(heavy_tailed(16, 64))
        x[0, ::3] = -0.0
        negative = ELEMENTS[ELEMENT_OF_FORMAT[name]].negated(0)
        (kept, scale), (folded, same_scale) = (
            quantize_blocks(x, FORMATS[name], mode, canonical_zero=canonical) for canonical in (False, True)
        )
        kept, folded = (unpack(q.numpy(), FORMATS[name].element.bits, 64) for q in (kept, folded))
        assert torch.equal(scale, same_scale)
        assert (kept == negative).any()
        np.testing.assert_array_equal(folded, np.where(kept == negative, 0, kept))

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
    def test_a_block_that_is_not_finite_is_nan_and_its_neighbours_are_not(
        self, name: str, mode: str, value: float
    ) -> None:
        x = torch.ones(3, 96)
        x[1, 40] = value
        fmt = FORMATS[name]
        qdata, scale = quantize_blocks(x, fmt, mode)
        assert (scale == 255).nonzero().tolist() == [[1, 1]]
        assert (unpack(qdata.numpy(), fmt.element.bits, 96)[1, 32:64] == 0).all()
        values = dequantize_blocks(qdata, scale, fmt, 96)
        assert values[1, 32:64].isnan().all()
        values[1, 32:64] = 1
        assert torch.equal(values, torch.ones(3, 96))

    def test_a_partial_block_that_is_not_finite(self, name: str, mode: str) -> None:
        values = decoded(torch.tensor([[1.0] * 32 + [float("inf"), 1.0]]), name, mode)
        assert values.isnan().tolist() == [[False] * 32 + [True] * 2]

    def test_blocks_below_1_75_times_2_to_127_decode_to_finite_values(self, name: str, mode: str) -> None:
        x = block(LARGEST_THAT_STAYS_FINITE, -LARGEST_THAT_STAYS_FINITE, 2.0**127, 1.0)
        assert decoded(x, name, mode).isfinite().all()

    @pytest.mark.parametrize("amax", [FP32_MAX, 1.75 * 2.0**127, 1.875 * 2.0**127, 1.9375 * 2.0**127])
    def test_blocks_above_follow_the_definition(self, name: str, mode: str, amax: float) -> None:
        """Their bytes are those of the definition; what they decode to may exceed fp32."""
        x = block(amax, -amax, amax / 2, amax / 4)
        codes, scale = quantize_mx(x.double().numpy(), ELEMENTS[ELEMENT_OF_FORMAT[name]], mode)
        assert quantized(x, name, mode) == (codes[0].tolist(), scale.item())
        assert scale.item() <= min(254, 255 - FORMATS[name].element.max_exponent)
        assert not decoded(x, name, mode).isnan().any()

    @pytest.mark.parametrize("exponent", [-149, -140, -133, -130, -127, -126, -125, -122, -118, -110])
    def test_the_smallest_blocks(self, name: str, mode: str, exponent: int) -> None:
        """Byte 0 is 2^-127 and its elements are divided by just that."""
        x = block(*(m * 2.0**exponent for m in (1.0, -1.0, 1.5, 0.75, 0.5, -0.25, 0.125)))
        codes, scale = quantize_mx(x.double().numpy(), ELEMENTS[ELEMENT_OF_FORMAT[name]], mode)
        assert quantized(x, name, mode) == (codes[0].tolist(), scale.item())


@pytest.mark.parametrize("mode", ["floor", "even", "rceil"])
@pytest.mark.parametrize("name", MX_FORMATS)
def test_codes_and_scales_come_back_from_their_values(name: str, mode: str) -> None:
    """All blocks whose largest code is in the top binade, under every scale byte whose values fp32 holds."""
    element, fmt = ELEMENTS[ELEMENT_OF_FORMAT[name]], FORMATS[name]
    rng = np.random.default_rng(0)
    scale = np.arange(254 - element.max_exponent, dtype=np.uint8)[:, None]
    magnitudes = rng.integers(0, element.finite_codes, (len(scale), 32))
    top = np.flatnonzero(element.magnitudes >= 2.0**element.max_exponent)
    magnitudes[:, 0] = rng.choice(top, len(scale))
    is_negative = rng.integers(0, 2, magnitudes.shape) == 1
    codes = np.where(is_negative, element.negated(magnitudes), magnitudes).astype(np.uint8)
    qdata = torch.from_numpy(pack(codes, element.bits))
    values = dequantize_blocks(qdata, torch.from_numpy(scale), fmt, 32)
    again, same_scale = quantize_blocks(values, fmt, mode)
    np.testing.assert_array_equal(same_scale.numpy(), scale)
    np.testing.assert_array_equal(unpack(again.numpy(), element.bits, 32), codes)


@pytest.mark.parametrize("mode", ["floor", "even", "rceil"])
@pytest.mark.parametrize("name", MX_FORMATS)
def test_quantizing_twice_changes_no_value(name: str, mode: str) -> None:
    """For the modes that find the same scale again (ceil and even_fp4 may take a larger one)."""
    once = decoded(torch.from_numpy(everything(ELEMENTS[ELEMENT_OF_FORMAT[name]])), name, mode)
    once = once[once.isfinite().all(-1)]
    assert torch.equal(decoded(once, name, mode), once)


@pytest.mark.parametrize("name", MX_FORMATS)
def test_every_code_in_every_position(name: str) -> None:
    """One code among zeros, beside the largest value, which keeps the scale at 1."""
    fmt, element = FORMATS[name], ELEMENTS[ELEMENT_OF_FORMAT[name]]
    codes = np.arange(element.finite_codes, dtype=np.uint8)
    for position in range(32):
        expected = np.zeros((len(codes), 32), np.uint8)
        expected[:, position] = codes
        expected[:, (position + 1) % 32] = element.finite_codes - 1
        x = torch.from_numpy(decode_codes(expected, element)).float()
        qdata, scale = quantize_blocks(x, fmt, "floor")
        assert (scale == 127).all()
        np.testing.assert_array_equal(qdata.numpy(), pack(expected, element.bits))
