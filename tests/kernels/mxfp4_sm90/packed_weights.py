"""Weights in tiles."""

import torch
from torch import Tensor

from kernels.mxfp4_sm90.rescaled_rows import MXFP4
from mxquant.formats import dequantize_blocks, quantize_blocks
from mxquant.kernels.mxfp4_sm90.layout import pack_tiles


def weight(*shape: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Tiles, and values in float64, of blocks whose exponents differ."""
    w = torch.randn(shape) * torch.exp2(torch.randint(-4, 5, (*shape[:-1], shape[-1] // 32))).repeat_interleave(32, -1)
    codes = quantize_blocks(w, MXFP4)
    packed = pack_tiles(*codes)
    assert packed is not None
    return packed, dequantize_blocks(*codes, MXFP4, shape[-1], dtype=torch.float64)
