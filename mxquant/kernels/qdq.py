"""Quantize and dequantize activations without making codes: what an emulated matmul multiplies.

Twin: `mxquant.formats` quantize then dequantize, equal but for the sign of zero, which no matmul shows. It takes
about a third of the twin's passes over the data.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from mxquant.formats.block import to_blocks
from mxquant.formats.convert import chunk_elements, to_fp32
from mxquant.formats.element import MAGNITUDE_MASK
from mxquant.formats.row import row_scale
from mxquant.formats.scale import (
    e4m3_from_amax,
    e4m3_to_float,
    e8m0_from_amax,
    e8m0_reciprocal,
    e8m0_to_float,
    nvfp4_row_scale,
)
from mxquant.formats.spec import ElementFormat, Format

_EXPONENT_MASK = 0x7F800000


def quantize_dequantize(
    x: Tensor, fmt: Format, scale_mode: str | None, static_scale: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """The values that `x` has in `fmt`, split into what is exact in `dtype` and what is left to multiply the result
    with.

    Args:
        x: [M, K].
        scale_mode: for MX formats.
        static_scale: a given fp32 scale: NVFP4's per-tensor scale, or FP8's scale of every row.
        dtype: of the values, bf16, fp32 or fp64.

    Returns:
        values, [M, K] in `dtype`; and the fp32 factor [M, 1] that completes them (NVFP4 and FP8 rows), or
        None (MX).
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
        dynamic = nvfp4_row_scale if fmt.per_tensor else functools.partial(row_scale, fmt=fmt)
        outer[rows] = scale = dynamic(chunk) if static_scale is None else static_scale.expand(chunk.shape[0], 1)
        values[rows] = _nvfp4(chunk, fmt, scale) if fmt.per_tensor else round_to_element(chunk / scale, fmt.element)
    return values, outer


def _mx(rows: Tensor, fmt: Format, scale_mode: str) -> Tensor:
    blocks = to_blocks(rows, fmt)
    amax_bits = (blocks.contiguous().view(torch.int32) & MAGNITUDE_MASK).amax(-1)
    byte = e8m0_from_amax(amax_bits, fmt.element, scale_mode)
    rounded = round_to_element(blocks * e8m0_reciprocal(byte).unsqueeze(-1), fmt.element)
    return rounded.mul_(e8m0_to_float(byte).unsqueeze(-1)).flatten(-2)[:, : rows.shape[1]]


def _nvfp4(rows: Tensor, fmt: Format, per_tensor_scale: Tensor) -> Tensor:
    blocks = to_blocks(rows, fmt)
    scale = e4m3_to_float(e4m3_from_amax(blocks.abs().amax(-1), per_tensor_scale))
    rounded = round_to_element(blocks / (scale * per_tensor_scale).unsqueeze(-1), fmt.element)
    return rounded.mul_(scale.unsqueeze(-1)).flatten(-2)[:, : rows.shape[1]]


def round_to_element(values: Tensor, element: ElementFormat) -> Tensor:
    """fp32 `values` rounded to nearest even onto the element format's grid, saturating; NaN stays NaN.

    Adds and subtracts 1.5 * 2^k, with k such that the sum's last bit is the grid's step at the value's own exponent.
    (The 1.5 keeps sums with negative values in the same binade.)
    """
    step_shift = 23 - element.mantissa_bits
    smallest = (element.min_exponent + 127) << 23
    anchor_bits = (values.view(torch.int32) & _EXPONENT_MASK).clamp_(
        min=smallest, max=(element.max_exponent + 127) << 23
    )
    anchor = anchor_bits.add_((step_shift << 23) | (1 << 22)).view(torch.float32)
    return (values + anchor).sub_(anchor).clamp_(-element.max_value, element.max_value)
