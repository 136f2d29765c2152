"""Rows of activations rescaled, each by one power of two, to values that FP8 or FP16 holds exactly.

MXFP4 activations become E5M2: E2M1 x 2^s is exact in E5M2 for 29 consecutive exponents s. So a row fits if the
exponents of its blocks that are not all zero span at most 28. bf16 activations become FP16: the row's largest magnitude
is brought below 2^15, and values down to 2^-32 of it keep all their bits.

A row out of range has a row scale of NaN, never clamped values: the matmul recomputes it.

Columns may be permuted within each 128, as the registers of wgmma hold the packed weight. In FP8, position
32j + 16h + 4t + b holds column 32t + 8j + 4h + b; in FP16, position 32q + 16o + 8h + 2t + e holds column
32t + 8q + 4o + 2e + h. A product does not change when both sides are permuted alike.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mxquant.formats.block import dequantize_blocks, quantize_blocks
from mxquant.formats.spec import FORMATS
from mxquant.reference.gated_activation import GatedActivation
from mxquant.reference.hadamard import hadamard

E5M2_TOP, E5M2_SPAN = 13, 28
"""What the row's largest block exponent becomes in E5M2 (6 x 2^13 <= 57344), and how far exponents may lie apart."""
_MXFP4 = FORMATS["mxfp4"]


class Prologue(NamedTuple):
    """What happens to activations before a product; `mxquant.kernels.mxfp4_sm90.activation` does it."""

    scale_mode: str | None
    """They are quantized to MXFP4 in this scale mode, and rescaled to FP8. None: not quantized, rescaled to FP16."""
    rotated: bool = False
    """bf16 rows that are quantized are rotated first, in blocks of 32 columns: in fp32, rounded to bf16."""
    gate: GatedActivation | None = None
    """Rows, bf16 [M, 2K], go through this before all else. The result is rounded to bf16."""


def rescale_to_fp8(x: Tensor, scale_mode: str, *, permute: bool, rotated: bool = False) -> tuple[Tensor, Tensor]:
    """Quantize rows to MXFP4 and rescale them to E5M2.

    Args:
        x: bf16 or fp16 [M, K], K a multiple of 32.
        scale_mode: of MXFP4.
        permute: permute the columns, padded with zeros to a multiple of 128.
        rotated: rotate the rows first, in blocks of 32 columns.

    Returns:
        values, float8_e5m2 [M, K or wider], arbitrary in rows out of range; row scales, fp32 [M, 1], NaN for rows out
        of range (also those with Inf or NaN).
    """
    m, k = x.shape
    x = hadamard(x, 32).to(x.dtype) if rotated else x
    qdata, scale = quantize_blocks(x, _MXFP4, scale_mode)
    exponent = scale.int()
    empty = ((qdata.unflatten(1, (k // 32, 16)) & 0x77).amax(-1) == 0) & (exponent != 255)
    highest = torch.where(empty, 0, exponent).amax(1, keepdim=True)
    lowest = torch.where(empty, 255, exponent).amin(1, keepdim=True)
    out_of_range = (highest - lowest > E5M2_SPAN) | (highest == 255)
    # The scale byte of 2^(exponent - highest + E5M2_TOP); any for an empty block, whose codes are zero.
    relative = torch.where(empty, 127, exponent - highest + E5M2_TOP + 127).clamp(0, 254).to(torch.uint8)
    values = dequantize_blocks(qdata, relative, _MXFP4, k).to(torch.float8_e5m2)
    if permute:
        bits = F.pad(values.view(torch.uint8), (0, -k % 128)).view(m, -1, 4, 4, 2, 4)
        values = bits.permute(0, 1, 3, 4, 2, 5).reshape(m, -1).view(torch.float8_e5m2)
    row_scale = torch.exp2((highest - E5M2_TOP - 127).double()).float()
    return values, row_scale.masked_fill(out_of_range, torch.nan)


def rescale_to_fp16(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rescale bf16 rows [M, K] to FP16, columns permuted.

    Returns:
        values, float16 [M, K padded with zeros to a multiple of 128], arbitrary in rows out of range; row scales, fp32
        [M, 1], NaN for rows out of range.
    """
    m, k = x.shape
    value = x.double()
    largest = (x.view(torch.int16).int() & 0x7FFF).amax(1, keepdim=True) >> 7
    exponent = (largest - 14).clamp(1, 253) - 127
    values = (value * torch.exp2(-exponent.double())).to(torch.float16)
    out_of_range = (values.double() * torch.exp2(exponent.double()) != value).any(1, keepdim=True)
    values = F.pad(values, (0, -k % 128)).view(m, -1, 4, 4, 2, 2, 2)
    values = values.permute(0, 1, 3, 4, 6, 2, 5).reshape(m, -1)
    return values, torch.exp2(exponent.float()).masked_fill(out_of_range, torch.nan)
