"""A block of elements in each thread: a tuple of tensors [BLOCKS], one for each element or each word.

Work on a block then needs no other thread. Loads and stores are of whole words.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mxquant.kernels.primitives.bf16x2 import halves, nearest_pair, pair


@triton.jit
def load_block(words_ptr: tl.tensor, block: tl.tensor, WORDS: tl.constexpr) -> tl.tuple:
    """The words of each block, loaded as vectors of four."""
    words: tl.tuple = ()
    for i in tl.static_range(0, WORDS, 4):
        words = words + four_words(tl.load(words_ptr + block[:, None] * WORDS + (i + tl.arange(0, 4)[None, :])))
    return words


@triton.jit
def load_pairs(x: tl.tensor) -> tl.tuple:
    """The 16 words of blocks of 32 half-precision numbers at the pointers `x` [BLOCKS], of any alignment."""
    words: tl.tuple = ()
    for i in tl.static_range(0, 32, 8):
        words = words + four_pairs(tl.load(x[:, None] + (i + tl.arange(0, 8)[None, :])))
    return words


@triton.jit
def four_pairs(eight: tl.tensor) -> tl.tuple:
    """The four words of eight half-precision numbers [BLOCKS, 8]."""
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
            low = words[i].to(tl.int16).to(tl.float16, bitcast=True)
            high = (words[i] >> 16).to(tl.int16).to(tl.float16, bitcast=True)
            values = values + (low.to(tl.float32), high.to(tl.float32))
    return values


@triton.jit
def nearest_pairs(values: tl.tuple) -> tl.tuple:
    """fp32 values as pairs of bf16, rounded to nearest even."""
    words: tl.tuple = ()
    for i in tl.static_range(0, len(values), 2):
        words = words + (nearest_pair(values[i], values[i + 1]),)
    return words


@triton.jit
def join_pairs(JOIN: tl.constexpr, low: tl.tuple, high: tl.tuple) -> tl.tuple:
    """Pairs of fp32 values as bf16, by `odd_pair` (rounded to odd) or `top_pair` (truncated, for their signs)."""
    words: tl.tuple = ()
    for i in tl.static_range(len(low)):
        words = words + (JOIN(low[i].to(tl.int32, bitcast=True), high[i].to(tl.int32, bitcast=True)),)
    return words


@triton.jit
def store_block(qdata_ptr: tl.tensor, words: tl.tuple, block: tl.tensor, inside: tl.tensor) -> None:
    """Store the words of each block. Three words are stored as the first of four, so that stores coalesce."""
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
