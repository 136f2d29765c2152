"""Element formats: fp32 values to codes (round to nearest even, saturating) and codes to values.

A code is the element's bit pattern in the low bits of a uint8. Each kind of element format has a `Codec` in `CODECS`.
Source: OCP MX v1.0, sections 5.3 and 6.3.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mxquant.formats.spec import ElementFormat
from mxquant.formats.table import kept_table

MAGNITUDE_MASK = 0x7FFFFFFF
_EXPONENT_MASK = 0x7F800000
_FP32_MANTISSA_BITS = 23
_FP32_BIAS = 127


def _fp32_bits(value: float) -> int:
    """The bit pattern of a power of two in fp32's normal range."""
    return (int(math.log2(value)) + _FP32_BIAS) << _FP32_MANTISSA_BITS


class Codec(NamedTuple):
    """How the codes of one kind of element format stand for the values of its grid."""

    encode: Callable[[Tensor, ElementFormat], Tensor]
    """fp32 values to integer codes of the same shape: rounded to nearest even, saturated, high bits zero."""
    value: Callable[[int, ElementFormat], float]
    """The value of one code, NaN and Inf included."""
    has_negative_zero: bool = False
    """Whether `sign_code` is the code of -0. Two's complement has no -0: there it is the most negative value."""


def encode(values: Tensor, element: ElementFormat, *, canonical_zero: bool = False) -> Tensor:
    """uint8 codes of `values`, rounded to nearest even; values beyond the largest become the largest.

    Args:
        values: fp32, any shape. NaN and Inf saturate; callers replace such blocks.
        canonical_zero: give every zero the code of +0 (AMD Quark does), instead of keeping the sign. Changes nothing
            for a codec without a negative zero.
    """
    codec = CODECS[element.kind]
    codes = codec.encode(values, element)
    if canonical_zero and codec.has_negative_zero:
        codes.masked_fill_(codes == element.sign_code, 0)
    return codes.to(torch.uint8)


def _encode_minifloat(values: Tensor, element: ElementFormat) -> Tensor:
    """By integer arithmetic on the fp32 bits."""
    bits = values.contiguous().view(torch.int32)
    magnitude = bits & MAGNITUDE_MASK
    codes = torch.where(
        magnitude < _fp32_bits(2.0**element.min_exponent),
        _encode_subnormal(magnitude, element),
        _encode_normal(magnitude, element),
    ).clamp_(max=element.max_code)
    sign = (bits >> (32 - element.bits)).bitwise_and_(element.sign_code)
    return codes.bitwise_or_(sign)


def _encode_normal(magnitude: Tensor, element: ElementFormat) -> Tensor:
    """Drop mantissa bits with a carry that runs into the exponent, then rebase the exponent."""
    dropped = _FP32_MANTISSA_BITS - element.mantissa_bits
    rebase = (_FP32_BIAS - element.bias) << _FP32_MANTISSA_BITS
    last_kept = (magnitude >> dropped).bitwise_and_(1)
    return last_kept.add_(magnitude).add_((1 << (dropped - 1)) - 1 - rebase).bitwise_right_shift_(dropped)


def _encode_subnormal(magnitude: Tensor, element: ElementFormat) -> Tensor:
    """Add the power of two whose last fp32 bit is the element's smallest step: the addition itself rounds to nearest
    even.
    """
    anchor = 2.0 ** (element.min_exponent + _FP32_MANTISSA_BITS - element.mantissa_bits)
    return (magnitude.view(torch.float32) + anchor).view(torch.int32).sub_(_fp32_bits(anchor))


def round_to_element(values: Tensor, element: ElementFormat) -> Tensor:
    """fp32 `values` rounded to nearest even onto the element format's grid, saturating; NaN stays NaN.

    Adds and subtracts 1.5 * 2^k, with k such that the sum's last bit is the grid's step at the value's own exponent.
    (The 1.5 keeps sums with negative values in the same binade.)
    """
    step_shift = 23 - element.mantissa_bits
    smallest = (element.min_exponent + 127) << 23
    anchor_bits = (values.view(torch.int32) & _EXPONENT_MASK).clamp_(
        min=smallest, max=(element.max_exponent + 127) << 23
    )
    anchor = anchor_bits.add_((step_shift << 23) | (1 << 22)).view(torch.float32)
    return (values + anchor).sub_(anchor).clamp_(-element.max_value, element.max_value)


def _minifloat_value(code: int, element: ElementFormat) -> float:
    sign = -1.0 if code & element.sign_code else 1.0
    code &= element.sign_code - 1
    exponent, mantissa = code >> element.mantissa_bits, code & ((1 << element.mantissa_bits) - 1)
    if code > element.max_code:  # E5M2 has Inf, with mantissa 0; E4M3 has no code of that kind
        return sign * math.inf if mantissa == 0 else math.nan
    fraction = mantissa / (1 << element.mantissa_bits)
    if exponent == 0:
        return sign * fraction * 2.0**element.min_exponent
    return sign * (1 + fraction) * 2.0 ** (exponent - element.bias)


CODECS: dict[str, Codec] = {"minifloat": Codec(_encode_minifloat, _minifloat_value, has_negative_zero=True)}


@functools.cache
def element_values(element: ElementFormat) -> tuple[float, ...]:
    """The value of every code, 0 to 2**bits - 1; NaN and Inf codes as the element format defines them."""
    return tuple(CODECS[element.kind].value(code, element) for code in range(1 << element.bits))


@kept_table
def _values_table(element: ElementFormat, dtype: torch.dtype) -> Tensor:
    return torch.tensor(element_values(element), dtype=dtype)


def decode(codes: Tensor, element: ElementFormat, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of uint8 `codes` (high bits zero), exact in any `dtype` of at least bf16's precision and the format's
    range.
    """
    if type(codes) is Tensor and not torch.compiler.is_compiling():
        table = _values_table(element, dtype, codes.device)
    else:  # a constant of the graph that is traced
        table = torch.tensor(element_values(element), dtype=dtype, device=codes.device)
    return table[codes.long()]
