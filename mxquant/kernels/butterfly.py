"""The block Hadamard rotation of `rotate`, in registers: for kernels that hold one block in each thread.

A block is a tuple of as many tensors as it has elements, so that a stage of the butterfly is nothing but sums and
differences. Twin: `rotate`, equal bit by bit.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotate_block(values: tl.tuple) -> tl.tuple:
    """The orthonormal Hadamard matrix times blocks: a tuple of 16 or 32 fp32 tensors to another."""
    SIZE: tl.constexpr = len(values)
    tl.static_assert(SIZE == 16 or SIZE == 32)
    stage = _sums_and_differences(_sums_and_differences(values, 1), 2)
    stage = _sums_and_differences(_sums_and_differences(stage, 4), 8)
    if SIZE == 32:
        stage = _sums_and_differences(stage, 16)
    return [value * SIZE**-0.5 for value in stage]


@triton.jit
def _sums_and_differences(values: tl.tuple, HALF: tl.constexpr) -> tl.tuple:
    """One stage: elements `HALF` apart become their sum and their difference."""
    stage: tl.tuple = ()
    for i in tl.static_range(len(values)):
        low, high = values[i - (i & HALF)], values[i | HALF]
        stage = stage + (low + high if i & HALF == 0 else low - high,)
    return stage
