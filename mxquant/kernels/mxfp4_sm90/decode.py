"""The eight codes of a tiled 32-bit word (`tiles`) as FP8 bytes or FP16, by tables of a block's eight magnitudes.

In PTX, a byte permute looks four codes up at once. FP16 values of E5M2 are that byte and a zero byte. For Triton's
interpreter, which has no PTX, the same is written out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mxquant.kernels.primitives.numerics import INTERPRETED


def _look_up(first: str, last: str, word: str, low: str, high: str) -> str:
    """PTX: FP8 bytes of a word's codes 0-3 and 4-7; `low` and `high` hold those of the magnitudes 0-3 and 4-7."""
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


# A word comes as four bytes or as two halves, and its tables once for each of them.
BYTES_PTX = tl.constexpr("{" + _look_up("$0", "$1", "$2", "$3", "$7") + "}")
# Bytes 0 and 2, and 1 and 3, each widened to two FP16. Multiplications, as the logic unit is what the kernel waits for.
HALVES_PTX = tl.constexpr(
    "{ .reg .b32 first, last, even0, even1;"
    + _look_up("first", "last", "$4", "$5", "$7")
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
def tables(exponent: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The magnitudes 0-3 and 4-7 of blocks: E5M2 bytes of 0, 0.5, 1, 1.5 and of 2, 3, 4, 6 times 2^(exponent - 14)."""
    return exponent * 0x04040400 + 0x06040000, exponent * 0x04040404 + 0x0E0C0A08


@triton.jit
def decode_bytes(word: tl.tensor, low: tl.tensor, high: tl.tensor) -> tuple[tl.tensor, ...]:
    """Four bytes of a word to 2 x 4 FP8 bytes: those of its codes 0-3, and 4-7.

    Args:
        word: uint8, whose last axis is made of whole words; low, high: int32 tables, the same for a word's bytes.
    """
    if INTERPRETED:
        return _byte_of_code(_word_of(word, 4), low, high, 0), _byte_of_code(_word_of(word, 4), low, high, 4)
    else:
        return tl.inline_asm_elementwise(
            BYTES_PTX, "=&r,=&r,r,r,r,r,r,r,r,r,r", [word, low, high], dtype=(tl.uint8, tl.uint8), is_pure=True, pack=4
        )


@triton.jit
def decode_halves(word: tl.tensor, low: tl.tensor, high: tl.tensor) -> tuple[tl.tensor, ...]:
    """Two halves of a word to 4 x 2 FP16: codes 0 and 2, 1 and 3, 4 and 6, 5 and 7.

    Args:
        word: uint16, whose last axis is made of whole words; low, high: as for `decode_bytes`.
    """
    if INTERPRETED:
        whole = _word_of(word, 2)
        even0, odd0 = _half_of_code(whole, low, high, 0), _half_of_code(whole, low, high, 1)
        return even0, odd0, _half_of_code(whole, low, high, 4), _half_of_code(whole, low, high, 5)
    else:
        return tl.inline_asm_elementwise(
            HALVES_PTX, "=&r,=&r,=&r,=&r,r,r,r,r,r", [word, low, high],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def _word_of(part: tl.tensor, PARTS: tl.constexpr) -> tl.tensor:
    """The int32 word that each of its parts belongs to, in the shape of the parts [R, T, U]."""
    R: tl.constexpr = part.shape[0]
    T: tl.constexpr = part.shape[1]
    WORDS: tl.constexpr = part.shape[2] // PARTS
    shift = tl.arange(0, PARTS) * (32 // PARTS)
    words = tl.sum(tl.reshape(part, (R, T, WORDS, PARTS)).to(tl.int32) << shift[None, None, None, :], 3)
    return tl.reshape(tl.broadcast_to(words[:, :, :, None], (R, T, WORDS, PARTS)), (R, T, WORDS * PARTS))


@triton.jit
def _code_byte(word: tl.tensor, low: tl.tensor, high: tl.tensor, code: tl.tensor) -> tl.tensor:
    """The FP8 byte of a word's code, int32."""
    magnitude = (word >> (4 * code)) & 7
    byte = (tl.where(magnitude < 4, low, high) >> (8 * (magnitude & 3))) & 0xFF
    sign = (word >> (8 * (code & 3) + 3 + 4 * (code >> 2))) & 1
    return byte | (sign << 7)


@triton.jit
def _byte_of_code(word: tl.tensor, low: tl.tensor, high: tl.tensor, FIRST: tl.constexpr) -> tl.tensor:
    part = tl.arange(0, word.shape[2])[None, None, :]
    return _code_byte(word, low, high, FIRST + part % 4).to(tl.uint8)


@triton.jit
def _half_of_code(word: tl.tensor, low: tl.tensor, high: tl.tensor, FIRST: tl.constexpr) -> tl.tensor:
    part = tl.arange(0, word.shape[2])[None, None, :]
    return (_code_byte(word, low, high, FIRST + 2 * (part % 2)) << 8).to(tl.int16).to(tl.float16, bitcast=True)
