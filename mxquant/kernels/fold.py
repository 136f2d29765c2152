"""Activations quantized to MXFP4 and folded into FP8 in one pass: exact values relative to one power of two a row.

E2M1 x 2^s is exact in E5M2 for 29 consecutive exponents s, and in E4M3 for 15. So a row of MXFP4 blocks becomes a row
of E5M2 values and one scale wherever the exponents of its blocks span at most 28; all-zero blocks do not count. Rows
that span more are marked, never clamped silently: `w4a4` recomputes them.

For `w4a4.multiply_few` the columns are permuted within each 128, as its registers hold the weight: position
32j + 16h + 4t + b holds column 32t + 8j + 4h + b. A product does not change when both sides are permuted alike.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxquant.formats.block import dequantize_blocks, quantize_blocks
from mxquant.formats.spec import FORMATS
from mxquant.kernels.launch import cached_launch, next_power_of_2
from mxquant.kernels.triton_numerics import e8m0_from_amax, e8m0_reciprocal, fp32_bits, round_to_element

_MXFP4 = FORMATS["mxfp4"]
# Of the row's largest block exponent in E5M2: 6 x 2^13 <= 57344.
TOP, SPAN = 13, 28
# Rows up to this long stay in the registers of one program; longer ones are read twice.
_LONGEST_IN_REGISTERS = 16384


def fold_activation(x: Tensor, scale_mode: str, *, permute: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize and fold rows.

    Args:
        x: bf16 or fp16 [M, K], K a multiple of 128, last axis contiguous.
        scale_mode: of MXFP4.
        permute: permute the columns for `w4a4.multiply_few`.

    Returns:
        values, float8_e5m2 [M, K]; row scales, fp32 [M, 1]; marks of rows that do not fit (span, Inf or NaN), int32
        [M].
    """
    m, k = x.shape
    values = torch.empty(m, k, dtype=torch.float8_e5m2, device=x.device)
    row_scale = torch.empty(m, 1, dtype=torch.float32, device=x.device)
    unfit = torch.empty(m, dtype=torch.int32, device=x.device)
    block_k = next_power_of_2(k)
    in_registers = block_k <= _LONGEST_IN_REGISTERS
    if not in_registers:
        block_k = 4096
    _fold_activation_kernel[(m,)](
        x, values, row_scale, unfit, k, x.stride(0), MODE=scale_mode, PERMUTE=permute,
        BLOCK_K=block_k, IN_REGISTERS=in_registers, TOP=TOP, SPAN=SPAN, num_warps=max(1, min(16, block_k // 512)),
    )  # fmt: skip
    return values, row_scale, unfit


def fold_activation_torch(x: Tensor, scale_mode: str, *, permute: bool) -> tuple[Tensor, Tensor, Tensor]:
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
        bits = values.view(torch.uint8).view(m, k // 128, 4, 4, 2, 4).permute(0, 1, 3, 4, 2, 5).reshape(m, k)
        values = bits.view(torch.float8_e5m2)
    row_scale = torch.exp2((highest - TOP - 127).double()).float()
    return values, row_scale, unfit.squeeze(1).int()


@triton.jit
def power_of_two(exponent: tl.tensor) -> tl.tensor:
    """2^exponent for -126..127, from its bits."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def row_factor(highest: tl.tensor, TOP: tl.constexpr) -> tl.tensor:
    """2^(highest - TOP - 127), subnormal where `highest` is small: a product of two normal factors."""
    return power_of_two(tl.maximum(highest - TOP - 127 + 32, -126)) * 2.3283064365386963e-10


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
    K: tl.tensor,
    PERMUTE: tl.constexpr,
    TOP: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    factor = power_of_two(tl.minimum(tl.maximum(exponent - highest + TOP, -126), 127))
    folded = (rounded * factor[:, None]).to(values.dtype.element_ty)
    if PERMUTE:
        folded = tl.permute(tl.reshape(folded, (BLOCK_K // 128, 4, 4, 2, 4)), (0, 2, 3, 1, 4))  # chunk t j h b
    column = start + tl.arange(0, BLOCK_K)
    tl.store(values + column, tl.reshape(folded, (BLOCK_K,)), mask=column < K)


@cached_launch
@triton.jit
def _fold_activation_kernel(
    x: tl.tensor,
    values: tl.tensor,
    row_scale: tl.tensor,
    unfit: tl.tensor,
    K: tl.tensor,
    x_stride: tl.tensor,
    MODE: tl.constexpr,
    PERMUTE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IN_REGISTERS: tl.constexpr,
    TOP: tl.constexpr,
    SPAN: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    values += row * K
    exponent, rounded, highest, lowest = _quantize_part(x, 0, K, MODE, BLOCK_K)
    if IN_REGISTERS:
        _store_folded(values, exponent, rounded, highest, 0, K, PERMUTE, TOP, BLOCK_K)
    else:
        for start in range(BLOCK_K, K, BLOCK_K):
            exponent, rounded, high, low = _quantize_part(x, start, K, MODE, BLOCK_K)
            highest = tl.maximum(highest, high)
            lowest = tl.minimum(lowest, low)
        for start in range(0, K, BLOCK_K):
            exponent, rounded, high, low = _quantize_part(x, start, K, MODE, BLOCK_K)
            _store_folded(values, exponent, rounded, highest, start, K, PERMUTE, TOP, BLOCK_K)
    tl.store(row_scale + row, row_factor(highest, TOP))
    tl.store(unfit + row, ((highest - lowest > SPAN) | (highest == 255)).to(tl.int32))
