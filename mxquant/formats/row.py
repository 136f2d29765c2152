"""FP8 with one fp32 scale a row: the activation formats `fp8_e4m3` and `fp8_e5m2`.

The scale is amax / max_value of the element format, computed in fp32 for every input dtype: the per-token dynamic
quantization of vLLM and compressed-tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxquant.formats.convert import divide, to_fp32
from mxquant.formats.element import encode
from mxquant.formats.spec import Format

_FP32_MIN_NORMAL = 2.0**-126


def row_scale(x: Tensor, fmt: Format) -> Tensor:
    """fp32 scales [..., 1] of the rows of `x` [..., K]: 1 for an all-zero row, NaN for one that holds NaN or Inf."""
    amax = to_fp32(x).abs().amax(-1, keepdim=True)
    scale = divide(amax, fmt.element.max_value).clamp_(min=_FP32_MIN_NORMAL)
    return scale.masked_fill_(amax == 0, 1.0).masked_fill_(~amax.isfinite(), torch.nan)


def quantize_rows(x: Tensor, fmt: Format, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize `x` [..., K] with one scale a row, or with the given static `scale`.

    Args:
        scale: fp32 multiplier, broadcastable to [..., 1]; values beyond its range saturate. None: `row_scale`.

    Returns:
        codes, uint8 [..., K]; scales, fp32 [..., 1]. A row whose scale is NaN has codes 0.
    """
    if scale is None:
        scale = row_scale(x, fmt)
    scale = scale.to(torch.float32).expand(*x.shape[:-1], 1)
    codes = encode(to_fp32(x) / scale, fmt.element)
    return codes.masked_fill_(scale.isnan(), 0), scale
