"""The arrangement of MXFP4 weights that the decode kernels read: every thread's bytes together, in the order it needs
them.

Weights are the A operand of wgmma, in registers. Of a tile of 64 rows and 128 columns, thread `32 * warp + 4 * g + t`
of 128 owns whole MX blocks: block t of the rows `16 * warp + 8 * half + g`, 16 bytes each. So a thread loads 16 bytes
at a time and builds one table of values for them.

- Codes: [N / 64, K / 128, 2 (half), 128 (thread), 16]. A 32-bit word holds 8 consecutive codes: magnitude i in bits
  4i to 4i + 2; the sign of code 4h + b in bit 8b + 3 + 4h, where one shift brings it to the top of byte b.
- Scales: [N / 64, K / 256, 128 (thread), 4], the four blocks of a thread in 256 columns: (128-column half, row half).
  A byte holds the block's exponent relative to the row's largest, as 1..27 with 27 the largest, in 5 bits; 0 stands
  for an all-zero block with scale byte 0. The row's largest exponent is in the upper 3 bits of its first three
  blocks.

The bytes are as many as before and give the canonical ones back. A weight fits if in each row the exponents of its
blocks that are not all zero span at most 14 (what E4M3 holds, see `fold`), and those of all-zero blocks are 0 or
within reach.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS, COLUMNS = 64, 256
SPAN = 14
TOP = 27


def pack_tiles(qdata: Tensor, scale: Tensor) -> tuple[Tensor, Tensor] | None:
    """Canonical MXFP4 [..., N, K / 2] and [..., N, K / 32] to tiles; None if the weight does not fit.

    N is a multiple of 64, K of 256. Reads one flag back from the device.
    """
    *lead, n, half_k = qdata.shape
    k = 2 * half_k
    offsets = _relative_exponents(qdata, scale)
    if offsets is None:
        return None
    codes = torch.stack((qdata & 0xF, qdata >> 4), -1).view(*lead, n // ROWS, 4, 2, 8, k // 128, 4, 4, 8)
    # ... tile, warp, half, g, chunk, t, word, code -> tile, chunk, half, warp, g, t, word, code
    codes = _permute_tail(codes, (0, 4, 2, 1, 3, 5, 6, 7))
    words = _pack_words(codes).view(*lead, n // ROWS, k // 128, 2, 128, 16)
    bytes_ = offsets.view(*lead, n // ROWS, 4, 2, 8, k // 256, 2, 4)
    # ... tile, warp, half, g, pair, chunk, t -> tile, pair, warp, g, t, chunk, half
    bytes_ = _permute_tail(bytes_, (0, 4, 1, 3, 6, 5, 2)).reshape(*lead, n // ROWS, k // 256, 128, 4)
    return words, bytes_.contiguous()


def unpack_tiles(words: Tensor, bytes_: Tensor, n: int, k: int) -> tuple[Tensor, Tensor]:
    """The inverse of `pack_tiles`."""
    lead = words.shape[:-5]
    codes = _unpack_words(words).view(*lead, n // ROWS, k // 128, 2, 4, 8, 4, 4, 8)
    codes = _permute_tail(codes, (0, 3, 2, 4, 1, 5, 6, 7)).reshape(*lead, n, k)
    qdata = codes[..., ::2] | (codes[..., 1::2] << 4)
    offsets = bytes_.view(*lead, n // ROWS, k // 256, 4, 8, 4, 2, 2)
    offsets = _permute_tail(offsets, (0, 2, 6, 3, 1, 5, 4)).reshape(*lead, n, k // 32)
    parts = offsets[..., :3].int() >> 5
    highest = (parts[..., 0] | parts[..., 1] << 3 | parts[..., 2] << 6).unsqueeze(-1)
    relative = offsets.int() & 0x1F
    scale = torch.where(relative == 0, 0, relative - TOP + highest)
    return qdata, scale.to(torch.uint8)


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
