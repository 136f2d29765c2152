"""Packing of codes into bytes: one canonical layout, little-endian, low bits first.

4 bits: element 2i in the low nibble of byte i. 6 bits: c0 | c1 << 6 | c2 << 12 | c3 << 18 in three bytes. 8 bits: one
code a byte. AMD Quark, compressed-tensors, gpt-oss and ModelOpt write the same bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack uint8 `codes` [..., n] of 4, 6 or 8 bits; zeros complete the last group.

    Returns:
        uint8 [..., ceil(n / 2)], [..., 3 * ceil(n / 4)] or [..., n].
    """
    if bits == 8:
        return codes
    group = 2 if bits == 4 else 4
    if codes.shape[-1] % group:
        codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % group))
    if bits == 4:
        return codes[..., ::2] | (codes[..., 1::2] << 4)
    c0, c1, c2, c3 = codes.unflatten(-1, (-1, 4)).unbind(-1)
    return torch.stack((c0 | (c1 << 6), (c1 >> 2) | (c2 << 4), (c2 >> 4) | (c3 << 2)), -1).flatten(-2)


def unpack_codes(packed: Tensor, bits: int, length: int) -> Tensor:
    """The first `length` codes of uint8 `packed` [..., bytes], one a byte: the inverse of `pack_codes`."""
    if bits == 8:
        return packed[..., :length]
    if bits == 4:
        codes = torch.stack((packed & 0xF, packed >> 4), -1)
    else:
        b0, b1, b2 = packed.unflatten(-1, (-1, 3)).unbind(-1)
        codes = torch.stack((b0 & 0x3F, (b0 >> 6) | ((b1 & 0xF) << 2), (b1 >> 4) | ((b2 & 0x3) << 4), b2 >> 2), -1)
    return codes.flatten(-2)[..., :length]
