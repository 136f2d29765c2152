"""Packed arithmetic: two bf16 numbers in each 32-bit word (bf16x2), and conversion of four fp32 numbers to FP8.

Each function is one or a few PTX instructions, for compute capability 9.0 (FP8: 8.9). Triton's interpreter has no PTX:
for it the same is written out in few operations, since each costs it a millisecond.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mxquant.kernels.primitives.numerics import INTERPRETED, encode, from_fp32

TOP_HALF = tl.constexpr(-0x10000)
_FP8_PTX = tl.constexpr(
    """{
        .reg .b16 low, high;
        cvt.rn.satfinite.KINDx2.f32 low, $2, $1;
        cvt.rn.satfinite.KINDx2.f32 high, $4, $3;
        mov.b32 $0, {low, high};
    }"""
)
_E4M3_PTX = tl.constexpr(_FP8_PTX.value.replace("KIND", "e4m3"))
_E5M2_PTX = tl.constexpr(_FP8_PTX.value.replace("KIND", "e5m2"))

_ODD_PAIR_PTX = tl.constexpr(
    """{
        .reg .b32 lost;
        prmt.b32 lost, $1, $2, 0x5410;
        min.u16x2 lost, lost, $3;
        prmt.b32 $0, $1, $2, 0x7632;
        or.b32 $0, $0, lost;
    }"""
)

_LOOK_UP_PTX = tl.constexpr(
    """{
        prmt.b32 $0, $1, $2, $3;
        lop3.b32 $0, $4, 0x80808080, $0, 0xEA;
    }"""
)


@triton.jit
def pair(low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """A word of the low halves of two int32 tensors."""
    return (low & 0xFFFF) | (high << 16)


@triton.jit
def byte_perm(first: tl.tensor, second: tl.tensor, SELECTOR: tl.constexpr) -> tl.tensor:
    """Four bytes of two words (PTX prmt). The bytes of `first` are 0 to 3 from the lowest, those of `second` 4 to 7.

    Args:
        SELECTOR: a nibble for each byte of the result, the lowest first.
    """
    if INTERPRETED:
        word = first & 0
        for i in tl.static_range(4):
            BYTE: tl.constexpr = (SELECTOR >> (4 * i)) & 7
            word |= (((first if BYTE < 4 else second) >> (8 * (BYTE & 3))) & 0xFF) << (8 * i)
        return word
    else:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [first, second, SELECTOR], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def four_high_bytes(first: tl.tensor, second: tl.tensor) -> tl.tensor:
    """The high byte of each half, of the first word and then of the second."""
    return byte_perm(first, second, 0x7531)


@triton.jit
def halves(word: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The fp32 bits, int32, of the two bf16 numbers in a word, the low one first."""
    return word << 16, word & TOP_HALF


