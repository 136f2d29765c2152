"""A tiled MXFP4 weight (`tiles`) from shared memory to the A operand of wgmma, in Gluon, for `tiled_gluon`.

A chunk is 64 weight rows by 128 columns. In shared memory it is [32, 128] bytes, or as many as [32, 64] halves; the
last chunk of a row may hold fewer than four blocks, and the rest of its bytes are then of what comes next.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mxquant.kernels.mxfp4_sm90.decode import BYTES_PTX, HALVES_PTX, tables
from mxquant.kernels.mxfp4_sm90.load import scale_address


@triton.jit
def spread_pair(packed: tl.tensor, UNITS: tl.constexpr) -> tl.tensor:
    """The units [32, 8 * units] of a chunk of two blocks where those of a chunk of four have theirs.

    Of the four threads t that share rows, the first two have a block each; the others get what lies beyond.
    """
    bits = tl.reshape(packed, (2, 2, 4, 2, 4, 2, UNITS))  # beyond or not, half, warp, g's first bit, g's others, t
    return tl.reshape(tl.permute(bits, (1, 2, 3, 4, 0, 5, 6)), (32, 8 * UNITS))


@gluon.constexpr_function
def _pair_layout(units: int) -> gl.DistributedLinearLayout:
    """Every thread's pieces of a chunk of two blocks, [32, 8 * units], 16 bytes in `units`."""
    within = [[0, 1 << bit] for bit in range(units.bit_length() - 1)]
    lanes = [[0, units], [16, 0], [0, 2 * units], [0, 4 * units], [1, 0]]
    return gl.DistributedLinearLayout([*within, [8, 0]], lanes, [[2, 0], [4, 0]], [], [32, 8 * units])


@triton.jit
def rest_exponents(
    scale_bytes: tl.tensor, row: tl.tensor, thread: tl.tensor, first: tl.tensor, K: tl.tensor, BLOCKS: tl.constexpr
) -> tl.tensor:
    """The exponents that a thread needs of up to eight blocks from `first` on, which are the last of their rows.

    As in the other steps: of two chunks, two halves each. Blocks that are not there get zeros, whose values are finite.
    """
    halves = scale_bytes.to(tl.pointer_type(tl.uint16), bitcast=True)
    n = row + (thread // 32 * 16 + thread % 32 // 4)
    block = first + thread % 4
    four = tl.load(halves + scale_address(n, block, K) // 2, mask=block < K // 32, other=0).to(tl.int32)
    if BLOCKS > 4:
        block += 4
        upper = tl.load(halves + scale_address(n, block, K) // 2, mask=block < K // 32, other=0).to(tl.int32)
        four |= upper << 16
    return four


@gluon.jit
def _pieces_of(words: gl.shared_memory_descriptor, BLOCKS: gl.constexpr) -> gl.tensor:
    """The pieces [2 (half), 128 (thread), units] of a chunk in shared memory."""
    UNITS: gl.constexpr = words.shape[1] // 8
    LOAD: gl.constexpr = gl.BlockedLayout([1, UNITS], [4, 8], [4, 1], [1, 0])
    if BLOCKS == 4:
        packed = words.load(LOAD)
    else:
        gl.static_assert(BLOCKS == 2)
        packed = words.load(_pair_layout(UNITS))
        packed = gl.convert_layout(spread_pair(packed, UNITS), LOAD, assert_trivial=True)
    return gl.reshape(packed, (2, 128, UNITS))


@gluon.jit
def _tables_of(pieces: gl.tensor, four: gl.tensor) -> tuple[gl.tensor, ...]:
    """For each unit of the pieces of a chunk the tables of its block (`word_decode`), of exponents in the lower half of
    `four`."""
    LAYOUT: gl.constexpr = pieces.type.layout
    half = gl.arange(0, 2, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    four = gl.convert_layout(four, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)), assert_trivial=True)
    exponent = (four[None, :] >> (half * 8)[:, None]) & 0x1F
    low, high = tables(exponent)
    return gl.broadcast(low[:, :, None], pieces)[0], gl.broadcast(high[:, :, None], pieces)[0]


@gluon.jit
def bytes_of(words: gl.shared_memory_descriptor, four: gl.tensor, MMA: gl.constexpr, BLOCKS: gl.constexpr) -> gl.tensor:
    """E5M2 values [64, 128], as wgmma takes them from registers, of a chunk in shared memory, uint8 [32, 128]."""
    pieces = _pieces_of(words, BLOCKS)
    low, high = _tables_of(pieces, four)
    half0, half1 = gl.inline_asm_elementwise(
        BYTES_PTX, "=&r,=&r,r,r,r,r,r,r,r,r,r", [pieces, low, high], dtype=(gl.uint8, gl.uint8), is_pure=True, pack=4
    )
    w = gl.join(half0, half1).to(gl.float8e5, bitcast=True)
    w = gl.permute(gl.reshape(w, (2, 4, 8, 4, 4, 4, 2)), (1, 0, 2, 4, 6, 3, 5))  # half warp g t j b h
    return gl.convert_layout(gl.reshape(w, (64, 128)), gl.DotOperandLayout(0, MMA, 4), assert_trivial=True)


@gluon.jit
def halves_of(
    words: gl.shared_memory_descriptor, four: gl.tensor, MMA: gl.constexpr, BLOCKS: gl.constexpr
) -> gl.tensor:
    """The same in FP16, of uint16 [32, 64]."""
    pieces = _pieces_of(words, BLOCKS)
    low, high = _tables_of(pieces, four)
    even0, odd0, even1, odd1 = gl.inline_asm_elementwise(
        HALVES_PTX, "=&r,=&r,=&r,=&r,r,r,r,r,r", [pieces, low, high],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=2,
    )  # fmt: skip
    w = gl.join(gl.join(even0, odd0), gl.join(even1, odd1))
    w = gl.permute(gl.reshape(w, (2, 4, 8, 4, 4, 2, 2, 2)), (1, 0, 2, 4, 7, 6, 3, 5))  # half warp g t q e h o
    return gl.convert_layout(gl.reshape(w, (64, 128)), gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)
