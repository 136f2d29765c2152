"""A block of elements in each thread of a kernel: as a tuple of tensors [BLOCKS], one for each element or each word.

What is done with a block then needs no other thread. Loads and stores are of whole words; the codes are packed on the
way, from two in each word.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mxquant.kernels.bf16_pairs import halves, nearest_pair, odd_pair, pair


@triton.jit
def load_block(words_ptr: tl.tensor, block: tl.tensor, WORDS: tl.constexpr) -> tl.tuple:
    """The words of each block, by vectors of four."""
    words: tl.tuple = ()
    for i in tl.static_range(0, WORDS, 4):
        words = words + four_words(tl.load(words_ptr + block[:, None] * WORDS + (i + tl.arange(0, 4)[None, :])))
    return words


@triton.jit
def load_pairs(x: tl.tensor) -> tl.tuple:
    """The 16 words of blocks of 32 halves that begin at `x` [BLOCKS], at any address: the compiler loads as much at a
    time as it knows to be aligned.
    """
    words: tl.tuple = ()
    for i in tl.static_range(0, 32, 8):
        words = words + four_pairs(tl.load(x[:, None] + (i + tl.arange(0, 8)[None, :])))
    return words


@triton.jit
def four_pairs(eight: tl.tensor) -> tl.tuple:
    """The four words of eight halves [BLOCKS, 8]."""
    bits = eight.to(tl.int16, bitcast=True)
    low, high = tl.split(tl.reshape(bits, [bits.shape[0], 2, 2, 2]))
    low_even, low_odd = tl.split(low)
    high_even, high_odd = tl.split(high)
    a, c = tl.split(pair(low_even.to(tl.int32), high_even.to(tl.int32)))
    b, d = tl.split(pair(low_odd.to(tl.int32), high_odd.to(tl.int32)))
    return a, b, c, d


@triton.jit
def four_words(words: tl.tensor) -> tl.tuple:
    """Words [BLOCKS, 4] as a tuple."""
    even, odd = tl.split(tl.reshape(words, [words.shape[0], 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def fp32_values(words: tl.tuple, DTYPE: tl.constexpr) -> tl.tuple:
    """The elements in words, in fp32."""
    values: tl.tuple = ()
    for i in tl.static_range(len(words)):
        if tl.float32 == DTYPE:
            values = values + (words[i].to(tl.float32, bitcast=True),)
        elif tl.bfloat16 == DTYPE:
            low, high = halves(words[i])
            values = values + (low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True))
        else:
            low, high = words[i].to(tl.int16), (words[i] >> 16).to(tl.int16)
            values = values + (_float_of_half(low), _float_of_half(high))
    return values


@triton.jit
def nearest_pairs(values: tl.tuple) -> tl.tuple:
    """fp32 values as pairs of bf16, rounded to nearest even."""
    words: tl.tuple = ()
    for i in tl.static_range(0, len(values), 2):
        words = words + (nearest_pair(values[i], values[i + 1]),)
    return words


@triton.jit
def _float_of_half(bits: tl.tensor) -> tl.tensor:
    return bits.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def odd_pairs(values: tl.tuple) -> tl.tuple:
    """fp32 values as pairs of bf16, rounded to odd."""
    bits = [value.to(tl.int32, bitcast=True) for value in values]
    words: tl.tuple = ()
    for i in tl.static_range(0, len(bits), 2):
        words = words + (odd_pair(bits[i], bits[i + 1]),)
    return words


@triton.jit
def pack_pairs(codes: tl.tuple, signs: tl.tuple, BITS: tl.constexpr) -> tl.tuple:
    """The packed codes of a block: int32 words, or three int64 of 32 codes of six bits.

    Args:
        codes: words with a code in each half, without its sign; what stands above is cut off here.
        signs: words with its sign as the top bit of each half.
    """
    SIGN: tl.constexpr = (1 << (BITS - 1)) * 0x10001
    signed: tl.tuple = ()
    for i in tl.static_range(len(codes)):
        signed = signed + (choose_bits(signs[i] >> (16 - BITS), codes[i], SIGN),)
    words: tl.tuple = ()
    if BITS == 6:
        words = _pack_sixes(signed)
    elif BITS == 4:
        for i in tl.static_range(0, len(codes), 4):
            words = words + (pair(four_nibbles(signed[i], signed[i + 1]), four_nibbles(signed[i + 2], signed[i + 3])),)
    else:
        for i in tl.static_range(0, len(codes), 2):
            words = words + (pair(_two_bytes(signed[i]), _two_bytes(signed[i + 1])),)
    return words


@triton.jit
def choose_bits(where_set: tl.tensor, where_clear: tl.tensor, MASK: tl.constexpr) -> tl.tensor:
    """Bits by a mask: one instruction."""
    return (where_set & MASK) | (where_clear & ~MASK)


@triton.jit
def four_nibbles(first: tl.tensor, second: tl.tensor) -> tl.tensor:
    """Four codes of two words in the low half."""
    transposed = choose_bits(first, second << 8, 0x00FF00FF)  # codes 0, 2, 1, 3, one a byte
    return choose_bits(transposed, transposed >> 12, 0x0F0F)


@triton.jit
def _two_bytes(word: tl.tensor) -> tl.tensor:
    return choose_bits(word, word >> 8, 0xFF)


@triton.jit
def _pack_sixes(signed: tl.tuple) -> tl.tuple:
    """32 codes of six bits, two a word: three int64."""
    twelves = [choose_bits(word, word >> 10, 0x3F) for word in signed]
    words: tl.tuple = ()
    for i in tl.static_range(0, 16, 8):
        a = choose_bits(twelves[i], twelves[i + 1] << 12, 0xFFF)  # 24 bits each
        b = choose_bits(twelves[i + 2], twelves[i + 3] << 12, 0xFFF)
        c = choose_bits(twelves[i + 4], twelves[i + 5] << 12, 0xFFF)
        d = choose_bits(twelves[i + 6], twelves[i + 7] << 12, 0xFFF)
        words = words + (
            choose_bits(a, b << 24, 0xFFFFFF),
            choose_bits(b >> 8, c << 16, 0xFFFF),
            choose_bits(c >> 16, d << 8, 0xFF),
        )
    return _wide(words[0], words[1]), _wide(words[2], words[3]), _wide(words[4], words[5])


@triton.jit
def _wide(low: tl.tensor, high: tl.tensor) -> tl.tensor:
    return (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)


@triton.jit
def store_block(qdata_ptr: tl.tensor, words: tl.tuple, block: tl.tensor, inside: tl.tensor) -> None:
    """Store the words of each block; three as the first of four, so that neighbouring threads store neighbours."""
    WORDS: tl.constexpr = len(words)
    if WORDS == 3:
        words = [words[0], words[1], words[2], words[2]]
    WIDTH: tl.constexpr = len(words)
    column = tl.arange(0, WIDTH)[None, :]
    mask = inside[:, None] & (column < WORDS)
    tl.store((qdata_ptr + block * WORDS)[:, None] + column, joined_words(words), mask=mask)


@triton.jit
def joined_words(words: tl.tuple) -> tl.tensor:
    """Words [BLOCKS], 2 to 32 of them, as one tensor [BLOCKS, words]."""
    joined = _join_halves(words)
    for _ in tl.static_range(4):
        if len(joined) > 1:
            joined = _join_halves(joined)
    tl.static_assert(len(joined) == 1)
    return tl.reshape(joined[0], [words[0].shape[0], len(words)])


@triton.jit
def _join_halves(words: tl.tuple) -> tl.tuple:
    joined: tl.tuple = ()
    for i in tl.static_range(len(words) // 2):
        joined = joined + (tl.join(words[i], words[i + len(words) // 2]),)
    return joined
