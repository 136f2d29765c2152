"""Quantize and dequantize activations without making codes, for matmuls in bf16.

Twin: `mxquant.reference.fake_quantize`, equal bit by bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxquant.formats.spec import ELEMENT_FORMATS, Format
from mxquant.kernels import reject_unlisted
from mxquant.kernels.primitives.numerics import (
    DTYPES,
    e4m3_from_amax,
    e4m3_to_float,
    e8m0_from_amax,
    e8m0_reciprocal,
    e8m0_to_float,
    element_constants,
    fp32_bits,
    from_fp32,
    round_to_element,
)
from mxquant.kernels.runtime.launch import cached_launch, cdiv, next_power_of_2

# The longest row that one program holds in registers, to find its scale and apply it in one launch.
_LONGEST_ROW = 16384
_TILE = 1024
_NVFP4_LARGEST = ELEMENT_FORMATS["e2m1"].max_value * ELEMENT_FORMATS["e4m3"].max_value

FORMATS = ("mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "mxfp8_e5m2", "nvfp4", "fp8_e4m3", "fp8_e5m2")
SCALE_MODES = ("floor", "even", "ceil", "rceil", "even_fp4")


def reject(fmt: Format, scale_mode: str | None, dtype: torch.dtype) -> str | None:
    """None if the kernel quantizes `dtype` to the format in that scale mode and back, else the reason why not."""
    return (
        reject_unlisted("activations in format", fmt.name, FORMATS)
        or (scale_mode and reject_unlisted("activations in scale mode", scale_mode, SCALE_MODES))
        or reject_unlisted("activations of dtype", dtype, DTYPES)
    )


def fake_quantize(
    x: Tensor, fmt: Format, scale_mode: str | None, static_scale: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Arguments and results are those of the twin; `x` and `dtype` are bf16, fp16 or fp32."""
    rows, length = x.shape
    values = torch.empty(rows, length, dtype=dtype, device=x.device)
    if fmt.scale_format == "e8m0":
        _launch_tiles(x, values, None, fmt, scale_mode, dynamic=False)
        return values, None
    if static_scale is not None:
        outer = static_scale.to(torch.float32).expand(rows, 1)
        _launch_tiles(x, values, outer, fmt, None, dynamic=False)
        return values, outer
    outer = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    in_one_launch = length <= _LONGEST_ROW
    if rows and not in_one_launch:
        with torch.cuda.device_of(x):
            mxquant_row_scale[(rows,)](
                x,
                outer,
                length,
                *x.stride(),
                DIVISOR=_divisor_of(fmt),
                NVFP4=fmt.per_tensor,
                COLUMNS=4096,
                num_warps=8,
            )
    _launch_tiles(x, values, outer, fmt, None, dynamic=in_one_launch)
    return values, outer


def _divisor_of(fmt: Format) -> float:
    """The row's amax over its scale."""
    return _NVFP4_LARGEST if fmt.per_tensor else fmt.element.max_value


