"""Quantize to packed codes and block scales in one pass over the data: the quantizer's entry and its general kernel.

Contiguous whole blocks go to `contiguous`. The kernel here takes the rest: any strides, partial blocks, one per-tensor
scale a row.

Twin: `quantize_blocks` of `mxquant.formats.block`, after `mxquant.reference.hadamard`, equal byte by byte.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxquant.formats.scale import nvfp4_per_tensor_scale
from mxquant.formats.spec import Format, resolve_scale_mode
from mxquant.kernels import reject_unlisted
from mxquant.kernels.primitives.numerics import (
    DTYPES,
    divide_blocks,
    e4m3_from_amax,
    e4m3_to_float,
    e8m0_from_amax,
    e8m0_reciprocal,
    element_constants,
    encode,
    fp32_bits,
    saturates,
)
from mxquant.kernels.quantize.contiguous import has_contiguous_blocks, quantize_contiguous
from mxquant.kernels.quantize.hadamard import hadamard
from mxquant.kernels.runtime.launch import cached_launch, cdiv, next_power_of_2

FORMATS = ("mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "mxfp8_e5m2", "nvfp4")
SCALE_MODES = ("floor", "even", "ceil", "rceil", "even_fp4")


# Elements of a tile of four warps: large for few instructions an element, small where large ones would leave
# multiprocessors idle.
_LARGE, _SMALL = 4096, 1024
_TILES_WANTED = 1024
# Rows and columns of a tile of eight warps where rows are contiguous across: square enough to load and store whole
# sectors.
_ROWS_ACROSS, _COLUMNS_ACROSS = 64, 128


def reject(fmt: Format, scale_mode: str, dtype: torch.dtype) -> str | None:
    """None if the kernels quantize `dtype` to the format in that scale mode, else the reason why not."""
    return (
        reject_unlisted("format", fmt.name, FORMATS)
        or reject_unlisted("scale mode", scale_mode, SCALE_MODES)
        or reject_unlisted("dtype", dtype, DTYPES)
    )


def quantize_blocks(
    x: Tensor,
    fmt: Format,
    scale_mode: str | None = None,
    *,
    per_tensor_scale: Tensor | None = None,
    canonical_zero: bool = False,
    rotation: int | None = None,
) -> tuple[Tensor, Tensor]:
    """As `mxquant.ops.quantize_blocks`.

    `x` may have any strides: to quantize along another axis, move it last and make no copy. Blocks are rotated in the
    same launch, unless a per-tensor scale is not given or there is one a row: these need the rotated values beforehand.
    """
    assert fmt.block_size is not None
    assert rotation in (None, fmt.block_size)
    mode = resolve_scale_mode(fmt, scale_mode)
    if rotation is not None:
        one_scale = not fmt.per_tensor or (per_tensor_scale is not None and per_tensor_scale.numel() == 1)
        if not one_scale:
            x, rotation = hadamard(x, rotation, torch.float32), None
        elif not has_contiguous_blocks(x, fmt):
            x = x.clone(memory_format=torch.contiguous_format)
    lead, length = x.shape[:-1], x.shape[-1]
    if fmt.per_tensor:
        if per_tensor_scale is None:
            per_tensor_scale = nvfp4_per_tensor_scale(x)
        per_tensor_scale = per_tensor_scale.to(torch.float32)
        if per_tensor_scale.numel() > 1:
            per_tensor_scale = per_tensor_scale.expand(*lead, 1).reshape(-1)
    qdata = torch.empty(*lead, fmt.packed_size(length), dtype=torch.uint8, device=x.device)
    scale = torch.empty(*lead, fmt.num_blocks(length), dtype=torch.uint8, device=x.device)
    if x.numel() == 0:
        return qdata, scale
    if has_contiguous_blocks(x, fmt) and (per_tensor_scale is None or per_tensor_scale.numel() == 1):
        quantize_contiguous(x, qdata, scale, fmt, mode, per_tensor_scale, canonical_zero, rotation is not None)
    else:
        rows = x.reshape(math.prod(lead), length)
        _launch_strided(rows, qdata, scale, fmt, mode, per_tensor_scale, canonical_zero)
    return qdata, scale


def _launch_strided(
    x: Tensor,
    qdata: Tensor,
    scale: Tensor,
    fmt: Format,
    mode: str | None,
    per_tensor_scale: Tensor | None,
    canonical_zero: bool,
) -> None:
    """Quantize `x` [rows, K] into the contiguous `qdata` and `scale`."""
    assert fmt.block_size is not None
    rows, length = x.shape
    strides = x.stride()
    pitch = fmt.packed_size(length)
    if fmt.element.bits == 6 and pitch % 2 == 0:
        qdata, pitch = qdata.view(torch.int16), pitch // 2
    tile_rows, columns, warps = _tile_of(rows, length, strides, fmt.block_size)
    tiles_per_row = cdiv(length, columns)
    with torch.cuda.device_of(x):
        mxquant_quantize_strided[(cdiv(rows, tile_rows) * tiles_per_row,)](
            x,
            qdata,
            scale,
            per_tensor_scale,
            rows,
            length,
            tiles_per_row,
            *strides,
            pitch,
            fmt.num_blocks(length),
            int(per_tensor_scale is not None and per_tensor_scale.numel() > 1),
            **element_constants(fmt.element),
            MODE=None if fmt.scale_format == "e4m3" else mode,
            SATURATE=saturates(fmt, mode),
            CANONICAL_ZERO=canonical_zero,
            BLOCK=fmt.block_size,
            ROWS=tile_rows,
            COLUMNS=columns,
            WHOLE=rows % tile_rows == 0 and length % columns == 0,
            num_warps=warps,
        )


def _tile_of(rows: int, length: int, strides: tuple[int, ...], block: int) -> tuple[int, int, int]:
    """The rows and columns of one program, and its warps."""
    blocks = next_power_of_2(cdiv(length, block)) * block
    if strides[0] == 1 and rows > 1:
        return _ROWS_ACROSS, min(blocks, _COLUMNS_ACROSS), 8
    elements = _LARGE if rows * length >= _LARGE * _TILES_WANTED else _SMALL
    columns = min(blocks, elements)
    return min(next_power_of_2(rows), elements // columns), columns, 4


@triton.jit
def _quantize_tile(
    bits: tl.tensor,
    per_tensor_scale: tl.tensor,
    EXPONENT_BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    MAX_CODE: tl.constexpr,
    MODE: tl.constexpr,
    SATURATE: tl.constexpr,
    WIDE: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Scale bytes, int32 [ROWS, BLOCKS], and codes without signs of fp32 `bits` [ROWS, BLOCKS, BLOCK]."""
    value = bits.to(tl.float32, bitcast=True)
    # Shifting drops the sign without a mask: the units that would mask are the busiest.
    amax = (tl.max((bits << 1).to(tl.uint32, bitcast=True), 2) >> 1).to(tl.int32, bitcast=True)
    if MODE is None:
        byte = e4m3_from_amax(amax, per_tensor_scale)
        divisor = e4m3_to_float(byte) * per_tensor_scale
        magnitude, factor = divide_blocks(tl.abs(value), divisor, per_tensor_scale), 1.0
    else:
        byte = e8m0_from_amax(amax, EXPONENT_BITS, MANTISSA_BITS, MAX_CODE, MODE)
        magnitude, factor = tl.abs(value), e8m0_reciprocal(byte)[:, :, None]
    return byte, encode(magnitude, factor, EXPONENT_BITS, MANTISSA_BITS, MAX_CODE, SATURATE, WIDE)


