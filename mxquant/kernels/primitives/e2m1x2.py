"""E2M1 codes of bf16 numbers, two at a time, in packed bf16 arithmetic (compute capability 9.0).

A product with a power of two is exact in bf16. One fused multiply-add with a constant then rounds once, as fp32 would.

Twin: `encode` of `numerics`, equal bit by bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mxquant.kernels.primitives.bf16x2 import fma_pairs, halves, max_pairs, min_pairs
from mxquant.kernels.primitives.pack import bit_select

ABOVE = tl.constexpr((127 + 7 - 1) << 7)
"""The bf16 number whose last bit is E2M1's smallest step: the bits above a code."""


@triton.jit
def amax_of_pairs(words: tl.tuple) -> tl.tensor:
    """The fp32 bits of the largest magnitude among the bf16 numbers in `words`; of NaN, if there is one."""
    both = words[0] & 0x7FFF7FFF
    for i in tl.static_range(1, len(words)):
        both = max_pairs(both, words[i] & 0x7FFF7FFF)
    low, high = halves(both)
    return tl.maximum(low, high)


@triton.jit
def _twice(bits: tl.tensor) -> tl.tensor:
    """A word with a bf16 number, given by its fp32 bits, in both halves."""
    return bit_select(bits, bits >> 16, -0x10000)


@triton.jit
def encode_pairs(words: tl.tuple, factor: tl.tensor, SATURATE: tl.constexpr) -> tl.tuple:
    """E2M1 codes, as of `encode`, of bf16 pairs times powers of two: a code in each half, `ABOVE` above it."""
    steep = _twice(factor.to(tl.int32, bitcast=True))
    middle = _twice((factor * 0.5).to(tl.int32, bitcast=True))
    flat = _twice((factor * 0.25).to(tl.int32, bitcast=True))
    return [_encode_pair(word, steep, middle, flat, SATURATE) for word in words]


@triton.jit
def _encode_pair(
    word: tl.tensor, steep: tl.tensor, middle: tl.tensor, flat: tl.tensor, SATURATE: tl.constexpr
) -> tl.tensor:
    """The least of three straight lines, as in `_encode_three_binades` of `numerics`, rounded by bf16's last bit."""
    BOTH: tl.constexpr = 0x10001
    magnitude = word & 0x7FFF7FFF
    code = fma_pairs(magnitude, flat, (ABOVE + 4) * BOTH)
    if SATURATE:
        code = min_pairs(code, (ABOVE + 7) * BOTH)
    code = min_pairs(code, fma_pairs(magnitude, middle, (ABOVE + 2) * BOTH))
    return min_pairs(code, fma_pairs(magnitude, steep, ABOVE * BOTH))
