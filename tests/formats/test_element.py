"""Codes of single values: nearest, ties to even, saturating, the sign kept; and the values of codes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from formats.reference import ELEMENTS, decode_codes, midpoints, round_to_codes
from mxquant.formats import ELEMENT_FORMATS
from mxquant.formats.element import decode, encode

FP32_MAX = np.finfo(np.float32).max
SMALLEST = np.float32(2.0**-149)


def encoded(values: np.ndarray, element: str, **options: bool) -> list[int]:
    return encode(torch.from_numpy(np.asarray(values, dtype=np.float32)), ELEMENT_FORMATS[element], **options).tolist()


def expected(values: np.ndarray, element: str) -> list[int]:
    return round_to_codes(np.asarray(values, dtype=np.float64), ELEMENTS[element]).tolist()


@pytest.mark.parametrize("element", ELEMENTS)
def test_every_code_comes_back(element: str) -> None:
    fmt = ELEMENTS[element]
    codes = np.arange(fmt.finite_codes)
    codes = np.concatenate([codes, fmt.negated(codes)])
    assert encoded(decode_codes(codes, fmt), element) == codes.tolist()


@pytest.mark.parametrize("element", ELEMENTS)
def test_ties_go_to_the_even_code_and_their_neighbours_to_the_nearest(element: str) -> None:
    fmt = ELEMENTS[element]
    middle = midpoints(fmt).astype(np.float32)
    lower = np.arange(len(middle))
    assert encoded(middle, element) == (lower + lower % 2).tolist()
    assert encoded(np.nextafter(middle, np.float32(0)), element) == lower.tolist()
    assert encoded(np.nextafter(middle, np.float32(np.inf)), element) == (lower + 1).tolist()
    assert encoded(-middle, element) == fmt.negated(lower + lower % 2).tolist()


def test_the_seven_ties_of_e2m1() -> None:
    assert encoded([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], "e2m1") == [0, 2, 2, 4, 4, 6, 6]


@pytest.mark.parametrize("element", ELEMENTS)
def test_what_is_too_large_becomes_the_largest_value(element: str) -> None:
    fmt = ELEMENTS[element]
    large = np.array(
        [fmt.max_value, np.nextafter(np.float32(fmt.max_value), FP32_MAX), 2 * fmt.max_value, 1e30, FP32_MAX]
    )
    assert encoded(large, element) == [fmt.finite_codes - 1] * 5
    assert encoded(-large, element) == [fmt.negated(fmt.finite_codes - 1)] * 5


@pytest.mark.parametrize("element", ELEMENTS)
def test_zeros_keep_their_sign(element: str) -> None:
    negative_zero = ELEMENTS[element].negated(0)
    values = [
        0.0,
        -0.0,
        SMALLEST,
        -SMALLEST,
        1e-38,
        -1e-38,
        ELEMENTS[element].magnitudes[1] / 2,
        -ELEMENTS[element].magnitudes[1] / 2,
    ]
    assert encoded(values, element) == [0, negative_zero] * 4


@pytest.mark.parametrize("element", ELEMENTS)
def test_canonical_zero_is_positive_and_changes_nothing_else(element: str) -> None:
    negative_zero = ELEMENTS[element].negated(0)
    values = np.linspace(-2, 2, 4001, dtype=np.float32) * np.float32(ELEMENTS[element].magnitudes[2])
    codes = np.array(encoded(values, element))
    assert negative_zero in codes
    assert encoded(values, element, canonical_zero=True) == np.where(codes == negative_zero, 0, codes).tolist()


@pytest.mark.parametrize("element", ELEMENTS)
def test_values_between_a_tie_and_its_bf16_rounding_are_rounded_once(element: str) -> None:
    """A cast by way of bf16 (or any shorter type) would meet the tie and then go to the even side."""
    middle = midpoints(ELEMENTS[element]).astype(np.float32)
    for factor in (1 - 2.0**-12, 1 + 2.0**-12, 1 - 2.0**-20, 1 + 2.0**-20):
        values = middle * np.float32(factor)
        assert encoded(values, element) == expected(values, element)
        assert np.array_equal(torch.from_numpy(values).bfloat16().float().numpy(), middle)


@pytest.mark.parametrize("element", ELEMENTS)
def test_a_sweep_of_all_exponents(element: str) -> None:
    """All fp32 exponents with mantissas at both ends, around the middle, and random."""
    rng = np.random.default_rng(0)
    mantissas = np.concatenate(
        [[0, 1, 2, 0x3FFFFF, 0x400000, 0x400001, 0x7FFFFE, 0x7FFFFF], rng.integers(0, 1 << 23, 56)]
    )
    bits = ((np.arange(255) << 23)[:, None] | mantissas[None, :]).astype(np.uint32).ravel()
    values = np.concatenate([bits, bits | np.uint32(0x80000000)]).view(np.float32)
    assert encoded(values, element) == expected(values, element)


@settings(max_examples=60, deadline=None)
@given(bits=st.lists(st.integers(0, 0xFFFFFFFF), min_size=1, max_size=64))
def test_any_bit_pattern_follows_the_definition(bits: list[int]) -> None:
    values = np.array(bits, dtype=np.uint32).view(np.float32)
    values = values[np.isfinite(values)]
    for element in ELEMENTS:
        assert encoded(values, element) == expected(values, element)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("element", ELEMENTS)
def test_values_of_codes_are_exact_in_every_type(element: str, dtype: torch.dtype) -> None:
    codes = torch.arange(2 ** ELEMENTS[element].bits, dtype=torch.uint8)
    values = decode(codes, ELEMENT_FORMATS[element], dtype)
    assert values.dtype == dtype
    np.testing.assert_array_equal(values.double().numpy(), decode_codes(codes.numpy(), ELEMENTS[element]))


def test_codes_that_are_no_number() -> None:
    """E4M3 has NaN alone, E5M2 also infinity; the shorter formats have neither."""
    e4m3 = decode(torch.tensor([0x7E, 0x7F, 0xFE, 0xFF], dtype=torch.uint8), ELEMENT_FORMATS["e4m3"])
    assert e4m3.isnan().tolist() == [False, True, False, True]
    e5m2 = decode(torch.arange(0x7B, 0x80, dtype=torch.uint8), ELEMENT_FORMATS["e5m2"])
    assert e5m2[:2].tolist() == [57344, np.inf]
    assert e5m2[2:].isnan().all()


def test_strided_values() -> None:
    values = torch.randn(16, 24).mT
    assert torch.equal(encode(values, ELEMENT_FORMATS["e2m1"]), encode(values.contiguous(), ELEMENT_FORMATS["e2m1"]))
