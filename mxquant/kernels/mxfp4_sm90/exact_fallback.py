"""Rows of activations out of range, recomputed exactly from what they were before the prologue.

The split-K kernels recompute such rows of their own tiles (`exact_tile`). After the other kernels, a fixup launch
overwrites them: few rows among many are out of range, as a value far below its row's largest makes them. Its programs
look at all row scales and return at once where none is NaN. Else they gather the rows from wherever they are, so that
one pass over the weight serves up to 32 of them.

Shape suffixes: M input rows, N weight rows, K columns; of groups T input rows, S sorted rows, E experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxquant.kernels.mxfp4_sm90.load import (
    PackedWeight,
    e2m1_values,
    load_chunk,
    load_max_exponent,
    packed_offset,
    scale_offset,
)
from mxquant.kernels.primitives.numerics import (
    INTERPRETED,
    e8m0_from_amax,
    e8m0_reciprocal,
    e8m0_to_float,
    fp32_bits,
    power_of_two,
    round_to_element,
)
from mxquant.kernels.primitives.pdl import gdc_wait
from mxquant.kernels.runtime.launch import cached_launch, cdiv, multiprocessors, next_power_of_2

# Rows that a program of a fixup looks at.
ROWS_PER_PROGRAM = tl.constexpr(8192)
# NOTE: many warps, since a fixup is bound by instructions.
_WARPS = 16


@triton.jit
def any_out_of_range(row_scale: tl.tensor) -> tl.tensor:
    """Whether a row scale is NaN."""
    return tl.max((row_scale != row_scale).to(tl.int32), 0) != 0


@triton.jit
def _count_out_of_range(row_scale: tl.tensor) -> tl.tensor:
    """How many row scales are NaN."""
    return tl.sum((row_scale != row_scale).to(tl.int32), 0)


@triton.jit
def _next_out_of_range(row_scale: tl.tensor, rows: tl.tensor, last: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The next 32 of the ascending `rows` beyond `last` whose scale is NaN, and which of the 32 exist; those that don't
    repeat the last one that does.
    """
    found = tl.zeros((32,), tl.int32)
    inside = tl.zeros((32,), tl.int1)
    for i in range(32):
        following = tl.min(tl.where((row_scale != row_scale) & (rows > last), rows, 0x7FFFFFFF), 0)
        exists = following != 0x7FFFFFFF
        last = tl.where(exists, following, last)
        found = tl.where(tl.arange(0, 32) >= i, last, found)
        inside = tl.where(tl.arange(0, 32) == i, exists, inside)
    return found, inside


@triton.jit
def _quantize_mxfp4(value: tl.tensor, MODE: tl.constexpr) -> tuple[tl.tensor, ...]:
    """Block exponents [B], 255 for Inf and NaN, and E2M1 values [B, 32] of fp32 `value` [B, 32]."""
    exponent = e8m0_from_amax(tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1), 2, 1, 7, MODE)
    return exponent, round_to_element(value * e8m0_reciprocal(exponent)[:, None], 2, 1, 7)


