"""Weights in the packed layout."""

import torch
from torch import Tensor

from kernels.mxfp4_sm90.rescaled_rows import MXFP4
from mxquant.formats import dequantize_blocks, quantize_blocks
from mxquant.kernels.mxfp4_sm90.layout import pack_weight


def random_weight(*shape: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """A packed weight whose blocks have different exponents, and its values in float64."""
    w = torch.randn(shape) * torch.exp2(torch.randint(-4, 5, (*shape[:-1], shape[-1] // 32))).repeat_interleave(32, -1)
    return packed_weight(w)


def packed_weight(w: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """w_packed and w_scale of MXFP4 of `w`, which fits; and its values in float64."""
    codes = quantize_blocks(w, MXFP4)
    packed = pack_weight(*codes)
    assert packed is not None
    return packed, dequantize_blocks(*codes, MXFP4, w.shape[-1], dtype=torch.float64)
