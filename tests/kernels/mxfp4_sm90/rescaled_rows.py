"""Activations in range, and some out of range."""

import torch
from torch import Tensor

from mxquant.formats import FORMATS, dequantize_blocks, quantize_blocks
from mxquant.reference.rescale import E5M2_SPAN

MXFP4 = FORMATS["mxfp4"]


def decoded(x: Tensor, mode: str | None = None) -> Tensor:
    """MXFP4 of `x`, in float64."""
    return dequantize_blocks(*quantize_blocks(x.cpu(), MXFP4, mode), MXFP4, x.shape[1], dtype=torch.float64)


def activations(device: torch.device, columns: int = 384) -> Tensor:
    """Rows with zero blocks, of zeros, of the widest span in range, one beyond it, NaN, Inf, subnormals. Rows 4 to 6
    are out of range.
    """
    x = torch.randn(9, columns) * torch.exp2(torch.randint(-5, 6, (9, columns // 32)).float()).repeat_interleave(32, 1)
    x[1, :64] = 0
    x[2] = 0
    x[3] = torch.where(torch.arange(columns) < 32, 2.0**-E5M2_SPAN, 1.0)
    x[4] = torch.where(torch.arange(columns) < 32, 2.0 ** -(E5M2_SPAN + 1), 1.0)
    x[5, 40], x[6, 3] = torch.nan, torch.inf
    x[7] *= 2.0**-124
    return x.bfloat16().to(device)