@cached_launch
@triton.jit(do_not_specialize=["rows", "tiles_per_row"])
def mxquant_quantize_strided(
    x_ptr: tl.tensor,
    qdata_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    per_tensor_ptr: tl.tensor,
    rows: tl.tensor,
    length: tl.tensor,
    tiles_per_row: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    qdata_stride: tl.tensor,
    scale_stride: tl.tensor,
    per_tensor_stride: tl.tensor,
    EXPONENT_BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    MAX_CODE: tl.constexpr,
    MODE: tl.constexpr,
    SATURATE: tl.constexpr,
    CANONICAL_ZERO: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WHOLE: tl.constexpr,
) -> None:
    """One tile of whole blocks. MODE None: E4M3 scales (NVFP4). WHOLE: all tiles are full, and nothing is masked."""
    BLOCKS: tl.constexpr = COLUMNS // BLOCK
    tile = tl.program_id(0)
    row = (tile // tiles_per_row).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    first = (tile % tiles_per_row).to(tl.int64) * COLUMNS
    column = tl.arange(0, COLUMNS)[None, :]
    offset = row * row_stride + column.to(tl.int64) * column_stride
    if WHOLE:
        x = tl.load(x_ptr + first * column_stride + offset)
    else:
        inside = (row < rows) & (column < length - first)
        x = tl.load(x_ptr + first * column_stride + offset, mask=inside, other=0.0)

    bits = tl.reshape(fp32_bits(x), [ROWS, BLOCKS, BLOCK])
    per_tensor_scale = None
    if MODE is None:
        per_tensor_scale = tl.load(per_tensor_ptr + row * per_tensor_stride, mask=row < rows, other=1.0)
    WIDE: tl.constexpr = MODE is None or x.dtype == tl.float32
    byte, codes = _quantize_tile(bits, per_tensor_scale, EXPONENT_BITS, MANTISSA_BITS, MAX_CODE, MODE, SATURATE, WIDE)

    block = tl.arange(0, BLOCKS)[None, :]
    first_block = first // BLOCK
    keep = None if WHOLE else (row < rows) & (block < scale_stride - first_block)
    tl.store(scale_ptr + row * scale_stride + first_block + block, byte.to(tl.uint8), mask=keep)

    BITS: tl.constexpr = 1 + EXPONENT_BITS + MANTISSA_BITS
    if CANONICAL_ZERO:
        bits = tl.where((codes & ((1 << (BITS - 1)) - 1)) == 0, 0, bits)
    is_nan = byte == 255
    WIDTH: tl.constexpr = qdata_ptr.dtype.element_ty.primitive_bitwidth
    base = qdata_ptr + row * qdata_stride + first * BITS // WIDTH
    left = qdata_stride - first * BITS // WIDTH
    _store_codes(codes, bits, is_nan, base, left, row < rows, BITS, WHOLE)


@triton.jit
def _store_codes(
    codes: tl.tensor,
    bits: tl.tensor,
    is_nan: tl.tensor,
    base: tl.tensor,
    left: tl.tensor,
    keep_row: tl.tensor,
    BITS: tl.constexpr,
    WHOLE: tl.constexpr,
) -> None:
    """Pack and store codes [rows, blocks, block] with the signs of fp32 `bits`; zeros in blocks that are NaN.

    Signs are set, and bits above a code's own are cut off, only here, where that costs least.

    Args:
        base: pointers [rows, 1] to where the codes of each row begin.
        left: bytes, or words, from there to the end of a row.
    """
    ROWS: tl.constexpr = codes.shape[0]
    BLOCKS: tl.constexpr = codes.shape[1]
    COLUMNS: tl.constexpr = codes.shape[1] * codes.shape[2]
    SIGN: tl.constexpr = 1 << (BITS - 1)
    if BITS == 6:
        codes = ((bits >> 26) & SIGN) | (codes & ~SIGN)
        _store_sixes(codes, is_nan, base, left, keep_row)
    else:
        BYTES: tl.constexpr = COLUMNS * BITS // 8
        if BITS == 4:
            low, high = tl.split(tl.reshape(codes, [ROWS, BLOCKS, BYTES // BLOCKS, 2]))
            low_bits, high_bits = tl.split(tl.reshape(bits, [ROWS, BLOCKS, BYTES // BLOCKS, 2]))
            # The bits from a code's sign to its byte's end are 0.
            packed = (low + high * 16) | ((low_bits >> 28) & 0x08) | ((high_bits >> 24) & 0x80)
        else:
            packed = ((bits >> 24) & SIGN) | (codes & ~SIGN)
        packed = tl.reshape(tl.where(is_nan[:, :, None], 0, packed), [ROWS, BYTES])
        byte = tl.arange(0, BYTES)[None, :]
        tl.store(base + byte, packed.to(tl.uint8), mask=None if WHOLE else keep_row & (byte < left))


@triton.jit
def _store_sixes(
    codes: tl.tensor,
    is_nan: tl.tensor,
    base: tl.tensor,
    left: tl.tensor,
    keep_row: tl.tensor,
) -> None:
    """Six-bit codes: eight make three 16-bit words where rows are whole words, else four make three bytes."""
    ROWS: tl.constexpr = codes.shape[0]
    BLOCKS: tl.constexpr = codes.shape[1]
    GROUPS: tl.constexpr = codes.shape[1] * codes.shape[2] // 4
    even, odd = tl.split(tl.reshape(codes, [ROWS, BLOCKS, GROUPS // BLOCKS, 2, 2]))
    c0, c2 = tl.split(even)
    c1, c3 = tl.split(odd)
    packed = (c0 & 0x3F) | ((c1 & 0x3F) << 6) | ((c2 & 0x3F) << 12) | ((c3 & 0x3F) << 18)
    packed = tl.where(is_nan[:, :, None], 0, packed)
    if base.dtype.element_ty == tl.int16:
        low, high = tl.split(tl.reshape(packed, [ROWS, GROUPS // 2, 2]))
        word = 3 * tl.arange(0, GROUPS // 2)[None, :]
        tl.store(base + word, low.to(tl.int16), mask=keep_row & (word < left))
        tl.store(base + word + 1, (low >> 16 | high << 8).to(tl.int16), mask=keep_row & (word + 1 < left))
        tl.store(base + word + 2, (high >> 8).to(tl.int16), mask=keep_row & (word + 2 < left))
    else:
        packed = tl.reshape(packed, [ROWS, GROUPS])
        byte = 3 * tl.arange(0, GROUPS)[None, :]
        tl.store(base + byte, packed.to(tl.uint8), mask=keep_row & (byte < left))
        tl.store(base + byte + 1, (packed >> 8).to(tl.uint8), mask=keep_row & (byte < left))
        tl.store(base + byte + 2, (packed >> 16).to(tl.uint8), mask=keep_row & (byte < left))
