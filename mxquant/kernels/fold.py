"""Activations folded, in one pass, into values that are exact relative to one power of two a row.

MXFP4 activations are quantized and folded into FP8: E2M1 x 2^s is exact in E5M2 for 29 consecutive exponents s, and in
E4M3 for 15. So a row of MXFP4 blocks becomes a row of E5M2 values and one scale wherever the exponents of its blocks
span at most 28; all-zero blocks do not count. Rows that span more get a scale of NaN, never a clamp: the matmul
recomputes them.

bf16 activations are folded into FP16: rows whose largest magnitude is brought below 2^15, where values down to 2^-32
of it keep all their bits. Rows with smaller ones get NaN likewise.

For `tiled_matmul` the columns are permuted within each 128, as its registers hold the weight: in FP8, position
32j + 16h + 4t + b holds column 32t + 8j + 4h + b; in FP16, position 32q + 16o + 8h + 2t + e holds column
32t + 8q + 4o + 2e + h. A product does not change when both sides are permuted alike.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from mxquant.formats.block import dequantize_blocks, quantize_blocks
from mxquant.formats.spec import FORMATS
from mxquant.kernels.launch import cached_launch, cdiv, next_power_of_2
from mxquant.kernels.overlap import let_next_start
from mxquant.kernels.plan import Buffer, Step
from mxquant.kernels.triton_numerics import e8m0_from_amax, e8m0_reciprocal, fp32_bits, round_to_element

_MXFP4 = FORMATS["mxfp4"]
# Of the row's largest block exponent in E5M2: 6 x 2^13 <= 57344.
TOP, SPAN = 13, 28
# Rows up to this long stay in the registers of one program; longer ones are read twice.
_LONGEST_IN_REGISTERS = 16384


def _padded(columns: int) -> int:
    return cdiv(columns, 128) * 128


def folding(
    m: int, k: int, x_stride: int, scale_mode: str | None, *, permute: bool = True
) -> tuple[dict[str, Buffer], Step]:
    """The step from "x" to "values" and "row_scale", and these: of `fold_activation`, or, where `scale_mode` is None,
    of `fold_bfloat16`.
    """
    width = _padded(k) if permute else k
    block_k = next_power_of_2(width)
    in_registers = block_k <= _LONGEST_IN_REGISTERS
    if scale_mode is None:
        kernel, dtype = _fold_bfloat16_kernel, torch.float16
        block_k, constants = min(block_k, _LONGEST_IN_REGISTERS), {}
    else:
        kernel, dtype = _fold_activation_kernel, torch.float8_e5m2
        block_k = block_k if in_registers else 4096
        constants = {"MODE": scale_mode, "PERMUTE": permute, "IN_REGISTERS": in_registers, "TOP": TOP, "SPAN": SPAN}
    constants |= {"BLOCK_K": block_k, "num_warps": max(1, min(16, block_k // 512))}
    buffers = {"values": Buffer((m, width), dtype), "row_scale": Buffer((m, 1), torch.float32)}
    return buffers, Step(kernel, (m,), ("x", *buffers, k, width, x_stride), constants)


def _fold(x: Tensor, scale_mode: str | None, *, permute: bool) -> tuple[Tensor, Tensor]:
    m, k = x.shape
    buffers, step = folding(m, k, x.stride(0), scale_mode, permute=permute)
    values, row_scale = (buffer.empty(x.device) for buffer in buffers.values())
    step.launch({"x": x, "values": values, "row_scale": row_scale})
    return values, row_scale


def fold_activation(x: Tensor, scale_mode: str, *, permute: bool) -> tuple[Tensor, Tensor]:
    """Quantize and fold rows.

    Args:
        x: bf16 or fp16 [M, K], K a multiple of 32, last axis contiguous.
        scale_mode: of MXFP4.
        permute: permute the columns for `tiled_matmul`, with zeros up to a multiple of 128.

    Returns:
        values, float8_e5m2 [M, K or wider]; row scales, fp32 [M, 1], NaN of rows that do not fit (span, Inf or NaN).
    """
    return _fold(x, scale_mode, permute=permute)


def fold_activation_torch(x: Tensor, scale_mode: str, *, permute: bool) -> tuple[Tensor, Tensor]:
    """The twin of `fold_activation`; rows that do not fit hold whatever the casts give."""
    m, k = x.shape
    qdata, scale = quantize_blocks(x, _MXFP4, scale_mode)
    exponent = scale.int()
    empty = ((qdata.unflatten(1, (k // 32, 16)) & 0x77).amax(-1) == 0) & (exponent != 255)
    highest = torch.where(empty, 0, exponent).amax(1, keepdim=True)
    lowest = torch.where(empty, 255, exponent).amin(1, keepdim=True)
    unfit = (highest - lowest > SPAN) | (highest == 255)
    # The byte of 2^(exponent - highest + TOP); an empty block's is arbitrary, its codes are zero.
    relative = torch.where(empty, 127, exponent - highest + TOP + 127).clamp(0, 254).to(torch.uint8)
    values = dequantize_blocks(qdata, relative, _MXFP4, k).to(torch.float8_e5m2)
    if permute:
        bits = F.pad(values.view(torch.uint8), (0, _padded(k) - k)).view(m, -1, 4, 4, 2, 4)
        values = bits.permute(0, 1, 3, 4, 2, 5).reshape(m, -1).view(torch.float8_e5m2)
    row_scale = torch.exp2((highest - TOP - 127).double()).float()
    return values, row_scale.masked_fill(unfit, torch.nan)


def fold_bfloat16(x: Tensor) -> tuple[Tensor, Tensor]:
    """Fold rows that are not quantized, columns permuted for `tiled_matmul`.

    Args:
        x: bf16 [M, K], last axis contiguous.

    Returns:
        values, float16 [M, K], with zeros up to a multiple of 128; row scales, fp32 [M, 1], NaN of rows that do not
        fit.
    """
    return _fold(x, None, permute=True)


def fold_bfloat16_torch(x: Tensor) -> tuple[Tensor, Tensor]:
    """The twin of `fold_bfloat16`; rows that do not fit hold whatever the casts give."""
    value = x.double()
    largest = (x.view(torch.int16).int() & 0x7FFF).amax(1, keepdim=True) >> 7
    exponent = (largest - 14).clamp(1, 253) - 127
    values = (value * torch.exp2(-exponent.double())).to(torch.float16)
    unfit = (values.double() * torch.exp2(exponent.double()) != value).any(1, keepdim=True)
    values = F.pad(values, (0, _padded(x.shape[1]) - x.shape[1])).view(x.shape[0], -1, 4, 4, 2, 2, 2)
    values = values.permute(0, 1, 3, 4, 6, 2, 5).reshape(x.shape[0], -1)
    return values, torch.exp2(exponent.float()).masked_fill(unfit, torch.nan)


@triton.jit
def power_of_two(exponent: tl.tensor) -> tl.tensor:
    """2^exponent for -126..127, from its bits."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def row_factor(highest: tl.tensor, TOP: tl.constexpr) -> tl.tensor:
    """2^(highest - TOP - 127), subnormal where `highest` is small: a product of two normal factors."""
    exponent = highest - TOP - 127
    return power_of_two(tl.maximum(exponent, -126)) * power_of_two(tl.minimum(exponent + 126, 0))


