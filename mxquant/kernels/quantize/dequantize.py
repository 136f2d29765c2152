"""Decode packed codes to a workspace, for an ordinary matmul with a quantized weight.

Twin: `dequantize_blocks` of `mxquant.formats.block` without a per-tensor scale, equal bit by bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxquant.formats.spec import Format
from mxquant.kernels import reject_unlisted
from mxquant.kernels.primitives.numerics import (
    DTYPES,
    decode,
    e4m3_to_float,
    e8m0_to_float,
    element_constants,
    from_fp32,
)
from mxquant.kernels.runtime.launch import cached_launch, cdiv, next_power_of_2

_WARPS = 4
# Codes that a thread decodes from one load: 16 bytes to store in bf16.
_UNIT = tl.constexpr(8)
# Steps along a row that one program takes, at most.
_STEPS = 4

FORMATS = ("mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "mxfp8_e5m2", "nvfp4")


def reject(fmt: Format) -> str | None:
    """None if the kernel decodes the format, else the reason why not."""
    return reject_unlisted("weights in format", fmt.name, FORMATS)


def dequantize(
    qdata: Tensor, scale: Tensor, fmt: Format, length: int, *, block_offset: int = 0, dtype: torch.dtype
) -> Tensor:
    """Arguments and results are those of the twin.

    Args:
        qdata, scale: uint8 [N, bytes] and [N, blocks], any strides: rows or columns of a larger weight.
        dtype: bf16, fp16 or fp32.
    """
    assert fmt.block_size is not None
    rows = qdata.shape[0]
    values = torch.empty(rows, length, dtype=dtype, device=qdata.device)
    if not values.numel():
        return values
    source = _view_words(qdata, fmt.element.bits)
    threads = 32 * _WARPS
    units = cdiv(block_offset + length, _UNIT.value)
    columns = min(threads, next_power_of_2(units))
    steps = min(_STEPS, cdiv(units, columns))
    tiles_per_row = cdiv(units, columns * steps)
    with torch.cuda.device_of(qdata):
        mxquant_dequantize[(cdiv(rows, threads // columns) * tiles_per_row,)](
            source,
            scale,
            values,
            rows,
            length,
            tiles_per_row,
            *source.stride(),
            *scale.stride(),
            block_offset,
            source.shape[1],
            **element_constants(fmt.element),
            BLOCK=fmt.block_size,
            SCALE=fmt.scale_format,
            DTYPE=DTYPES[dtype],
            ROWS=threads // columns,
            COLUMNS=columns,
            STEPS=steps,
            num_warps=_WARPS,
        )
    return values


def _view_words(qdata: Tensor, bits: int) -> Tensor:
    """The packed bytes as words to load: a unit of 4-bit codes is one of 32 bits, of 6-bit codes three of 16 bits. Rows
    that do not consist of such words stay bytes.
    """
    width = {4: 4, 6: 2, 8: 1}[bits]
    if qdata.stride(1) != 1 or qdata.shape[1] % width or qdata.stride(0) % width or qdata.storage_offset() % width:
        return qdata
    return qdata.view({4: torch.int32, 2: torch.int16, 1: torch.uint8}[width])


@cached_launch
@triton.jit(do_not_specialize=["rows", "tiles_per_row"])
def mxquant_dequantize(
    source_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    values_ptr: tl.tensor,
    rows: tl.tensor,
    length: tl.tensor,
    tiles_per_row: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    scale_row_stride: tl.tensor,
    scale_column_stride: tl.tensor,
    block_offset: tl.tensor,
    source_columns: tl.tensor,
    EXPONENT_BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    MAX_CODE: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALE: tl.constexpr,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
) -> None:
    """STEPS tiles of ROWS x COLUMNS units. One thread holds the values of a unit, for one vector store."""
    tile = tl.program_id(0)
    row = (tile // tiles_per_row).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    first = (tile % tiles_per_row) * (COLUMNS * STEPS)
    keep_row = row < rows
    index = tl.arange(0, _UNIT)[None, None, :]
    for step in tl.static_range(STEPS):
        unit = first + step * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        inside = keep_row & (unit * _UNIT < block_offset + length)
        codes = _load_codes(
            source_ptr + row * row_stride,
            unit,
            index,
            column_stride,
            inside,
            source_columns,
            1 + EXPONENT_BITS + MANTISSA_BITS,
        )
        block = scale_ptr + row * scale_row_stride + (unit * _UNIT // BLOCK) * scale_column_stride
        byte = tl.load(block, mask=inside, other=0).to(tl.int32)
        block_scale = e4m3_to_float(byte) if SCALE == "e4m3" else e8m0_to_float(byte)
        value = decode(codes, EXPONENT_BITS, MANTISSA_BITS, MAX_CODE) * block_scale[:, :, None]
        column = unit[:, :, None] * _UNIT + index - block_offset
        keep = keep_row[:, :, None] & (column >= 0) & (column < length)
        tl.store(values_ptr + row[:, :, None] * length + column, from_fp32(value, DTYPE), mask=keep)


@triton.jit
def _load_codes(
    row_ptr: tl.tensor,
    unit: tl.tensor,
    index: tl.tensor,
    column_stride: tl.tensor,
    inside: tl.tensor,
    source_columns: tl.tensor,
    BITS: tl.constexpr,
) -> tl.tensor:
    """The codes of units, int32 [rows, units, 8], with other bits above them; `row_ptr` points to words or bytes."""
    if BITS == 8:
        byte = unit[:, :, None] * _UNIT + index
        keep = inside[:, :, None] & (byte < source_columns)
        codes = tl.load(row_ptr[:, :, None] + byte * column_stride, mask=keep, other=0).to(tl.int32)
    elif BITS == 4:
        codes = _load_bits(row_ptr, unit * 4, column_stride, inside, source_columns, 4)[:, :, None] >> (4 * index)
    else:
        low = _load_bits(row_ptr, unit * 6, column_stride, inside, source_columns, 4)
        high = _load_bits(row_ptr, unit * 6 + 4, column_stride, inside, source_columns, 2)
        # Eight codes are two groups of 24 bits.
        second = ((low >> 24) & 0xFF) | (high << 8)
        group = tl.where(index < 4, low[:, :, None], second[:, :, None])
        codes = group >> (6 * (index & 3))
    return codes


@triton.jit
def _load_bits(
    row_ptr: tl.tensor,
    first: tl.tensor,
    column_stride: tl.tensor,
    inside: tl.tensor,
    source_columns: tl.tensor,
    BYTES: tl.constexpr,
) -> tl.tensor:
    """BYTES bytes from byte `first` on, little-endian in an int32; zeros for what lies beyond the row."""
    WIDTH: tl.constexpr = row_ptr.dtype.element_ty.primitive_bitwidth // 8
    index = first // WIDTH
    bits = tl.load(row_ptr + index * column_stride, mask=inside & (index < source_columns), other=0).to(tl.int32)
    if BYTES > WIDTH:
        bits = bits & ((1 << (8 * WIDTH)) - 1)
        for i in tl.static_range(1, BYTES // WIDTH):
            keep = inside & (index + i < source_columns)
            more = tl.load(row_ptr + (index + i) * column_stride, mask=keep, other=0).to(tl.int32)
            bits |= (more & ((1 << (8 * WIDTH)) - 1)) << (8 * WIDTH * i)
    return bits