def _launch_tiles(
    x: Tensor, values: Tensor, outer: Tensor | None, fmt: Format, scale_mode: str | None, *, dynamic: bool
) -> None:
    """Write `values`; if `dynamic`, tiles are as wide as a row and write `outer`, too."""
    rows, length = x.shape
    if not values.numel():
        return
    columns = max(next_power_of_2(length), fmt.block_size or 1)
    if not dynamic:
        columns = min(columns, _TILE)
    tile_rows = max(1, min(next_power_of_2(rows), _TILE // columns))
    tiles_per_row = cdiv(length, columns)
    with torch.cuda.device_of(x):
        mxquant_fake_quantize[(cdiv(rows, tile_rows) * tiles_per_row,)](
            x,
            values,
            outer,
            rows,
            length,
            tiles_per_row,
            *x.stride(),
            0 if outer is None else outer.stride(0),
            **element_constants(fmt.element),
            SCALE=fmt.scale_format,
            MODE=scale_mode,
            DYNAMIC=dynamic,
            DIVISOR=_divisor_of(fmt),
            BLOCK=fmt.block_size or columns,
            DTYPE=DTYPES[values.dtype],
            ROWS=tile_rows,
            COLUMNS=columns,
            num_warps=min(16, max(4, columns // 512)),
        )


@cached_launch
@triton.jit(do_not_specialize=["rows", "tiles_per_row"])
def mxquant_fake_quantize(
    x_ptr: tl.tensor,
    values_ptr: tl.tensor,
    outer_ptr: tl.tensor,
    rows: tl.tensor,
    length: tl.tensor,
    tiles_per_row: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    outer_stride: tl.tensor,
    EXPONENT_BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    MAX_CODE: tl.constexpr,
    SCALE: tl.constexpr,
    MODE: tl.constexpr,
    DYNAMIC: tl.constexpr,
    DIVISOR: tl.constexpr,
    BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """One tile of whole blocks. SCALE: "e8m0" (MX), "e4m3" (NVFP4) or "fp32" (one scale a row)."""
    BLOCKS: tl.constexpr = COLUMNS // BLOCK
    tile = tl.program_id(0)
    row = (tile // tiles_per_row).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (tile % tiles_per_row) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < length)
    loaded = tl.load(x_ptr + row * row_stride + column.to(tl.int64) * column_stride, mask=inside, other=0.0)

    bits = fp32_bits(loaded)
    x = tl.reshape(bits, [ROWS, BLOCKS, BLOCK]).to(tl.float32, bitcast=True)
    amax = tl.max(tl.reshape(bits & 0x7FFFFFFF, [ROWS, BLOCKS, BLOCK]), 2)
    if SCALE == "e8m0":
        byte = e8m0_from_amax(amax, EXPONENT_BITS, MANTISSA_BITS, MAX_CODE, MODE)
        scaled = x * e8m0_reciprocal(byte)[:, :, None]
        block_scale = e8m0_to_float(byte)
    else:
        if DYNAMIC:
            row_amax = tl.max(_magnitude(bits, SCALE == "e4m3"), 1)
            outer = _row_scale(row_amax, DIVISOR)[:, None]
            tl.store(outer_ptr + row * outer_stride, outer, mask=row < rows)
        else:
            outer = tl.load(outer_ptr + row * outer_stride, mask=row < rows, other=1.0)
        if SCALE == "e4m3":
            block_scale = e4m3_to_float(e4m3_from_amax(amax, outer))
            scaled = tl.div_rn(x, (block_scale * outer)[:, :, None])
        else:
            scaled = tl.div_rn(x, outer[:, :, None])

    rounded = round_to_element(scaled, EXPONENT_BITS, MANTISSA_BITS, MAX_CODE)
    if SCALE != "fp32":
        rounded *= block_scale[:, :, None]
    values = from_fp32(tl.reshape(rounded, [ROWS, COLUMNS]), DTYPE)
    tl.store(values_ptr + row * length + column, values, mask=inside)


@triton.jit
def _magnitude(bits: tl.tensor, FINITE_ONLY: tl.constexpr) -> tl.tensor:
    """The bits of the magnitude; 0 for NaN and Inf where only finite values count."""
    magnitude = bits & 0x7FFFFFFF
    if FINITE_ONLY:
        magnitude = tl.where(magnitude < 0x7F800000, magnitude, 0)
    return magnitude


@triton.jit
def _row_scale(amax_bits: tl.tensor, DIVISOR: tl.constexpr) -> tl.tensor:
    """A row's fp32 scale, at least the smallest normal number: 1 for a zero row, NaN for one that holds NaN or Inf."""
    amax = amax_bits.to(tl.float32, bitcast=True)
    scale = tl.maximum(tl.div_rn(amax, DIVISOR), 2.0**-126)
    scale = tl.where(amax == 0, 1.0, scale)
    return tl.where(amax_bits < 0x7F800000, scale, float("nan"))


@cached_launch
@triton.jit
def mxquant_row_scale(
    x_ptr: tl.tensor,
    outer_ptr: tl.tensor,
    length: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    DIVISOR: tl.constexpr,
    NVFP4: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """The scale of one row, of any length."""
    row = tl.program_id(0).to(tl.int64)
    amax = tl.full([COLUMNS], 0, tl.int32)
    for first in range(0, length, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        x = tl.load(x_ptr + row * row_stride + column.to(tl.int64) * column_stride, mask=column < length, other=0.0)
        amax = tl.maximum(amax, _magnitude(fp32_bits(x), NVFP4))
    tl.store(outer_ptr + row, _row_scale(tl.max(amax, 0), DIVISOR))
