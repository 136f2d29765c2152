"""The arrangement of MXFP4 weights that the decode kernels read: every thread's bytes together, in the order it needs
them.

Weights are the A operand of wgmma, in registers. Of a tile of 64 rows and 128 columns, thread `32 * warp + 4 * g + t`
of 128 owns whole MX blocks: block t of the rows `16 * warp + 8 * half + g`, 16 bytes each. So a thread loads 16 bytes
at a time and builds one table of values for them.

- Codes: [N / 64, 32K]. Of each chunk of 128 columns [2 (half), 128 (thread), 16]; of K % 128 columns that remain, the
  same with only as many t as there are blocks. A 32-bit word holds 8 consecutive codes: magnitude i in bits 4i to
  4i + 2; the sign of code 4h + b in bit 8b + 3 + 4h, where one shift brings it to the top of byte b.
- Scales: [N / 64, 2K]. Of each pair of chunks [128 (thread), 2 (chunk), 2 (half)], 4 bytes a thread; of the one or two
  chunks of K % 256 columns that remain, one after the other, [threads with a block, 2 (half)].
  A byte holds the block's exponent relative to the row's largest, as 1..27 with 27 the largest, in 5 bits; 0 stands
  for an all-zero block with scale byte 0. The row's largest exponent is in the upper 3 bits of its first three
  blocks.

The bytes are as many as before and give the canonical ones back. A weight fits if in each row the exponents of its
blocks that are not all zero span at most 14 (what E4M3 holds, see `fold`), and those of all-zero blocks are 0 or
within reach.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

ROWS, BLOCK = 64, 32
LEAST_COLUMNS = 256
SPAN = 14
TOP = 27
# Blocks in a chunk of 128 columns.
_CHUNK = 4


def pack_tiles(qdata: Tensor, scale: Tensor) -> tuple[Tensor, Tensor] | None:
    """Canonical MXFP4 [..., N, K / 2] and [..., N, K / 32] to tiles; None if the weight does not fit.

    N is a multiple of 64; K is one of 32, and at least 256. Reads one flag back from the device.
    """
    *lead, n, blocks = scale.shape
    offsets = _relative_exponents(qdata, scale)
    if offsets is None:
        return None
    codes = torch.stack((qdata & 0xF, qdata >> 4), -1).view(*lead, n, blocks, 4, 8)
    # ... tile, warp, half, g, block, byte
    words = _pack_words(codes).view(*lead, n // ROWS, 4, 2, 8, blocks, 16)
    bytes_ = offsets.view(*lead, n // ROWS, 4, 2, 8, blocks)
    chunks, pairs = [], []
    for part, size in _parts(words, -2, 1):
        # ... tile, warp, half, g, chunk, t, byte -> tile, chunk, half, warp, g, t, byte
        chunks.append(_permute_tail(part.unflatten(-2, (-1, size)), (0, 4, 2, 1, 3, 5, 6)).flatten(len(lead) + 1))
    for part, size in _parts(bytes_, -1, 2):
        # ... tile, warp, half, g, pair, chunk, t -> tile, pair, warp, g, t, chunk, half
        part = part.unflatten(-1, (-1, max(1, size // _CHUNK), min(size, _CHUNK)))
        pairs.append(_permute_tail(part, (0, 4, 1, 3, 6, 5, 2)).flatten(len(lead) + 1))
    return torch.cat(chunks, -1), torch.cat(pairs, -1)


def unpack_tiles(words: Tensor, bytes_: Tensor, n: int, k: int) -> tuple[Tensor, Tensor]:
    """The inverse of `pack_tiles`."""
    lead, blocks = words.shape[:-2], k // BLOCK
    chunks, pairs = [], []
    for part, size in _parts(words.unflatten(-1, (blocks, ROWS * 16)), -2, 1):
        part = part.reshape(*lead, n // ROWS, -1, 2, 4, 8, size, 16)
        chunks.append(_permute_tail(part, (0, 3, 2, 4, 1, 5, 6)).reshape(*lead, n, -1, 16))
    for part, size in _parts(bytes_.unflatten(-1, (blocks, ROWS)), -2, 2):
        part = part.reshape(*lead, n // ROWS, -1, 4, 8, min(size, _CHUNK), max(1, size // _CHUNK), 2)
        pairs.append(_permute_tail(part, (0, 2, 6, 3, 1, 5, 4)).reshape(*lead, n, -1))
    codes = _unpack_words(torch.cat(chunks, -2)).view(*lead, n, k)
    qdata = codes[..., ::2] | (codes[..., 1::2] << 4)
    offsets = torch.cat(pairs, -1)
    parts = offsets[..., :3].int() >> 5
    highest = (parts[..., 0] | parts[..., 1] << 3 | parts[..., 2] << 6).unsqueeze(-1)
    relative = offsets.int() & 0x1F
    scale = torch.where(relative == 0, 0, relative - TOP + highest)
    return qdata, scale.to(torch.uint8)


def _parts(blocks: Tensor, axis: int, chunks: int) -> Iterator[tuple[Tensor, int]]:
    """Slices along the axis of blocks: whole groups of `chunks` chunks, then what remains, a chunk at a time; and how
    many blocks a group of each has.
    """
    count, group = blocks.shape[axis], chunks * _CHUNK
    whole = count // group * group
    yield blocks.narrow(axis, 0, whole), group
    for start in range(whole, count, _CHUNK):
        size = min(_CHUNK, count - start)
        yield blocks.narrow(axis, start, size), size


def _permute_tail(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    """Permute the last axes, whatever leads them."""
    lead = tensor.dim() - len(order)
    return tensor.permute(*range(lead), *(lead + axis for axis in order))


def _relative_exponents(qdata: Tensor, scale: Tensor) -> Tensor | None:
    """The bytes of the scale tiles, in canonical order [..., N, K / 32]; None if a row does not fit."""
    exponent = scale.int()
    empty = (qdata.unflatten(-1, (-1, 16)) & 0x77).amax(-1) == 0
    highest = torch.where(empty, 0, exponent).amax(-1, keepdim=True)
    relative = torch.where(empty & (exponent == 0), 0, exponent - highest + TOP)
    within = torch.where(empty, relative <= TOP, relative >= TOP - SPAN) & (relative >= 0) & (exponent != 255)
    # An all-zero block with a scale byte other than 0 must not be mistaken for one with 0.
    within &= (relative > 0) | (exponent == 0)
    if not bool(within.all()):
        return None
    parts = torch.cat([(highest >> shift) & 0x7 for shift in (0, 3, 6)], -1)
    relative[..., :3] |= parts << 5
    return relative.to(torch.uint8)


def _pack_words(codes: Tensor) -> Tensor:
    """uint8 codes [..., 8] to the four bytes [..., 4] of a word."""
    sign = codes >> 3
    magnitude = codes & 0x7
    packed = []
    for byte in range(4):
        low, high = magnitude[..., 2 * byte], magnitude[..., 2 * byte + 1]
        # Byte b holds the signs of codes b (half 0) and 4 + b (half 1).
        packed.append(low | (sign[..., byte] << 3) | (high << 4) | (sign[..., 4 + byte] << 7))
    return torch.stack(packed, -1)


def _unpack_words(words: Tensor) -> Tensor:
    """uint8 bytes [..., 16] to codes [..., 4, 8]."""
    byte = words.unflatten(-1, (4, 4))
    magnitude = torch.stack((byte & 0x7, (byte >> 4) & 0x7), -1).flatten(-2)
    sign = torch.cat(((byte >> 3) & 1, byte >> 7), -1)
    return magnitude | (sign << 3)
