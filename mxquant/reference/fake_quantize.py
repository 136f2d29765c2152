"""Quantize and dequantize activations without making codes, for emulated matmuls.

Equals quantizing and dequantizing by `mxquant.formats`, but for the sign of zero, which no matmul shows. It makes about
a third of the passes over the data.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxquant.formats.block import to_blocks
from mxquant.formats.convert import chunk_elements, to_fp32
from mxquant.formats.element import MAGNITUDE_MASK, round_to_element
from mxquant.formats.row import row_scale
from mxquant.formats.scale import (
    e4m3_from_amax,
    e4m3_to_float,
    e8m0_from_amax,
    e8m0_reciprocal,
    e8m0_to_float,
    nvfp4_row_scale,
)
from mxquant.formats.search import search_e4m3, search_e8m0
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
        chunk = to_fp32(x[rows])
        if outer is None:
            assert scale_mode is not None
            values[rows] = _mx(chunk, fmt, scale_mode)
            continue
        if static_scale is not None:
            scale = static_scale.expand(chunk.shape[0], 1)
        else:
            scale = nvfp4_row_scale(chunk, scale_mode) if fmt.per_tensor else row_scale(chunk, fmt)
        outer[rows] = scale
        if fmt.per_tensor:
            values[rows] = _nvfp4(chunk, fmt, scale, scale_mode)
        else:
            values[rows] = round_to_element(chunk / scale, fmt.element)
    return values, outer


def _mx(rows: Tensor, fmt: Format, scale_mode: str) -> Tensor:
    blocks = to_blocks(rows, fmt)
    if scale_mode == "mse":
        byte = search_e8m0(blocks, fmt.element)
    else:
        amax_bits = (blocks.contiguous().view(torch.int32) & MAGNITUDE_MASK).amax(-1)
        byte = e8m0_from_amax(amax_bits, fmt.element, scale_mode)
    rounded = round_to_element(blocks * e8m0_reciprocal(byte).unsqueeze(-1), fmt.element)
    return rounded.mul_(e8m0_to_float(byte).unsqueeze(-1)).flatten(-2)[:, : rows.shape[1]]


def _nvfp4(rows: Tensor, fmt: Format, per_tensor_scale: Tensor, scale_mode: str | None) -> Tensor:
    blocks = to_blocks(rows, fmt)
    if scale_mode == "four_over_six":
        byte = search_e4m3(blocks, fmt.element, per_tensor_scale)
    else:
        byte = e4m3_from_amax(blocks.abs().amax(-1), per_tensor_scale)
    scale = e4m3_to_float(byte)
    rounded = round_to_element(blocks / (scale * per_tensor_scale).unsqueeze(-1), fmt.element)
    return rounded.mul_(scale.unsqueeze(-1)).flatten(-2)[:, : rows.shape[1]]
