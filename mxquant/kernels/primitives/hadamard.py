"""The block Hadamard rotation in registers, for kernels that hold one block in each thread.

A block is a tuple of one tensor for each element, so a stage is sums and differences without shuffles. Twin:
`mxquant.reference.hadamard`, equal bit by bit.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def hadamard_block(values: tl.tuple) -> tl.tuple:
    """The orthonormal Hadamard matrix times blocks of 16 or 32 elements, fp32."""
    return hadamard_block_and_amax(values)[0]


@triton.jit
def hadamard_block_and_amax(values: tl.tuple) -> tuple[tl.tuple, tl.tensor]:
    """`hadamard_block`, and the fp32 bits of the largest magnitude; of NaN or Inf, if there is either.

    The larger of |a + b| and |a - b| is |a| + |b|, rounded alike, and a rounded product with a constant keeps order. So
    one addition finds the larger of two, and leaves the busy integer units alone.
    """
    SIZE: tl.constexpr = len(values)
    tl.static_assert(SIZE == 16 or SIZE == 32)
    stage = _sums_and_differences(_sums_and_differences(values, 1), 2)
    stage = _sums_and_differences(stage, 4)
    if SIZE == 32:
        stage = _sums_and_differences(stage, 8)
    largest = (tl.abs(stage[0]) + tl.abs(stage[SIZE // 2])).to(tl.int32, bitcast=True)
    for i in tl.static_range(1, SIZE // 2):
        sums = tl.abs(stage[i]) + tl.abs(stage[i + SIZE // 2])
        largest = tl.maximum(largest, sums.to(tl.int32, bitcast=True))
    stage = _sums_and_differences(stage, SIZE // 2)
    largest = (largest.to(tl.float32, bitcast=True) * SIZE**-0.5).to(tl.int32, bitcast=True)
    return [value * SIZE**-0.5 for value in stage], largest


@triton.jit
def _sums_and_differences(values: tl.tuple, HALF: tl.constexpr) -> tl.tuple:
    """One stage: elements `HALF` apart become their sum and their difference."""
    stage: tl.tuple = ()
    for i in tl.static_range(len(values)):
        low, high = values[i - (i & HALF)], values[i | HALF]
        stage = stage + (low + high if i & HALF == 0 else low - high,)
    return stage
