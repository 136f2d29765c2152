"""Load the packed weight from shared memory and decode it to the A operand of wgmma, for `gluon_kernel`.

A chunk is 64 weight rows by 128 columns. In shared memory it is uint8 [32, 128] for FP8, or uint16 [32, 64] for FP16.
The last chunk of a row may hold two blocks instead of four; the rest of its bytes are then of what comes next.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mxquant.kernels.mxfp4_sm90.decode import decode_fp8, decode_fp16, magnitude_tables
from mxquant.kernels.mxfp4_sm90.load import scale_offset


@triton.jit
def spread_two_blocks(packed: tl.tensor, UNITS: tl.constexpr) -> tl.tensor:
    """Spread a chunk of two blocks, [32, 8 * UNITS], over the threads as a chunk of four blocks is.

    Of the four threads t that share rows, the first two have a block each. The others get what lies beyond.
    """
    bits = tl.reshape(packed, (2, 2, 4, 2, 4, 2, UNITS))  # beyond or not, half, warp, g's first bit, g's others, t
    return tl.reshape(tl.permute(bits, (1, 2, 3, 4, 0, 5, 6)), (32, 8 * UNITS))


@gluon.constexpr_function
def _two_block_layout(units: int) -> gl.DistributedLinearLayout:
    """The layout of a chunk of two blocks, [32, 8 * units], in which every thread has its vectors, `units` a vector."""
    within = [[0, 1 << bit] for bit in range(units.bit_length() - 1)]
    lanes = [[0, units], [16, 0], [0, 2 * units], [0, 4 * units], [1, 0]]
    return gl.DistributedLinearLayout([*within, [8, 0]], lanes, [[2, 0], [4, 0]], [], [32, 8 * units])


@triton.jit
def load_tail_exponents(
    w_scale: tl.tensor, row: tl.tensor, thread: tl.tensor, first: tl.tensor, K: tl.tensor, BLOCKS: tl.constexpr
) -> tl.tensor:
    """The packed exponents of a thread, of the BLOCKS blocks from `first` on, which are the last of their rows.

    As elsewhere, those of two chunks, two halves each. Blocks that do not exist get zeros, whose values are finite.
    """
    halves = w_scale.to(tl.pointer_type(tl.uint16), bitcast=True)
    n = row + (thread // 32 * 16 + thread % 32 // 4)
    block = first + thread % 4
    packed_exponents = tl.load(halves + scale_offset(n, block, K) // 2, mask=block < K // 32, other=0).to(tl.int32)
    if BLOCKS > 4:
        block += 4
        upper = tl.load(halves + scale_offset(n, block, K) // 2, mask=block < K // 32, other=0).to(tl.int32)
        packed_exponents |= upper << 16
    return packed_exponents


@gluon.jit
def _load_vectors(words: gl.shared_memory_descriptor, BLOCKS: gl.constexpr) -> gl.tensor:
    """The 16-byte vectors [2 (half), 128 (thread), units] of a chunk in shared memory."""
    UNITS: gl.constexpr = words.shape[1] // 8
    LOAD: gl.constexpr = gl.BlockedLayout([1, UNITS], [4, 8], [4, 1], [1, 0])
    if BLOCKS == 4:
        packed = words.load(LOAD)
    else:
        gl.static_assert(BLOCKS == 2)
        packed = words.load(_two_block_layout(UNITS))
        packed = gl.convert_layout(spread_two_blocks(packed, UNITS), LOAD, assert_trivial=True)
    return gl.reshape(packed, (2, 128, UNITS))


@gluon.jit
def _broadcast_tables(vectors: gl.tensor, packed_exponents: gl.tensor) -> tuple[gl.tensor, ...]:
    """For each unit of the vectors of a chunk, the tables of its block. The lower half of `packed_exponents` counts."""
    LAYOUT: gl.constexpr = vectors.type.layout
    half = gl.arange(0, 2, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    EXPONENTS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))
    packed_exponents = gl.convert_layout(packed_exponents, EXPONENTS, assert_trivial=True)
    exponent = (packed_exponents[None, :] >> (half * 8)[:, None]) & 0x1F
    low, high = magnitude_tables(exponent)
    return gl.broadcast(low[:, :, None], vectors)[0], gl.broadcast(high[:, :, None], vectors)[0]


@gluon.jit
def load_fp8_operand(
    words: gl.shared_memory_descriptor, packed_exponents: gl.tensor, MMA_LAYOUT: gl.constexpr, BLOCKS: gl.constexpr
) -> gl.tensor:
    """Load and decode a chunk, uint8 [32, 128], to E5M2 [64, 128] as wgmma takes it from registers."""
    vectors = _load_vectors(words, BLOCKS)
    low, high = _broadcast_tables(vectors, packed_exponents)
    half0, half1 = decode_fp8(vectors, low, high)
    w = gl.join(half0, half1).to(gl.float8e5, bitcast=True)
    w = gl.permute(gl.reshape(w, (2, 4, 8, 4, 4, 4, 2)), (1, 0, 2, 4, 6, 3, 5))  # half warp g t j b h
    return gl.convert_layout(gl.reshape(w, (64, 128)), gl.DotOperandLayout(0, MMA_LAYOUT, 4), assert_trivial=True)


@gluon.jit
def load_fp16_operand(
    words: gl.shared_memory_descriptor, packed_exponents: gl.tensor, MMA_LAYOUT: gl.constexpr, BLOCKS: gl.constexpr
) -> gl.tensor:
    """Load and decode a chunk, uint16 [32, 64], to FP16 [64, 128] as wgmma takes it from registers."""
    vectors = _load_vectors(words, BLOCKS)
    low, high = _broadcast_tables(vectors, packed_exponents)
    even0, odd0, even1, odd1 = decode_fp16(vectors, low, high)
    w = gl.join(gl.join(even0, odd0), gl.join(even1, odd1))
    w = gl.permute(gl.reshape(w, (2, 4, 8, 4, 4, 2, 2, 2)), (1, 0, 2, 4, 7, 6, 3, 5))  # half warp g t q e h o
    return gl.convert_layout(gl.reshape(w, (64, 128)), gl.DotOperandLayout(0, MMA_LAYOUT, 2), assert_trivial=True)
