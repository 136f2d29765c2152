"""Codes of bf16 numbers, two at a time, in bf16 arithmetic: for GPUs that compute with pairs.

A product with a power of two is exact in bf16, and one fused multiply-add with a constant rounds once, as fp32 would.

Twin: `encode` of `triton_numerics`, equal bit by bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mxquant.kernels.bf16_pairs import fma_pairs, halves, max_pairs, min_pairs
from mxquant.kernels.block_in_thread import choose_bits


@triton.jit
def largest_of_pairs(words: tl.tuple) -> tl.tensor:
    """As `_largest`, of bf16 numbers."""
    both = words[0] & 0x7FFF7FFF
    for i in tl.static_range(1, len(words)):
        both = max_pairs(both, words[i] & 0x7FFF7FFF)
    low, high = halves(both)
    return tl.maximum(low, high)


@triton.jit
def _twice(bits: tl.tensor) -> tl.tensor:
    """tl.tuple with a bf16 number, given by its fp32 bits, in both halves."""
    return choose_bits(bits, bits >> 16, -0x10000)


@triton.jit
def encode_pairs(
    words: tl.tuple,
    factor: tl.tensor,
    EXPONENT_BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    MAX_CODE: tl.constexpr,
    SATURATE: tl.constexpr,
) -> tl.tuple:
    """Codes of bf16 pairs times fp32 powers of two, one in each half, as `encode` gives them: the bits from the code's
    sign on mean nothing.
    """
    if EXPONENT_BITS == 2:
        steep = _twice(factor.to(tl.int32, bitcast=True))
        middle = _twice((factor * 0.5).to(tl.int32, bitcast=True))
        flat = _twice((factor * 0.25).to(tl.int32, bitcast=True))
        return [_encode_pair_in_three_binades(w, steep, middle, flat, MANTISSA_BITS, MAX_CODE, SATURATE) for w in words]
    else:
        both = _twice(factor.to(tl.int32, bitcast=True))
        return [_encode_pair(w, both, EXPONENT_BITS, MANTISSA_BITS, MAX_CODE, SATURATE) for w in words]


@triton.jit
def _encode_pair_in_three_binades(
    word: tl.tensor,
    steep: tl.tensor,
    middle: tl.tensor,
    flat: tl.tensor,
    MANTISSA_BITS: tl.constexpr,
    MAX_CODE: tl.constexpr,
    SATURATE: tl.constexpr,
) -> tl.tensor:
    """The least of three straight lines, as `_encode_three_binades` of `triton_numerics`, whose last bit is bf16's."""
    BOTH: tl.constexpr = 0x10001
    ANCHOR: tl.constexpr = (127 + 7 - MANTISSA_BITS) << 7
    magnitude = word & 0x7FFF7FFF
    code = fma_pairs(magnitude, flat, (ANCHOR + (2 << MANTISSA_BITS)) * BOTH)
    if SATURATE:
        code = min_pairs(code, (ANCHOR + MAX_CODE) * BOTH)
    code = min_pairs(code, fma_pairs(magnitude, middle, (ANCHOR + (1 << MANTISSA_BITS)) * BOTH))
    return min_pairs(code, fma_pairs(magnitude, steep, ANCHOR * BOTH))


@triton.jit
def _encode_pair(
    word: tl.tensor,
    factor: tl.tensor,
    EXPONENT_BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    MAX_CODE: tl.constexpr,
    SATURATE: tl.constexpr,
) -> tl.tensor:
    """Added to the power of two whose last bit is the format's step at it, a number is rounded once, and the sum's last
    bits count steps; each binade below adds as many codes as it has mantissas.
    """
    BOTH: tl.constexpr = 0x10001
    BIAS: tl.constexpr = (1 << (EXPONENT_BITS - 1)) - 1
    LOWEST: tl.constexpr = ((128 - BIAS) << 7) * BOTH
    scaled = fma_pairs(word & 0x7FFF7FFF, factor, 0)
    if SATURATE:
        tl.static_assert(MAX_CODE == (1 << (EXPONENT_BITS + MANTISSA_BITS)) - 1)
        largest: tl.constexpr = (((1 << EXPONENT_BITS) - BIAS + 127) << 7) - (1 << (7 - MANTISSA_BITS))
        scaled = min_pairs(scaled, largest * BOTH)
    binade = max_pairs(scaled & 0x7F807F80, LOWEST) - LOWEST
    anchor = binade + (LOWEST + ((7 - MANTISSA_BITS) << 7) * BOTH)
    return fma_pairs(scaled, 0x3F803F80, anchor) - anchor + (binade >> (7 - MANTISSA_BITS))
