"""The mainloop of the split-K kernels: tiles of the packed weight are decoded in registers and multiplied.

The decoded weight is the A operand of wgmma, so the product is computed transposed, C^T = W X^T.

FP8 tensor cores add up with 14 bits below the largest partial sum. So partial sums are promoted to fp32 registers every
128 or 256 columns. Sums of FP16 products are fp32 sums.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from mxquant.kernels.mxfp4_sm90.decode import decode_fp8, decode_fp16, magnitude_tables
from mxquant.kernels.mxfp4_sm90.load import PackedWeight

# What the largest block exponent of a weight's row becomes, in E5M2 and in FP16.
TOP_EXPONENT = tl.constexpr(13)


class Split(NamedTuple):
    """Which part of K a program computes, and how many there are."""

    split_id: tl.tensor
    num_splits: tl.tensor


@triton.jit
def _unpack_exponents(packed_exponents: tl.tensor, step: tl.tensor, R: tl.constexpr) -> tl.tensor:
    """Relative exponents [R, 128] of vectors, from an int32 for each 256 columns. A step may be one half of them."""
    WHOLE: tl.constexpr = packed_exponents.shape[0] * 4 == R
    shift = tl.arange(0, 4) * 8 if WHOLE else step % 2 * 16 + tl.arange(0, 2) * 8
    return tl.reshape((packed_exponents[:, None, :] >> shift[None, :, None]) & 0x1F, (R, 128))


@triton.jit
def _decode_tile(packed: tl.tensor, exponent: tl.tensor, TILES: tl.constexpr, CHUNKS: tl.constexpr) -> tl.tensor:
    """Decode 16-byte vectors [R, 128 * units], with the exponents [R, 128] of their blocks, to E5M2 or FP16 values
    [64 * TILES, 128 * CHUNKS].
    """
    R: tl.constexpr = TILES * CHUNKS * 2
    UNITS: tl.constexpr = packed.shape[1] // 128
    low, high = magnitude_tables(exponent)
    low = tl.broadcast_to(low[:, :, None], (R, 128, UNITS))
    high = tl.broadcast_to(high[:, :, None], (R, 128, UNITS))
    word = tl.reshape(packed, (R, 128, UNITS))
    if packed.dtype == tl.uint8:
        half0, half1 = decode_fp8(word, low, high)
        w = tl.join(half0, half1).to(tl.float8e5, bitcast=True)
        w = tl.reshape(w, (TILES, CHUNKS, 2, 4, 8, 4, 4, 4, 2))  # tile chunk half warp g t j b h
        w = tl.permute(w, (0, 3, 2, 4, 1, 6, 8, 5, 7))
    else:
        even0, odd0, even1, odd1 = decode_fp16(word, low, high)
        w = tl.join(tl.join(even0, odd0), tl.join(even1, odd1))
        w = tl.reshape(w, (TILES, CHUNKS, 2, 4, 8, 4, 4, 2, 2, 2))  # tile chunk half warp g t q e h o
        w = tl.permute(w, (0, 3, 2, 4, 1, 6, 9, 8, 5, 7))
    return tl.reshape(w, (64 * TILES, 128 * CHUNKS))


@triton.jit
def _vector_pointers(
    w_packed: tl.tensor,
    w_scale: tl.tensor,
    tile: tl.tensor,
    first_step: tl.tensor,
    K: tl.tensor,
    R: tl.constexpr,
    CHUNKS: tl.constexpr,
    UNITS: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Pointers to the 16-byte vectors of the first step, and to the exponents of the first 256 columns."""
    # NOTE: two-dimensional pointers [vector, thread x 16 bytes] keep the copies to shared memory free of bank
    # conflicts.
    vector = tl.arange(0, R)
    unit = tl.arange(0, 128 * UNITS)
    packed_ptr = w_packed + (tile + vector[:, None] // (2 * CHUNKS)) * (K * 2 * UNITS)
    packed_ptr += (first_step * CHUNKS * 2 + vector[:, None] % (2 * CHUNKS)) * (128 * UNITS) + unit[None, :]
    PAIRS: tl.constexpr = (CHUNKS + 1) // 2  # int32 of exponents, of 256 columns each
    quad = tl.arange(0, R // (2 * CHUNKS) * PAIRS)
    scale_ptr = w_scale + (tile + quad[:, None] // PAIRS) * (K // 2)
    scale_ptr += (quad[:, None] % PAIRS) * 128 + tl.arange(0, 128)[None, :]
    return packed_ptr, scale_ptr


@triton.jit
def _decode_k_tail(
    w_packed: tl.tensor,
    w_scale: tl.tensor,
    tile: tl.tensor,
    chunk: tl.tensor,
    K: tl.tensor,
    BLOCKS: tl.constexpr,
    TILES: tl.constexpr,
    UNITS: tl.constexpr,
) -> tl.tensor:
    """`_decode_tile` of a chunk of BLOCKS blocks beyond the last whole 256 columns, padded with zeros."""
    vector = tl.arange(0, 2 * TILES)  # tile, half
    tile_of = tile + vector[:, None] // 2
    half = vector[:, None] % 2
    unit = tl.arange(0, 128 * UNITS)[None, :]
    offset = half * (32 * BLOCKS) + unit // (4 * UNITS) * BLOCKS + unit // UNITS % 4
    offset = tile_of * (K * 2 * UNITS) + chunk * (256 * UNITS) + offset * UNITS + unit % UNITS
    packed = tl.load(w_packed + offset, mask=unit // UNITS % 4 < BLOCKS, other=0)
    thread = tl.arange(0, 128)[None, :]
    offset = tile_of * (K * 2) + chunk * 256 + (thread // 4 * BLOCKS + thread % 4) * 2 + half
    byte = tl.load(w_scale + offset, mask=thread % 4 < BLOCKS, other=0)
    return _decode_tile(packed, byte.to(tl.int32) & 0x1F, TILES, 1)


@triton.jit
def split_range(split: Split, K: tl.tensor) -> tuple[tl.tensor, ...]:
    """The first step of 256 columns of a split, and how many it has. The first splits may have one more."""
    each = K // 256 // split.num_splits
    more = K // 256 % split.num_splits
    return split.split_id * each + tl.minimum(split.split_id, more), each + (split.split_id < more).to(tl.int32)


@triton.jit
def mainloop(
    weight: PackedWeight,
    x_row: tl.tensor,
    inside: tl.tensor,
    tile: tl.tensor,
    split: Split,
    K_TAIL: tl.constexpr,
    TILES: tl.constexpr,
    BK: tl.constexpr,
    PROMOTE: tl.constexpr,
) -> tl.tensor:
    """Sums [64 * TILES, BM] over one split of K, relative to the scales of both rows.

    Args:
        x_row: pointers [BM] to rescaled rows, E5M2 or FP16, columns permuted.
        inside: [BM], which of them exist.
        tile: index of the first tile of 64 weight rows, int64.
        K_TAIL: blocks of 32 columns beyond the last whole 256 columns; the last split computes them.
        BK: columns of a step.
        PROMOTE: columns that tensor cores add up before a sum is promoted to fp32.
    """
    CHUNKS: tl.constexpr = BK // 128
    R: tl.constexpr = TILES * CHUNKS * 2  # 16-byte vectors of a thread: tile, chunk, half
    FP16: tl.constexpr = x_row.dtype.element_ty == tl.float16
    UNITS: tl.constexpr = 8 if FP16 else 16  # of a vector, as the decoder takes them
    K = weight.K
    source = weight.w_packed.to(tl.pointer_type(tl.uint16)) if FP16 else weight.w_packed
    first, steps = split_range(split, K)
    first *= 256 // BK
    steps *= 256 // BK
    scales = weight.w_scale.to(tl.pointer_type(tl.int32))
    packed_ptr, scale_ptr = _vector_pointers(source, scales, tile, first, K, R, CHUNKS, UNITS)
    x_ptr = x_row[None, :] + first * BK + tl.arange(0, BK)[:, None]
    total = tl.zeros((64 * TILES, x_row.shape[0]), tl.float32)
    for step in range(first, first + steps):
        packed = tl.load(packed_ptr)
        packed_exponents = tl.load(scale_ptr + step * BK // 256 * 128)
        x = tl.load(x_ptr, mask=inside[None, :], other=0.0)
        w = _decode_tile(packed, _unpack_exponents(packed_exponents, step, R), TILES, CHUNKS)
        total += tl.dot(w, x, max_num_imprecise_acc=PROMOTE)
        packed_ptr += CHUNKS * 256 * UNITS
        x_ptr += BK
    if K_TAIL > 0 and split.split_id == split.num_splits - 1:
        for i in tl.static_range((K_TAIL + 3) // 4):
            chunk = K // 256 * 2 + i
            blocks = K_TAIL - 4 * i if K_TAIL - 4 * i < 4 else 4
            w = _decode_k_tail(source, weight.w_scale, tile, chunk, K, blocks, TILES, UNITS)
            column = chunk * 128 + tl.arange(0, 128)
            x = tl.load(x_row[None, :] + column[:, None], mask=inside[None, :], other=0.0)
            total += tl.dot(w, x, max_num_imprecise_acc=PROMOTE if PROMOTE > BK else 128)
    return total