@triton.jit
def exact_tile(
    x: tl.tensor,
    x_stride: tl.tensor,
    weight: PackedWeight,
    n: tl.tensor,
    m: tl.tensor,
    inside: tl.tensor,
    first_block: tl.tensor,
    end_block: tl.tensor,
    MODE: tl.constexpr,
) -> tl.tensor:
    """The product [BN, BM] of weight rows `n` and input rows `m`, over some blocks.

    Args:
        x: the input before quantization.
        inside: [BM], which rows to load; the others are zero.
        MODE: the scale mode of MXFP4 that activations are quantized in; None: they are not.
    """
    K = weight.K
    code = tl.arange(0, 32)
    words32 = weight.w_packed.to(tl.pointer_type(tl.int32))
    max_exponent = load_max_exponent(weight.w_scale, n, K)
    total = tl.zeros((n.shape[0], m.shape[0]), tl.float32)
    for block in range(first_block, end_block):
        x_at = m[:, None].to(tl.int64) * x_stride + block * 32 + code[None, :]
        x_block = tl.load(x + x_at, mask=inside[:, None], other=0.0)
        word = tl.load(words32 + packed_offset(n, block, K)[:, None] + (code // 8)[None, :])
        w_codes = e2m1_values(word, (code % 8)[None, :])
        relative = tl.load(weight.w_scale + scale_offset(n, block, K)).to(tl.int32) & 0x1F
        w_exponent = tl.maximum(relative - 27 + max_exponent, 0)
        value = fp32_bits(x_block).to(tl.float32, bitcast=True)
        if MODE is None:
            w = w_codes * e8m0_to_float(w_exponent)[:, None]
            # Both are exact in bf16. NOTE: the interpreter does not multiply bf16.
            w, value = (w, value) if INTERPRETED else (w.to(tl.bfloat16), x_block)
            total += tl.dot(w, tl.trans(value))
        else:
            x_exponent, x_codes = _quantize_mxfp4(value, MODE)
            # The sum over a block is exact. NOTE: its factor may not exist in fp32 where their product does.
            products = tl.dot(w_codes.to(tl.float16), tl.trans(x_codes.to(tl.float16)))
            exponent = x_exponent[None, :] + w_exponent[:, None] - 254
            half = tl.maximum(exponent >> 1, -126)
            products = products * power_of_two(half) * power_of_two(tl.maximum(exponent - half, -126))
            total += tl.where(x_exponent[None, :] == 255, float("nan"), products)
    return total


@triton.jit
def _exact_tile_unquantized(
    x: tl.tensor, x_stride: tl.tensor, weight: PackedWeight, n: tl.tensor, m: tl.tensor, inside: tl.tensor
) -> tl.tensor:
    """`exact_tile` [64, 32] over all blocks, of activations that are not quantized.

    NOTE: 128 columns at a time, since each step waits for its loads.
    """
    K = weight.K
    max_exponent = load_max_exponent(weight.w_scale, n, K)[:, None]
    total = tl.zeros((64, 32), tl.float32)
    for chunk in range((K + 127) // 128):
        column = chunk * 128 + tl.arange(0, 128)
        x_at = m[:, None].to(tl.int64) * x_stride + column[None, :]
        value = tl.load(x + x_at, mask=inside[:, None] & (column < K)[None, :], other=0.0)
        codes, relative = load_chunk(weight, n, chunk)
        w = tl.reshape(codes * e8m0_to_float(tl.maximum(relative + max_exponent, 0))[:, :, None], (64, 128))
        # Both are exact in bf16. NOTE: the interpreter does not multiply bf16, nor convert its subnormals.
        if INTERPRETED:
            value = fp32_bits(value).to(tl.float32, bitcast=True)
        else:
            w = w.to(tl.bfloat16)
        total += tl.dot(w, tl.trans(value))
    return total


@triton.jit
def _exact_rows(
    x: tl.tensor,
    x_stride: tl.tensor,
    weight: PackedWeight,
    bias: tl.tensor,
    n: tl.tensor,
    m: tl.tensor,
    inside: tl.tensor,
    MODE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> tl.tensor:
    """The product [64, 32] of weight rows `n` and input rows `m` over all columns, and the bias at `bias + n`."""
    if MODE is None:
        total = _exact_tile_unquantized(x, x_stride, weight, n, m, inside)
    else:
        total = exact_tile(x, x_stride, weight, n, m, inside, 0, weight.K // 32, MODE)
    if HAS_BIAS:
        total += tl.load(bias + n).to(tl.float32)[:, None]
    return total


def _grid(rows: int, n: int, device: torch.device) -> tuple[int, int]:
    """Programs of a fixup. Each writes every 64 columns that lie a grid apart.

    NOTE: with more than one for each multiprocessor, it takes longer to find that there is nothing to do.
    """
    return min(n // 64, multiprocessors(device)), cdiv(rows, ROWS_PER_PROGRAM.value)


def fixup(
    y_MN: Tensor,
    x_MK: Tensor,
    w_packed: Tensor,
    w_scale: Tensor,
    bias_N: Tensor | None,
    x_scale_M1: Tensor,
    scale_mode: str | None,
) -> None:
    """Overwrite the rows of `y_MN` whose activations were out of range with their exact product.

    One launch, and no synchronization.

    Args:
        y_MN: the product so far.
        x_MK: its input before quantization.
        x_scale_M1: the row scales of its input.
    """
    (m, n), k = y_MN.shape, x_MK.shape[1]
    mxquant_mxfp4_fixup[_grid(m, n, y_MN.device)](
        y_MN, x_MK, w_packed, w_scale, y_MN if bias_N is None else bias_N, x_scale_M1, m, n, k,
        x_MK.stride(0), MODE=scale_mode, HAS_BIAS=bias_N is not None, num_warps=_WARPS, launch_pdl=True,
    )  # fmt: skip


@cached_launch
@triton.jit
def mxquant_mxfp4_fixup(
    y: tl.tensor,
    x: tl.tensor,
    w_packed: tl.tensor,
    w_scale: tl.tensor,
    bias: tl.tensor,
    x_scale: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    x_stride: tl.tensor,
    MODE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> None:
    weight = PackedWeight(w_packed, w_scale, K)
    start = tl.program_id(1) * ROWS_PER_PROGRAM
    rows = start + tl.arange(0, ROWS_PER_PROGRAM)
    gdc_wait()
    row_scale = tl.load(x_scale + rows, mask=rows < M, other=0.0)
    last = start - 1
    # NOTE: rows in range may not be written in `x`.
    for _ in range(0, _count_out_of_range(row_scale), 32):
        m, inside = _next_out_of_range(row_scale, rows, last)
        last = tl.max(m, 0)
        for tile in range(tl.program_id(0), N // 64, tl.num_programs(0)):
            n = (tile * 64 + tl.arange(0, 64)).to(tl.int64)
            total = _exact_rows(x, x_stride, weight, bias, n, m, inside, MODE, HAS_BIAS)
            at = m[None, :].to(tl.int64) * N + n[:, None]
            tl.store(y + at, total.to(y.dtype.element_ty), mask=inside[None, :])


def grouped_fixup(
    y_SN: Tensor,
    x_TK: Tensor,
    w_packed: Tensor,
    w_scale: Tensor,
    bias_EN: Tensor | None,
    offsets_E: Tensor,
    rows_S: Tensor | None,
    x_scale_S1: Tensor,
    scale_mode: str | None,
) -> None:
    """Write what a grouped product has not: zeros beyond the last group, and the exact products of rows out of range.

    Args: those of `fixup`, and `offsets_E` and `rows_S` of `grouped_gemm`.
        x_scale_S1: the row scale of the input of each sorted row.
    """
    (s, n), k, experts = y_SN.shape, x_TK.shape[1], offsets_E.shape[0]
    bias, rows = y_SN if bias_EN is None else bias_EN, offsets_E if rows_S is None else rows_S
    mxquant_mxfp4_grouped_fixup[_grid(s, n, y_SN.device)](
        y_SN, x_TK, w_packed, w_scale, bias, x_scale_S1, offsets_E, rows, s, n, k, x_TK.stride(0), experts,
        GROUPS=next_power_of_2(experts), MODE=scale_mode, GATHER=rows_S is not None, HAS_BIAS=bias_EN is not None,
        num_warps=_WARPS, launch_pdl=True,
    )  # fmt: skip


@cached_launch
@triton.jit
def mxquant_mxfp4_grouped_fixup(
    y: tl.tensor,
    x: tl.tensor,
    w_packed: tl.tensor,
    w_scale: tl.tensor,
    bias: tl.tensor,
    x_scale: tl.tensor,
    offsets: tl.tensor,
    rows: tl.tensor,
    S: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    x_stride: tl.tensor,
    E: tl.tensor,
    GROUPS: tl.constexpr,
    MODE: tl.constexpr,
    GATHER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> None:
    """Some sorted rows, and each 64 columns that lie a grid apart."""
    weight = PackedWeight(w_packed, w_scale, K)
    start = tl.program_id(1) * ROWS_PER_PROGRAM
    sorted_rows = start + tl.arange(0, ROWS_PER_PROGRAM)
    stop = tl.minimum(start + ROWS_PER_PROGRAM, S)
    end_of_groups = tl.load(offsets + E - 1)
    group = tl.arange(0, GROUPS)
    gdc_wait()
    row_scale = tl.load(x_scale + sorted_rows, mask=sorted_rows < tl.minimum(stop, end_of_groups), other=0.0)
    for first in range(tl.maximum(start, end_of_groups // 32 * 32), stop, 32):
        m = first + tl.arange(0, 32)
        for tile in range(tl.program_id(0), N // 64, tl.num_programs(0)):
            at = m[None, :].to(tl.int64) * N + tile * 64 + tl.arange(0, 64)[:, None]
            tl.store(y + at, tl.zeros((64, 32), y.dtype.element_ty), mask=((m >= end_of_groups) & (m < stop))[None, :])
    last = start - 1
    for _ in range(0, _count_out_of_range(row_scale), 32):
        m, out_of_range = _next_out_of_range(row_scale, sorted_rows, last)
        last = tl.max(m, 0)
        row = tl.load(rows + m).to(tl.int64) if GATHER else m.to(tl.int64)
        end = tl.load(offsets + group, mask=group < E, other=S)
        expert_of_row = tl.sum((end[None, :] <= m[:, None]).to(tl.int32), 1)
        for expert in range(tl.min(expert_of_row, 0), tl.max(expert_of_row, 0) + 1):
            inside = out_of_range & (expert_of_row == expert)
            if tl.max(inside.to(tl.int32), 0) != 0:
                for tile in range(tl.program_id(0), N // 64, tl.num_programs(0)):
                    n = (tile * 64 + tl.arange(0, 64)).to(tl.int64)
                    w_row = n + expert * N
                    total = _exact_rows(x, x_stride, weight, bias, w_row, row, inside, MODE, HAS_BIAS)
                    at = m[None, :].to(tl.int64) * N + n[:, None]
                    tl.store(y + at, total.to(y.dtype.element_ty), mask=inside[None, :])
