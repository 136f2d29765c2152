"""The activation prologue to FP16: bf16 rows that are not quantized.

Twin: `mxquant.reference.rescale.rescale_to_fp16`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mxquant.kernels.moe.gated_activation import load_gated
from mxquant.kernels.primitives.numerics import fp32_bits, power_of_two
from mxquant.kernels.primitives.pdl import gdc_launch_dependents, gdc_wait
from mxquant.kernels.runtime.launch import cached_launch, next_power_of_2
from mxquant.kernels.runtime.plan import Step
from mxquant.reference.rescale import Prologue

# Columns in the registers of one program. Longer rows are read twice.
_MAX_BLOCK_K = 16384


def fp16_step(tensors: tuple[str, str, str, str], sizes: tuple[int, int, int, int], prologue: Prologue) -> Step:
    """The step that writes values, row scales and, of gated rows out of range, the rows themselves.

    Args:
        tensors: names of x, values, row_scale and x_pre_quant.
        sizes: M, K, the width of the values, and how far rows of x lie apart.
    """
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
