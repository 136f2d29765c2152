"""The packed layout of MXFP4 weights that the kernels of this folder read: each thread's bytes lie together, in the
order in which it needs them.

The weight is the A operand of wgmma, held in registers. Of a tile of 64 rows and 128 columns, thread `32 * warp + 4 * g
+ t` of 128 owns whole MX blocks: block t of the rows `16 * warp + 8 * half + g`, 16 bytes each. So a thread loads 16
bytes at a time and builds one table of magnitudes for them.

- `w_packed`, uint8 [N / 64, 32K], the codes. Each chunk of 128 columns is [2 (half), 128 (thread), 16]. The K % 128
  columns that remain are stored alike, with as many t as there are blocks. A 32-bit word holds 8 consecutive codes: the
  magnitude of code i in bits 4i to 4i + 2; the sign of code 4h + b in bit 8b + 3 + 4h, where one shift brings it to the
  top of byte b.
- `w_scale`, uint8 [N / 64, 2K], the block exponents. Each pair of chunks is [128 (thread), 2 (chunk), 2 (half)], 4
  bytes a thread. The one or two chunks of the K % 256 columns that remain follow, each [threads with a block, 2
  (half)]. The lower 5 bits of a byte hold the block's exponent relative to the row's largest, as 1..27, where 27 is the
  largest; 0 stands for an all-zero block with scale byte 0. The upper 3 bits of a row's first three blocks hold its
  largest exponent.

The layout takes as many bytes as the canonical one and converts back to the same bytes. A weight fits if in each row
the exponents of the blocks that are not all zero span at most `E4M3_SPAN` (what E4M3 holds), and those of all-zero
blocks are 0 or representable.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

TILE_N, BLOCK = 64, 32
MIN_K = 256
E4M3_SPAN = 14
# The relative exponent of a row's largest block.
_TOP = 27
# Blocks in a chunk of 128 columns.
_CHUNK = 4


def pack_weight(qdata: Tensor, scale: Tensor) -> tuple[Tensor, Tensor] | None:
    """Convert canonical MXFP4 to the packed layout. Synchronizes with the device to read one flag.

    Args:
        qdata: uint8 [..., N, K / 2], N a multiple of 64, K a multiple of 32 and at least 256.
        scale: uint8 [..., N, K / 32].

    Returns:
        w_packed, uint8 [..., N / 64, 32K], and w_scale, uint8 [..., N / 64, 2K]; None if the weight does not fit.
    """
    *lead, n, blocks = scale.shape
    relative = _relative_exponents(qdata, scale)
    if relative is None:
        return None
    codes = torch.stack((qdata & 0xF, qdata >> 4), -1).view(*lead, n, blocks, 4, 8)
    # ... tile, warp, half, g, block, byte
    words = _pack_codes(codes).view(*lead, n // TILE_N, 4, 2, 8, blocks, 16)
    exponents = relative.view(*lead, n // TILE_N, 4, 2, 8, blocks)
    chunks, pairs = [], []
    for part, size in _split_blocks(words, -2, 1):
        # ... tile, warp, half, g, chunk, t, byte -> tile, chunk, half, warp, g, t, byte
        chunks.append(_permute_tail(part.unflatten(-2, (-1, size)), (0, 4, 2, 1, 3, 5, 6)).flatten(len(lead) + 1))
    for part, size in _split_blocks(exponents, -1, 2):
        # ... tile, warp, half, g, pair, chunk, t -> tile, pair, warp, g, t, chunk, half
        part = part.unflatten(-1, (-1, max(1, size // _CHUNK), min(size, _CHUNK)))
        pairs.append(_permute_tail(part, (0, 4, 1, 3, 6, 5, 2)).flatten(len(lead) + 1))
    return torch.cat(chunks, -1), torch.cat(pairs, -1)


def unpack_weight(w_packed: Tensor, w_scale: Tensor, n: int, k: int) -> tuple[Tensor, Tensor]:
    """The inverse of `pack_weight`: qdata [..., N, K / 2] and scale [..., N, K / 32]."""
    lead, blocks = w_packed.shape[:-2], k // BLOCK
    chunks, pairs = [], []
    for part, size in _split_blocks(w_packed.unflatten(-1, (blocks, TILE_N * 16)), -2, 1):
        part = part.reshape(*lead, n // TILE_N, -1, 2, 4, 8, size, 16)
        chunks.append(_permute_tail(part, (0, 3, 2, 4, 1, 5, 6)).reshape(*lead, n, -1, 16))
    for part, size in _split_blocks(w_scale.unflatten(-1, (blocks, TILE_N)), -2, 2):
        part = part.reshape(*lead, n // TILE_N, -1, 4, 8, min(size, _CHUNK), max(1, size // _CHUNK), 2)
        pairs.append(_permute_tail(part, (0, 2, 6, 3, 1, 5, 4)).reshape(*lead, n, -1))
    codes = _unpack_codes(torch.cat(chunks, -2)).view(*lead, n, k)
    qdata = codes[..., ::2] | (codes[..., 1::2] << 4)
    exponents = torch.cat(pairs, -1)
    top_bits = exponents[..., :3].int() >> 5
    highest = (top_bits[..., 0] | top_bits[..., 1] << 3 | top_bits[..., 2] << 6).unsqueeze(-1)
    relative = exponents.int() & 0x1F
    scale = torch.where(relative == 0, 0, relative - _TOP + highest)
    return qdata, scale.to(torch.uint8)


def _split_blocks(blocks: Tensor, axis: int, chunks: int) -> Iterator[tuple[Tensor, int]]:
    """Slices along the axis of blocks, each with the blocks of one group in it: first all whole groups of `chunks`
    chunks, then what remains, one chunk at a time.
    """
    count, group = blocks.shape[axis], chunks * _CHUNK
    whole = count // group * group
    yield blocks.narrow(axis, 0, whole), group
    for start in range(whole, count, _CHUNK):
        size = min(_CHUNK, count - start)
        yield blocks.narrow(axis, start, size), size


def _permute_tail(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    """Permute the last axes and leave those before them."""
    lead = tensor.dim() - len(order)
    return tensor.permute(*range(lead), *(lead + axis for axis in order))


def _relative_exponents(qdata: Tensor, scale: Tensor) -> Tensor | None:
    """The bytes of `w_scale` in canonical order [..., N, K / 32]; None if a row does not fit."""
    exponent = scale.int()
    empty = (qdata.unflatten(-1, (-1, 16)) & 0x77).amax(-1) == 0
    highest = torch.where(empty, 0, exponent).amax(-1, keepdim=True)
    relative = torch.where(empty & (exponent == 0), 0, exponent - highest + _TOP)
    within = torch.where(empty, relative <= _TOP, relative >= _TOP - E4M3_SPAN) & (relative >= 0) & (exponent != 255)
    # NOTE: 0 means scale byte 0. An all-zero block with another scale byte must not be stored as 0.
    within &= (relative > 0) | (exponent == 0)
    if not bool(within.all()):
        return None
    top_bits = torch.cat([(highest >> shift) & 0x7 for shift in (0, 3, 6)], -1)
    relative[..., :3] |= top_bits << 5
    return relative.to(torch.uint8)


def _pack_codes(codes: Tensor) -> Tensor:
    """uint8 codes [..., 8] to the four bytes [..., 4] of a word."""
    sign = codes >> 3
    magnitude = codes & 0x7
    packed = []
    for byte in range(4):
        low, high = magnitude[..., 2 * byte], magnitude[..., 2 * byte + 1]
        # Byte b holds the signs of codes b (half 0) and 4 + b (half 1).
        packed.append(low | (sign[..., byte] << 3) | (high << 4) | (sign[..., 4 + byte] << 7))
    return torch.stack(packed, -1)


def _unpack_codes(words: Tensor) -> Tensor:
    """uint8 bytes [..., 16] to codes [..., 4, 8]."""
    byte = words.unflatten(-1, (4, 4))
    magnitude = torch.stack((byte & 0x7, (byte >> 4) & 0x7), -1).flatten(-2)
    sign = torch.cat(((byte >> 3) & 1, byte >> 7), -1)
    return magnitude | (sign << 3)
