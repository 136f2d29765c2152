"""Quantize and dequantize activations without making codes, for emulated matmuls.

Equals quantizing and dequantizing by `mxquant.formats`, but for the sign of zero, which no matmul shows. It makes about
a third of the passes over the data.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxquant.formats.block import scale_blocks, to_blocks
from mxquant.formats.convert import chunk_elements, to_fp32
from mxquant.formats.element import round_to_element
from mxquant.formats.scale import nvfp4_row_scale, row_scale, scale_to_float
from mxquant.formats.spec import Format


def fake_quantize(
    x: Tensor, fmt: Format, scale_mode: str | None, static_scale: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """The values of `x` rounded to `fmt`, as values that are exact in `dtype` and a factor for each row.

    Args:
        x: [M, K].
        scale_mode: for block formats.
        static_scale: a given fp32 scale: NVFP4's per-tensor scale, or FP8's scale of every row. None: dynamic.
        dtype: of the values: bf16, fp32 or fp64.

    Returns:
        values, [M, K] in `dtype`; the fp32 factor [M, 1] to multiply them, or their product, with (NVFP4 and FP8
        rows), or None (MX).
    """
    outer = None if fmt.scale_format == "e8m0" else torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)
    values = torch.empty(x.shape, dtype=dtype, device=x.device)
    step = max(1, chunk_elements(x) // max(1, x.shape[1]))
    for start in range(0, x.shape[0], step):
        rows = slice(start, start + step)
        chunk, scale = to_fp32(x[rows]), None
        if outer is not None:
            if static_scale is not None:
                scale = static_scale.expand(chunk.shape[0], 1)
            else:
                scale = nvfp4_row_scale(chunk, scale_mode) if fmt.per_tensor else row_scale(chunk, fmt)
            outer[rows] = scale
        if scale is not None and fmt.block_size is None:
            values[rows] = round_to_element(chunk / scale, fmt.element)
        else:
            byte, scaled = scale_blocks(to_blocks(chunk, fmt), fmt, scale_mode, scale)
            block_scale = scale_to_float(byte, fmt.scale_format).unsqueeze(-1)
            rounded = round_to_element(scaled, fmt.element).mul_(block_scale)
            values[rows] = rounded.flatten(-2)[:, : chunk.shape[1]]
    return values, outer
