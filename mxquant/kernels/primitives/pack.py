"""Packing of the codes of a block that one thread holds: tuples of int32 words [BLOCKS].

Four-bit codes come two a word, from bf16x2 arithmetic; six-bit codes four a word, from the conversion to FP8. Where the
order of the input is free, it is the one that takes the fewest instructions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mxquant.kernels.primitives.bf16x2 import byte_perm, pair

_TOPS = tl.constexpr(-0x7F7F7F80)  # the top bits of four bytes
_NIBBLE_TOPS = tl.constexpr(-0x77777778)


@triton.jit
def bit_select(where_set: tl.tensor, where_clear: tl.tensor, MASK: tl.constexpr) -> tl.tensor:
    """Bits chosen by a mask, in one instruction (lop3)."""
    return (where_set & MASK) | (where_clear & ~MASK)


@triton.jit
def four_nibbles(first: tl.tensor, second: tl.tensor) -> tl.tensor:
    """The four codes of two words, packed in the low half."""
    transposed = bit_select(first, second << 8, 0x00FF00FF)  # codes 0, 2, 1, 3, one a byte
    return bit_select(transposed, transposed >> 12, 0x0F0F)


@triton.jit
def pack_nibbles(codes: tl.tuple, signs: tl.tuple) -> tl.tuple:
    """Codes of four bits, eight a word.

    Args:
        codes: words with the codes of two neighbours, one in each half, without signs; bits above a code are cut off.
        signs: words with the code's sign as the top bit of each half.
    """
    signed: tl.tuple = ()
    for i in tl.static_range(len(codes)):
        signed = signed + (bit_select(signs[i] >> 12, codes[i], 0x80008),)
    words: tl.tuple = ()
    for i in tl.static_range(0, len(codes), 4):
        words = words + (pair(four_nibbles(signed[i], signed[i + 1]), four_nibbles(signed[i + 2], signed[i + 3])),)
    return words


@triton.jit
def four_apart(values: tl.tuple) -> tuple[tl.tuple, tl.tuple]:
    """The pairs that `pack_nibbles_apart` takes, as firsts and seconds: 0 and 4, 1 and 5, 2 and 6, 3 and 7, ..."""
    first: tl.tuple = ()
    second: tl.tuple = ()
    for i in tl.static_range(0, len(values), 8):
        first = first + (values[i], values[i + 1], values[i + 2], values[i + 3])
        second = second + (values[i + 4], values[i + 5], values[i + 6], values[i + 7])
    return first, second


@triton.jit
def pack_nibbles_apart(codes: tl.tuple, signs: tl.tuple, ABOVE: tl.constexpr) -> tl.tuple:
    """`pack_nibbles` of codes that stand four apart. Each needs only a shift: a half then holds four neighbours, in the
    order of their words.

    Args:
        ABOVE: the other bits of each half of `codes`; a code has three.
    """
    # The exclusive or of the halves' other bits, which cancels them.
    OTHERS: tl.constexpr = (ABOVE * 0x10001) ^ (ABOVE * 0x100010) ^ (ABOVE * 0x1000100) ^ (ABOVE * 0x10001000)
    WORD: tl.constexpr = (OTHERS + (1 << 31)) % (1 << 32) - (1 << 31)
    words: tl.tuple = ()
    for i in tl.static_range(0, len(codes), 4):
        nibbles = codes[i] ^ (codes[i + 1] << 4) ^ (codes[i + 2] << 8)
        nibbles = nibbles ^ (codes[i + 3] << 12) ^ WORD
        even = byte_perm(signs[i], signs[i + 2], 0x7351)
        odd = byte_perm(signs[i + 1], signs[i + 3], 0x7351)
        words = words + (bit_select(bit_select(odd, even >> 4, _TOPS), nibbles, _NIBBLE_TOPS),)
    return words


@triton.jit
def in_order_of_sixes(values: tl.tuple) -> tl.tuple:
    """32 values in the order that `pack_sixes` takes: each sixteen, as a 4 x 4 matrix, transposed."""
    ordered: tl.tuple = ()
    for i in tl.static_range(32):
        ordered = ordered + (values[i // 16 * 16 + i % 4 * 4 + i // 4 % 4],)
    return ordered


@triton.jit
def pack_sixes(words: tl.tuple) -> tl.tuple:
    """32 codes of six bits: three int64.

    Args:
        words: eight, with a code in the low bits of each byte, its sign in the top bit, zeros between. The first holds
            elements 0, 4, 8 and 12, the next 1, 5, 9 and 13, and so on; the last four hold elements 16 to 31 likewise.
    """
    packed: tl.tuple = ()
    for i in tl.static_range(0, 8, 4):
        a, b, c, d = [bit_select(word >> 2, word, 0x20202020) for word in words[i : i + 4]]
        # The first, second and third byte of each three, which hold four codes.
        first = bit_select(b << 6, a, -0x3F3F3F40)
        second = bit_select(c << 4, b >> 2, -0x0F0F0F10)
        third = bit_select(d << 2, c >> 4, -0x03030304)
        packed = packed + (
            byte_perm(byte_perm(first, second, 0x1040), third, 0x3410),
            byte_perm(byte_perm(second, first, 0x2601), third, 0x3250),
            byte_perm(byte_perm(first, second, 0x0730), third, 0x7216),
        )
    return _wide(packed[0], packed[1]), _wide(packed[2], packed[3]), _wide(packed[4], packed[5])


@triton.jit
def _wide(low: tl.tensor, high: tl.tensor) -> tl.tensor:
    return (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)
