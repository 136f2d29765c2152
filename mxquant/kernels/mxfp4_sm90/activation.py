"""The activation prologue: rows rescaled, in one launch before a product, to row-wise FP8 (`activation_fp8`) or FP16.

Twin: `mxquant.reference.rescale`, which says when a row is in range and how columns are permuted.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxquant.kernels.moe.gated_activation import load_gated
from mxquant.kernels.mxfp4_sm90.activation_fp8 import fp8_step
from mxquant.kernels.primitives.numerics import fp32_bits, power_of_two
from mxquant.kernels.primitives.pdl import gdc_launch_dependents, gdc_wait
from mxquant.kernels.runtime.launch import cached_launch, cdiv, next_power_of_2
from mxquant.kernels.runtime.plan import Buffer, Step
from mxquant.reference.rescale import Prologue

# Columns in the registers of one program. Longer rows are read twice.
_MAX_BLOCK_K = 16384


def plan_prologue(
    m: int, k: int, x_stride: int, prologue: Prologue, *, permute: bool = True
) -> tuple[dict[str, Buffer], Step]:
    """The tensors that the prologue writes, by name, and the step that writes them from "x".

    They are "values" and "row_scale" of `rescale_activation`, and with a gate or a rotation "x_pre_quant". Where
    columns are permuted, row scales have room behind them, so that a kernel may load those of a tile of 128 rows from
    any row on.
    """
    height, width = (m + 127, cdiv(k, 128) * 128) if permute else (m, k)
    dtype = torch.float16 if prologue.scale_mode is None else torch.float8_e5m2
    buffers = {"values": Buffer((m, width), dtype), "row_scale": Buffer((height, 1), torch.float32)}
    x_pre_quant = "x"
    if prologue.rotated or prologue.gate is not None:
        x_pre_quant, buffers["x_pre_quant"] = "x_pre_quant", Buffer((m, k), torch.bfloat16)
    tensors, sizes = ("x", "values", "row_scale", x_pre_quant), (m, k, width, x_stride)
    if prologue.scale_mode is None:
        return buffers, fp16_step(tensors, sizes, prologue)
    return buffers, fp8_step(tensors, sizes, prologue, permute)


def rescale_activation(x: Tensor, prologue: Prologue, *, permute: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Rescale rows to FP8 or FP16, as `prologue` asks.

    Args:
        x: bf16 (or fp16 where it is quantized) [M, K], K a multiple of 32, or bf16 [M, 2K] with a gate; last axis
            contiguous.
        permute: permute the columns as the packed weight has them, with zeros up to a multiple of 128. Always for FP16.

    Returns:
        values, float8_e5m2 or float16 [M, K or wider], arbitrary in rows out of range; row scales, fp32 [M, 1], NaN for
        rows out of range; x_pre_quant [M, K], from which rows out of range are recomputed: `x`, or bf16, gated and
        rotated, of which only rows out of range are written.
    """
    m, k = x.shape[0], x.shape[1] if prologue.gate is None else x.shape[1] // 2
    buffers, step = plan_prologue(m, k, x.stride(0), prologue, permute=permute)
    tensors = {name: buffer.empty(x.device) for name, buffer in buffers.items()}
    step.launch({"x": x, **tensors})
    return tensors["values"], tensors["row_scale"][:m], tensors.get("x_pre_quant", x)


def fp16_step(tensors: tuple[str, str, str, str], sizes: tuple[int, int, int, int], prologue: Prologue) -> Step:
    """As `fp8_step`, of bf16 rows that are not quantized."""
    m, k, width, x_stride = sizes
    block_k = min(next_power_of_2(width), _MAX_BLOCK_K)
    warps = max(1, min(16, block_k // 512))
    constants = {"GATE": prologue.gate, "BLOCK_K": block_k, "num_warps": warps, "launch_pdl": True}
    return Step(mxquant_rescale_to_fp16, (m,), (*tensors, k, width, x_stride), constants)


@cached_launch
@triton.jit
def mxquant_rescale_to_fp16(
    x: tl.tensor,
    values: tl.tensor,
    row_scale: tl.tensor,
    x_pre_quant: tl.tensor,
    K: tl.tensor,
    width: tl.tensor,
    x_stride: tl.tensor,
    GATE: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """One row."""
    gdc_wait()
    gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    values += row * width
    # The last block is read first. It stays in registers, so that a row of one block is read once.
    last = (width - 1) // BLOCK_K * BLOCK_K
    value = _load_columns(x, last, K, GATE, BLOCK_K)
    largest = tl.max(value & 0x7FFFFFFF, 0)
    for start in range(0, last, BLOCK_K):
        largest = tl.maximum(largest, tl.max(_load_columns(x, start, K, GATE, BLOCK_K) & 0x7FFFFFFF, 0))
    exponent = tl.minimum(tl.maximum((largest >> 23) - 14, 1), 253) - 127
    inexact = _store_fp16(values + last, value, exponent, width - last, BLOCK_K)
    for start in range(0, last, BLOCK_K):
        columns = _load_columns(x, start, K, GATE, BLOCK_K)
        inexact = tl.maximum(inexact, _store_fp16(values + start, columns, exponent, width - start, BLOCK_K))
    tl.store(row_scale + row, tl.where(inexact == 0, power_of_two(exponent), float("nan")))
    if GATE is not None and inexact != 0:
        column = tl.arange(0, BLOCK_K)
        for start in range(0, width, BLOCK_K):
            gated = load_gated(x, start, K, GATE, BLOCK_K)
            tl.store(x_pre_quant + row * K + start + column, gated, mask=start + column < K)


@triton.jit
def _load_columns(x: tl.tensor, start: tl.tensor, K: tl.tensor, GATE: tl.constexpr, BLOCK_K: tl.constexpr) -> tl.tensor:
    """The fp32 bits of the columns of a row from `start` on; zeros beyond K."""
    if GATE is not None:
        return fp32_bits(load_gated(x, start, K, GATE, BLOCK_K))
    column = start + tl.arange(0, BLOCK_K)
    return fp32_bits(tl.load(x + column, mask=column < K, other=0.0))


@triton.jit
def _store_fp16(
    values: tl.tensor, bits: tl.tensor, exponent: tl.tensor, length: tl.tensor, BLOCK_K: tl.constexpr
) -> tl.tensor:
    """Store up to `length` fp32 `bits` times 2^-exponent as permuted FP16; returns 1 if one was inexact, else 0."""
    value = bits.to(tl.float32, bitcast=True)
    scaled = value * power_of_two(-exponent)
    rounded = scaled.to(tl.float16)
    # NOTE: a scaled value below fp32's range becomes 0 twice, so zeros are compared with `value`. NaN differs from
    # itself.
    changed = (rounded.to(tl.float32) != scaled) | ((rounded == 0) & (value != 0))
    permuted = tl.permute(tl.reshape(rounded, (BLOCK_K // 128, 4, 4, 2, 2, 2)), (0, 2, 3, 5, 1, 4))  # chunk q o h t e
    column = tl.arange(0, BLOCK_K)
    tl.store(values + column, tl.reshape(permuted, (BLOCK_K,)), mask=column < length)
    return tl.max(changed.to(tl.int32), 0)