@triton.jit
def fma_pairs(a: tl.tensor, b: tl.tensor, c: tl.tensor) -> tl.tensor:
    """a * b + c in bf16, rounded once to nearest even; no subnormal is flushed. All int32 words.

    NOTE: the interpreter rounds to fp32 first, which shows only for a sum nearer to a tie of bf16 than fp32 resolves.
    """
    if INTERPRETED:
        b, c = (a & 0) + b, (a & 0) + c  # a constant becomes a tensor
        low = (a << 16).to(tl.float32, bitcast=True) * (b << 16).to(tl.float32, bitcast=True)
        low = (low + (c << 16).to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
        high = (a & TOP_HALF).to(tl.float32, bitcast=True) * (b & TOP_HALF).to(tl.float32, bitcast=True)
        high = (high + (c & TOP_HALF).to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
        low = ((low + 0x7FFF + ((low >> 16) & 1)) >> 16) & 0xFFFF
        return low | ((high + 0x7FFF + ((high >> 16) & 1)) & TOP_HALF)
    else:
        return tl.inline_asm_elementwise(
            "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def max_pairs(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """The larger of each pair of halves, as unsigned integers, and so of non-negative bf16 numbers."""
    if INTERPRETED:
        high = tl.maximum((a >> 16) & 0xFFFF, (b >> 16) & 0xFFFF) << 16
        return tl.maximum(a & 0xFFFF, b & 0xFFFF) | high
    else:
        return tl.inline_asm_elementwise(
            "max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def min_pairs(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """The smaller of each pair of halves, as `max_pairs`."""
    if INTERPRETED:
        high = tl.minimum((a >> 16) & 0xFFFF, (b >> 16) & 0xFFFF) << 16
        return tl.minimum(a & 0xFFFF, b & 0xFFFF) | high
    else:
        return tl.inline_asm_elementwise(
            "min.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def top_pair(low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """A word of the high halves of two int32 tensors: two fp32 numbers truncated to bf16."""
    return byte_perm(low, high, 0x7632)


@triton.jit
def odd_pair(low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """A word of two numbers, given by their fp32 bits, rounded to odd: truncated, the last bit set if that lost bits.

    Rounding that to six significant bits or fewer equals rounding the fp32 number. NaN stays NaN.
    """
    if INTERPRETED:
        lost = tl.where((low & 0xFFFF) != 0, 1, 0) | tl.where((high & 0xFFFF) != 0, 0x10000, 0)
        return top_pair(low, high) | lost
    else:
        return tl.inline_asm_elementwise(
            _ODD_PAIR_PTX, "=&r,r,r,r", [low, high, 0x10001], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def nearest_pair(low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """A word of two fp32 numbers as bf16, rounded to nearest even."""
    if INTERPRETED:
        return pair(_bfloat16_bits(low), _bfloat16_bits(high))
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def _bfloat16_bits(value: tl.tensor) -> tl.tensor:
    return from_fp32(value, tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)


@triton.jit
def look_up(low: tl.tensor, high: tl.tensor, index: tl.tensor, signs: tl.tensor) -> tl.tensor:
    """Four bytes of a table of eight, each with the top bit of the same byte of `signs`.

    Args:
        low, high: bytes 0 to 3 and 4 to 7 of the table.
        index: in the lowest four nibbles, each below 8.
    """
    if INTERPRETED:
        word = signs & -0x7F7F7F80
        for i in tl.static_range(4):
            code = (index >> (4 * i)) & 7
            word |= ((tl.where(code < 4, low, high) >> (8 * (code & 3))) & 0xFF) << (8 * i)
        return word
    else:
        return tl.inline_asm_elementwise(
            _LOOK_UP_PTX, "=&r,r,r,r,r", [low, high, index, signs], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def fp8_word(
    a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor, EXPONENT_BITS: tl.constexpr, MANTISSA_BITS: tl.constexpr
) -> tl.tensor:
    """A word of four fp32 numbers as E4M3 or E5M2 bytes, the first lowest: rounded to nearest even, saturated, signs
    kept. NaN gives an undefined byte.
    """
    if INTERPRETED:
        low = _fp8_byte(a, EXPONENT_BITS, MANTISSA_BITS) | _fp8_byte(b, EXPONENT_BITS, MANTISSA_BITS) << 8
        high = _fp8_byte(c, EXPONENT_BITS, MANTISSA_BITS) | _fp8_byte(d, EXPONENT_BITS, MANTISSA_BITS) << 8
        return pair(low, high)
    else:
        PTX: tl.constexpr = _E4M3_PTX if EXPONENT_BITS == 4 else _E5M2_PTX
        return tl.inline_asm_elementwise(PTX, "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _fp8_byte(value: tl.tensor, EXPONENT_BITS: tl.constexpr, MANTISSA_BITS: tl.constexpr) -> tl.tensor:
    MAX_CODE: tl.constexpr = 0x7E if EXPONENT_BITS == 4 else 0x7B
    code = encode(tl.abs(value), 1.0, EXPONENT_BITS, MANTISSA_BITS, MAX_CODE, True, True)
    return (code & 0x7F) | ((value.to(tl.int32, bitcast=True) >> 24) & 0x80)
