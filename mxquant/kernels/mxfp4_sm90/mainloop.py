"""The product of a few rows with tiles of a weight that are decoded in registers, as the A operand of wgmma.

So it is computed transposed, C^T = W X^T.

FP8 tensor cores add up with 14 bits below the largest partial sum, so there partial sums go to fp32 registers every 128
or 256 columns. Sums of FP16 products are fp32's.

Shape suffixes: M input rows, N weight rows, K columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mxquant.kernels.mxfp4_sm90.decode import decode_bytes, decode_halves, tables

# What the largest block exponent of a weight's row becomes, in E5M2 and in FP16.
TOP = tl.constexpr(13)


@triton.jit
def _block_exponents(four: tl.tensor, step: tl.tensor, R: tl.constexpr) -> tl.tensor:
    """Relative exponents [R, 128] of pieces, from the int32 of 256 columns, of which a step may be one half."""
    shift = tl.arange(0, 4) * 8 if four.shape[0] * 4 == R else step % 2 * 16 + tl.arange(0, 2) * 8
    return tl.reshape((four[:, None, :] >> shift[None, :, None]) & 0x1F, (R, 128))


@triton.jit
def _decode_tile(packed: tl.tensor, exponent: tl.tensor, TILES: tl.constexpr, CHUNKS: tl.constexpr) -> tl.tensor:
    """E5M2 or FP16 values [64 * TILES, 128 * CHUNKS] of 16-byte pieces [R, 128 * 16 bytes] and exponents [R, 128]."""
    R: tl.constexpr = TILES * CHUNKS * 2
    UNITS: tl.constexpr = packed.shape[1] // 128
    low, high = tables(exponent)
    low = tl.broadcast_to(low[:, :, None], (R, 128, UNITS))
    high = tl.broadcast_to(high[:, :, None], (R, 128, UNITS))
    word = tl.reshape(packed, (R, 128, UNITS))
    if packed.dtype == tl.uint8:
        half0, half1 = decode_bytes(word, low, high)
        w = tl.join(half0, half1).to(tl.float8e5, bitcast=True)
        w = tl.reshape(w, (TILES, CHUNKS, 2, 4, 8, 4, 4, 4, 2))  # tile chunk half warp g t j b h
        w = tl.permute(w, (0, 3, 2, 4, 1, 6, 8, 5, 7))
    else:
        even0, odd0, even1, odd1 = decode_halves(word, low, high)
        w = tl.join(tl.join(even0, odd0), tl.join(even1, odd1))
        w = tl.reshape(w, (TILES, CHUNKS, 2, 4, 8, 4, 4, 2, 2, 2))  # tile chunk half warp g t q e h o
        w = tl.permute(w, (0, 3, 2, 4, 1, 6, 9, 8, 5, 7))
    return tl.reshape(w, (64 * TILES, 128 * CHUNKS))


@triton.jit
def _piece_pointers(
    words: tl.tensor,
    scales: tl.tensor,
    tile: tl.tensor,
    first: tl.tensor,
    K: tl.tensor,
    R: tl.constexpr,
    CHUNKS: tl.constexpr,
    UNITS: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Pointers to the pieces of the first step, and to the exponents of the first 256 columns."""
    # Two-dimensional pointers [piece, thread x 16 bytes] keep the copies to shared memory free of bank conflicts.
    piece = tl.arange(0, R)
    unit = tl.arange(0, 128 * UNITS)
    word_ptr = words + (tile + piece[:, None] // (2 * CHUNKS)) * (K * 2 * UNITS)
    word_ptr += (first * CHUNKS * 2 + piece[:, None] % (2 * CHUNKS)) * (128 * UNITS) + unit[None, :]
    PAIRS: tl.constexpr = (CHUNKS + 1) // 2  # int32 of exponents, of 256 columns each
    quad = tl.arange(0, R // (2 * CHUNKS) * PAIRS)
    scale_ptr = scales + (tile + quad[:, None] // PAIRS) * (K // 2)
    scale_ptr += (quad[:, None] % PAIRS) * 128 + tl.arange(0, 128)[None, :]
    return word_ptr, scale_ptr


@triton.jit
def _decode_rest(
    words: tl.tensor,
    scale_bytes: tl.tensor,
    tile: tl.tensor,
    chunk: tl.tensor,
    K: tl.tensor,
    BLOCKS: tl.constexpr,
    TILES: tl.constexpr,
    UNITS: tl.constexpr,
) -> tl.tensor:
    """`_decode_tile` of a chunk of BLOCKS blocks beyond the last 256 columns, and zeros."""
    piece = tl.arange(0, 2 * TILES)  # tile, half
    tile_of = tile + piece[:, None] // 2
    half = piece[:, None] % 2
    unit = tl.arange(0, 128 * UNITS)[None, :]
    address = half * (32 * BLOCKS) + unit // (4 * UNITS) * BLOCKS + unit // UNITS % 4
    address = tile_of * (K * 2 * UNITS) + chunk * (256 * UNITS) + address * UNITS + unit % UNITS
    packed = tl.load(words + address, mask=unit // UNITS % 4 < BLOCKS, other=0)
    thread = tl.arange(0, 128)[None, :]
    address = tile_of * (K * 2) + chunk * 256 + (thread // 4 * BLOCKS + thread % 4) * 2 + half
    byte = tl.load(scale_bytes + address, mask=thread % 4 < BLOCKS, other=0)
    return _decode_tile(packed, byte.to(tl.int32) & 0x1F, TILES, 1)


@triton.jit
def columns_of(part: tl.tensor, parts: tl.tensor, K: tl.tensor) -> tuple[tl.tensor, ...]:
    """The first step of 256 columns of a part, and how many it has: the first parts one more, if they are uneven."""
    each = K // 256 // parts
    more = K // 256 % parts
    return part * each + tl.minimum(part, more), each + (part < more).to(tl.int32)


@triton.jit
def tile_product(
    words: tl.tensor,
    scale_bytes: tl.tensor,
    x_row: tl.tensor,
    inside: tl.tensor,
    tile: tl.tensor,
    part: tl.tensor,
    parts: tl.tensor,
    K: tl.tensor,
    REST: tl.constexpr,
    TILES: tl.constexpr,
    BK: tl.constexpr,
    PROMOTE: tl.constexpr,
) -> tl.tensor:
    """Sums [64 * TILES, BM] over a part of the columns, relative to the scales of both rows.

    Args:
        words, scale_bytes: uint8 pointers to the tiles.
        x_row: pointers [BM] to folded rows, E5M2 or FP16; inside: [BM], which of them exist.
        tile: index of the first tile, int64; part: which of the `parts` that share the steps of 256 columns.
        REST: blocks that remain, left to the last part.
    """
    CHUNKS: tl.constexpr = BK // 128
    R: tl.constexpr = TILES * CHUNKS * 2  # 16-byte pieces of a thread: tile, chunk, half
    FP16: tl.constexpr = x_row.dtype.element_ty == tl.float16
    UNITS: tl.constexpr = 8 if FP16 else 16  # of a piece, as the decoder takes them
    source = words.to(tl.pointer_type(tl.uint16)) if FP16 else words
    first, steps = columns_of(part, parts, K)
    first *= 256 // BK
    steps *= 256 // BK
    scales = scale_bytes.to(tl.pointer_type(tl.int32))
    word_ptr, scale_ptr = _piece_pointers(source, scales, tile, first, K, R, CHUNKS, UNITS)
    x_ptr = x_row[None, :] + first * BK + tl.arange(0, BK)[:, None]
    total = tl.zeros((64 * TILES, x_row.shape[0]), tl.float32)
    for step in range(first, first + steps):
        packed = tl.load(word_ptr)
        four = tl.load(scale_ptr + step * BK // 256 * 128)
        x = tl.load(x_ptr, mask=inside[None, :], other=0.0)
        w = _decode_tile(packed, _block_exponents(four, step, R), TILES, CHUNKS)
        total += tl.dot(w, x, max_num_imprecise_acc=PROMOTE)
        word_ptr += CHUNKS * 256 * UNITS
        x_ptr += BK
    if REST > 0 and part == parts - 1:
        for i in tl.static_range((REST + 3) // 4):
            chunk = K // 256 * 2 + i
            blocks = REST - 4 * i if REST - 4 * i < 4 else 4
            w = _decode_rest(source, scale_bytes, tile, chunk, K, blocks, TILES, UNITS)
            column = chunk * 128 + tl.arange(0, 128)
            x = tl.load(x_row[None, :] + column[:, None], mask=inside[None, :], other=0.0)
            total += tl.dot(w, x, max_num_imprecise_acc=PROMOTE if PROMOTE > BK else 128)
    return total
