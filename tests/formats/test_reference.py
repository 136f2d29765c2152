"""The reference model against the definitions written out with fractions, one number at a time."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from formats.reference import (
    ELEMENTS,
    MODES,
    Element,
    decode_codes,
    pack,
    quantize_mx,
    round_to_codes,
    scale_bytes,
    unpack,
)
from formats.samples import everything


def power_of_two(exponent: int) -> Fraction:
    return Fraction(2) ** exponent


def scale_by_definition(amax: Fraction, element: Element, mode: str) -> int:
    """The exponent of the scale, by search."""
    if mode == "rceil":
        exponent = -400
        while amax > Fraction(element.max_value) * power_of_two(exponent):
            exponent += 1
        return exponent
    if mode in ("even", "even_fp4"):
        kept = 1 if mode == "even_fp4" else element.mantissa_bits
        exponent = scale_by_definition(amax, element, "floor") + element.max_exponent
        step = power_of_two(exponent - kept)
        amax = (amax / step + Fraction(1, 2)).__floor__() * step  # half up
        mode = "floor"
    exponent = -400
    while power_of_two(exponent + 1) <= amax:
        exponent += 1
    if mode == "ceil" and power_of_two(exponent) < amax:
        exponent += 1
    return exponent - element.max_exponent


def code_by_definition(y: Fraction, negative: bool, element: Element) -> int:
    """The code whose value is nearest; of two that are as near, the one that is even."""
    distances = [abs(abs(y) - Fraction(value)) for value in element.magnitudes]
    nearest = [code for code, distance in enumerate(distances) if distance == min(distances)]
    code = next(code for code in nearest if len(nearest) == 1 or code % 2 == 0)
    return element.negated(code) if negative else code


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("element", ELEMENTS)
def test_the_model_is_the_definition(element: str, mode: str) -> None:
    fmt = ELEMENTS[element]
    x = everything(fmt)[::29].astype(np.float64)
    codes, scale = quantize_mx(x, fmt, mode)
    for row, row_codes, (byte,) in zip(x, codes, scale):
        amax = max(abs(Fraction(v)) for v in row)
        exponent = scale_by_definition(amax, fmt, mode) if amax else -127
        assert byte == min(max(exponent, -127), 127) + 127
        for value, code in list(zip(row, row_codes))[::5]:
            y = Fraction(value) / power_of_two(int(byte) - 127)
            assert code == code_by_definition(y, bool(np.signbit(value)), fmt)


@pytest.mark.parametrize("element", ELEMENTS.values(), ids=ELEMENTS)
def test_element_values(element: Element) -> None:
    """The table of section 5.3 of the specification: largest value, smallest normal and subnormal."""
    table = {
        "e2m1": (6, 1, 0.5),
        "e2m3": (7.5, 1, 0.125),
        "e3m2": (28, 0.25, 0.0625),
        "e4m3": (448, 2.0**-6, 2.0**-9),
        "e5m2": (57344, 2.0**-14, 2.0**-16),
    }
    if element.name in table:
        found = element.max_value, element.magnitudes[1 << element.mantissa_bits], element.magnitudes[1]
        assert found == table[element.name]
    assert (np.diff(element.magnitudes) > 0).all()
    codes = np.arange(element.finite_codes, dtype=np.uint8)
    assert (round_to_codes(decode_codes(codes, element), element) == codes).all()


def test_thresholds_of_even() -> None:
    """The first mantissa that rounds up: 1.75 for E2M1, 1.9375 for E2M3 and E4M3, 1.875 for E3M2 and E5M2."""
    for name, threshold in {"e2m1": 1.75, "e2m3": 1.9375, "e3m2": 1.875, "e4m3": 1.9375, "e5m2": 1.875}.items():
        below = np.nextafter(np.float32(threshold), np.float32(0)).astype(np.float64)
        amax = np.array([1.0, below, threshold])
        base = 127 - ELEMENTS[name].max_exponent
        assert scale_bytes(amax, ELEMENTS[name], "even").tolist() == [base, base, base + 1]


def test_packing_is_little_endian() -> None:
    assert pack(np.array([0x1, 0x2, 0x3], np.uint8), 4).tolist() == [0x21, 0x03]
    assert pack(np.array([1, 2, 3, 4], np.uint8), 6).tolist() == [
        (1 | 2 << 6) & 255,
        (2 >> 2) | (3 << 4) & 255,
        3 >> 4 | 4 << 2,
    ]
    codes = np.arange(63, dtype=np.uint8)
    assert (unpack(pack(codes, 6), 6, 63) == codes).all()
