"""The kernel of `fold` that folds bf16 rows which are not quantized into FP16."""

from __future__ import annotations

import triton
import triton.language as tl

from mxquant.kernels.moe.gated_activation import load_gated
from mxquant.kernels.primitives.numerics import fp32_bits, power_of_two
from mxquant.kernels.primitives.pdl import gdc_launch_dependents, gdc_wait
from mxquant.kernels.runtime.launch import cached_launch


@cached_launch
@triton.jit
def fold_bfloat16_kernel(
    x: tl.tensor,
    values: tl.tensor,
    row_scale: tl.tensor,
    before: tl.tensor,
    K: tl.tensor,
    width: tl.tensor,
    x_stride: tl.tensor,
    GATE: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    gdc_wait()
    gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    values += row * width
    # The last part is read first, and stays in registers where the row is one part.
    last = (width - 1) // BLOCK_K * BLOCK_K
    value = _load_columns(x, last, K, GATE, BLOCK_K)
    largest = tl.max(value & 0x7FFFFFFF, 0)
    for start in range(0, last, BLOCK_K):
        largest = tl.maximum(largest, tl.max(_load_columns(x, start, K, GATE, BLOCK_K) & 0x7FFFFFFF, 0))
    exponent = tl.minimum(tl.maximum((largest >> 23) - 14, 1), 253) - 127
    missed = _store_folded_bfloat16(values + last, value, exponent, width - last, BLOCK_K)
    for start in range(0, last, BLOCK_K):
        part = _load_columns(x, start, K, GATE, BLOCK_K)
        missed = tl.maximum(missed, _store_folded_bfloat16(values + start, part, exponent, width - start, BLOCK_K))
    tl.store(row_scale + row, tl.where(missed == 0, power_of_two(exponent), float("nan")))
    if GATE is not None and missed != 0:
        column = tl.arange(0, BLOCK_K)
        for start in range(0, width, BLOCK_K):
            gated = load_gated(x, start, K, GATE, BLOCK_K)
            tl.store(before + row * K + start + column, gated, mask=start + column < K)


@triton.jit
def _load_columns(x: tl.tensor, start: tl.tensor, K: tl.tensor, GATE: tl.constexpr, BLOCK_K: tl.constexpr) -> tl.tensor:
    """The fp32 bits of columns of a row from `start` on; beyond K, zeros."""
    if GATE is not None:
        return fp32_bits(load_gated(x, start, K, GATE, BLOCK_K))
    column = start + tl.arange(0, BLOCK_K)
    return fp32_bits(tl.load(x + column, mask=column < K, other=0.0))


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
