"""Decode the eight codes of a packed 32-bit word (`layout`) to FP8 or FP16, by a table of the block's eight magnitudes.

In PTX, one byte permute looks up four codes. An E5M2 byte above a zero byte is the same value in FP16. Triton's
interpreter has no PTX, so there the look-up is written out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mxquant.kernels.primitives.numerics import INTERPRETED


def _lookup_ptx(first: str, last: str, word: str, low: str, high: str) -> str:
    """PTX that sets `first` and `last` to the FP8 bytes of a word's codes 0-3 and 4-7. `low` and `high` are the tables
    of the magnitudes 0-3 and 4-7.
    """
    return f"""
        .reg .b32 index, upper, sign;
        and.b32 index, {word}, 0x77777777;
        prmt.b32 {first}, {low}, {high}, index;
        shr.u32 upper, index, 16;
        prmt.b32 {last}, {low}, {high}, upper;
        shl.b32 sign, {word}, 4;
        lop3.b32 {first}, sign, 0x80808080, {first}, 0xEA;
        lop3.b32 {last}, {word}, 0x80808080, {last}, 0xEA;
    """


# Triton passes a word as four bytes or as two 16-bit halves, and the tables once for each of them.
_FP8_PTX = tl.constexpr("{" + _lookup_ptx("$0", "$1", "$2", "$3", "$7") + "}")
# Bytes 0 and 2, then 1 and 3, are widened to FP16. NOTE: by multiplications, as the kernel is bound by the logic unit.
_FP16_PTX = tl.constexpr(
    "{ .reg .b32 first, last, even0, even1;"
    + _lookup_ptx("first", "last", "$4", "$5", "$7")
    + """
        and.b32 even0, first, 0x00FF00FF;
        and.b32 even1, last, 0x00FF00FF;
        mul.lo.u32 $0, even0, 256;
        mad.lo.s32 $1, even0, -1, first;
        mul.lo.u32 $2, even1, 256;
        mad.lo.s32 $3, even1, -1, last;
    }"""
)


@triton.jit
def magnitude_tables(exponent: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The tables of blocks, int32: E5M2 bytes of 0, 0.5, 1, 1.5 and of 2, 3, 4, 6, times 2^(exponent - 14)."""
    return exponent * 0x04040400 + 0x06040000, exponent * 0x04040404 + 0x0E0C0A08


@triton.jit
def decode_fp8(word: tl.tensor, low: tl.tensor, high: tl.tensor) -> tuple[tl.tensor, ...]:
    """Decode words, given as four bytes each, to the FP8 bytes of their codes 0-3 and of their codes 4-7.

    Args:
        word: uint8; the last axis holds whole words.
        low, high: `magnitude_tables`, repeated for each byte of a word.
    """
    if INTERPRETED:
        return _fp8_bytes(_join_word(word, 4), low, high, 0), _fp8_bytes(_join_word(word, 4), low, high, 4)
    else:
        return tl.inline_asm_elementwise(
            _FP8_PTX,
            "=&r,=&r,r,r,r,r,r,r,r,r,r",
            [word, low, high],
            dtype=(tl.uint8, tl.uint8),
            is_pure=True,
            pack=4,
        )


@triton.jit
def decode_fp16(word: tl.tensor, low: tl.tensor, high: tl.tensor) -> tuple[tl.tensor, ...]:
    """Decode words, given as two halves each, to FP16: codes 0 and 2, 1 and 3, 4 and 6, 5 and 7.

    Args:
        word: uint16; the last axis holds whole words.
        low, high: `magnitude_tables`, repeated for each half of a word.
    """
    if INTERPRETED:
        whole = _join_word(word, 2)
        even0, odd0 = _fp16_values(whole, low, high, 0), _fp16_values(whole, low, high, 1)
        return even0, odd0, _fp16_values(whole, low, high, 4), _fp16_values(whole, low, high, 5)
    else:
        return tl.inline_asm_elementwise(
            _FP16_PTX, "=&r,=&r,=&r,=&r,r,r,r,r,r", [word, low, high],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def _join_word(part: tl.tensor, PARTS: tl.constexpr) -> tl.tensor:
    """For each of the parts [R, T, U] of words, the whole int32 word that it belongs to."""
    R: tl.constexpr = part.shape[0]
    T: tl.constexpr = part.shape[1]
    WORDS: tl.constexpr = part.shape[2] // PARTS
    shift = tl.arange(0, PARTS) * (32 // PARTS)
    words = tl.sum(tl.reshape(part, (R, T, WORDS, PARTS)).to(tl.int32) << shift[None, None, None, :], 3)
    return tl.reshape(tl.broadcast_to(words[:, :, :, None], (R, T, WORDS, PARTS)), (R, T, WORDS * PARTS))


@triton.jit
def _fp8_of_code(word: tl.tensor, low: tl.tensor, high: tl.tensor, code: tl.tensor) -> tl.tensor:
    """The FP8 byte of one code of each word, as int32."""
    magnitude = (word >> (4 * code)) & 7
    byte = (tl.where(magnitude < 4, low, high) >> (8 * (magnitude & 3))) & 0xFF
    sign = (word >> (8 * (code & 3) + 3 + 4 * (code >> 2))) & 1
    return byte | (sign << 7)


@triton.jit
def _fp8_bytes(word: tl.tensor, low: tl.tensor, high: tl.tensor, FIRST: tl.constexpr) -> tl.tensor:
    part = tl.arange(0, word.shape[2])[None, None, :]
    return _fp8_of_code(word, low, high, FIRST + part % 4).to(tl.uint8)


@triton.jit
def _fp16_values(word: tl.tensor, low: tl.tensor, high: tl.tensor, FIRST: tl.constexpr) -> tl.tensor:
    part = tl.arange(0, word.shape[2])[None, None, :]
    return (_fp8_of_code(word, low, high, FIRST + 2 * (part % 2)) << 8).to(tl.int16).to(tl.float16, bitcast=True)