@triton.jit
def any_unfit(row_scale: tl.tensor) -> tl.tensor:
    """Whether a row did not fold: its scale is NaN."""
    return tl.max((row_scale != row_scale).to(tl.int32), 0) != 0


@triton.jit
def quantize_mxfp4(value: tl.tensor, MODE: tl.constexpr) -> tuple[tl.tensor, ...]:
    """Block exponents [B], 255 for Inf and NaN, and E2M1 values [B, 32] of fp32 `value` [B, 32]."""
    exponent = e8m0_from_amax(tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1), 2, 1, 7, MODE)
    return exponent, round_to_element(value * e8m0_reciprocal(exponent)[:, None], 2, 1, 7)


@triton.jit
def _quantize_part(
    x: tl.tensor, start: tl.tensor, K: tl.tensor, MODE: tl.constexpr, BLOCK_K: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """Exponents and values of the blocks from column `start`, and their largest and smallest exponent, empty ones
    aside.
    """
    column = start + tl.arange(0, BLOCK_K)
    value = fp32_bits(tl.load(x + column, mask=column < K, other=0)).to(tl.float32, bitcast=True)
    exponent, rounded = quantize_mxfp4(tl.reshape(value, (BLOCK_K // 32, 32)), MODE)
    empty = (tl.max(tl.abs(rounded), 1) == 0) & (exponent != 255)
    return exponent, rounded, tl.max(tl.where(empty, 0, exponent), 0), tl.min(tl.where(empty, 255, exponent), 0)


@triton.jit
def _store_folded(
    values: tl.tensor,
    exponent: tl.tensor,
    rounded: tl.tensor,
    highest: tl.tensor,
    start: tl.tensor,
    width: tl.tensor,
    PERMUTE: tl.constexpr,
    TOP: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    factor = power_of_two(tl.minimum(tl.maximum(exponent - highest + TOP, -126), 127))
    folded = (rounded * factor[:, None]).to(values.dtype.element_ty)
    if PERMUTE:
        folded = tl.permute(tl.reshape(folded, (BLOCK_K // 128, 4, 4, 2, 4)), (0, 2, 3, 1, 4))  # chunk t j h b
    column = start + tl.arange(0, BLOCK_K)
    tl.store(values + column, tl.reshape(folded, (BLOCK_K,)), mask=column < width)


@cached_launch
@triton.jit
def _fold_activation_kernel(
    x: tl.tensor,
    values: tl.tensor,
    row_scale: tl.tensor,
    K: tl.tensor,
    width: tl.tensor,
    x_stride: tl.tensor,
    MODE: tl.constexpr,
    PERMUTE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IN_REGISTERS: tl.constexpr,
    TOP: tl.constexpr,
    SPAN: tl.constexpr,
) -> None:
    let_next_start()
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    values += row * width
    exponent, rounded, highest, lowest = _quantize_part(x, 0, K, MODE, BLOCK_K)
    if IN_REGISTERS:
        _store_folded(values, exponent, rounded, highest, 0, width, PERMUTE, TOP, BLOCK_K)
    else:
        for start in range(BLOCK_K, width, BLOCK_K):
            exponent, rounded, high, low = _quantize_part(x, start, K, MODE, BLOCK_K)
            highest = tl.maximum(highest, high)
            lowest = tl.minimum(lowest, low)
        for start in range(0, width, BLOCK_K):
            exponent, rounded, high, low = _quantize_part(x, start, K, MODE, BLOCK_K)
            _store_folded(values, exponent, rounded, highest, start, width, PERMUTE, TOP, BLOCK_K)
    fits = (highest - lowest <= SPAN) & (highest != 255)
    tl.store(row_scale + row, tl.where(fits, row_factor(highest, TOP), float("nan")))


@cached_launch
@triton.jit
def _fold_bfloat16_kernel(
    x: tl.tensor,
    values: tl.tensor,
    row_scale: tl.tensor,
    K: tl.tensor,
    width: tl.tensor,
    x_stride: tl.tensor,
    BLOCK_K: tl.constexpr,
) -> None:
    let_next_start()
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    values += row * width
    column = tl.arange(0, BLOCK_K)
    # The last part is read first, and stays in registers where the row is one part.
    last = (width - 1) // BLOCK_K * BLOCK_K
    value = fp32_bits(tl.load(x + last + column, mask=last + column < K, other=0.0))
    largest = tl.max(value & 0x7FFFFFFF, 0)
    for start in range(0, last, BLOCK_K):
        largest = tl.maximum(largest, tl.max(fp32_bits(tl.load(x + start + column)) & 0x7FFFFFFF, 0))
    exponent = tl.minimum(tl.maximum((largest >> 23) - 14, 1), 253) - 127
    missed = _store_folded_bfloat16(values + last, value, exponent, width - last, BLOCK_K)
    for start in range(0, last, BLOCK_K):
        part = fp32_bits(tl.load(x + start + column))
        missed = tl.maximum(missed, _store_folded_bfloat16(values + start, part, exponent, width - start, BLOCK_K))
    tl.store(row_scale + row, tl.where(missed == 0, power_of_two(exponent), float("nan")))


@triton.jit
def _store_folded_bfloat16(
    values: tl.tensor, bits: tl.tensor, exponent: tl.tensor, length: tl.tensor, BLOCK_K: tl.constexpr
) -> tl.tensor:
    """Store up to `length` fp32 `bits` times 2^-exponent as permuted FP16; 1 if one of them changed, else 0."""
    value = bits.to(tl.float32, bitcast=True)
    scaled = value * power_of_two(-exponent)
    folded = scaled.to(tl.float16)
    # A scaled value below fp32's range comes out as 0 too. NaN differs from itself.
    changed = (folded.to(tl.float32) != scaled) | ((folded == 0) & (value != 0))
    permuted = tl.permute(tl.reshape(folded, (BLOCK_K // 128, 4, 4, 2, 2, 2)), (0, 2, 3, 5, 1, 4))  # chunk q o h t e
    column = tl.arange(0, BLOCK_K)
    tl.store(values + column, tl.reshape(permuted, (BLOCK_K,)), mask=column < length)
    return tl.max(changed.to(tl.int32), 0)
