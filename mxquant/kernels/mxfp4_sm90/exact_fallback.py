"""Rows of activations that did not fold, recomputed exactly after a kernel has written the product of the others.

A few among many, as a value far below its row's largest makes them: a launch of few programs looks at all rows, and
returns at once where all folded. Else they are picked together from wherever they are, so that one pass over the weight
serves up to 32 of them.

Shape suffixes: M input rows, N weight rows, K columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mxquant.kernels.mxfp4_sm90.load import chunk_codes, exact_tile, highest_exponent
from mxquant.kernels.primitives.numerics import INTERPRETED, e8m0_to_float, fp32_bits
from mxquant.kernels.runtime.launch import cdiv, multiprocessors

# Rows that a program looks at; and its warps, many, since instructions are what it spends its time on.
LOOKED_AT = tl.constexpr(8192)
EXACT_WARPS = 16


def exact_grid(rows: int, n: int, device: torch.device) -> tuple[int, int]:
    """Programs for `n` columns of so many rows. Each writes every 64 that lie a grid apart: with a few programs for
    each multiprocessor it would take longer to find that there is nothing to do."""
    return min(n // 64, multiprocessors(device)), cdiv(rows, LOOKED_AT.value)


@triton.jit
def unfit_count(factor: tl.tensor) -> tl.tensor:
    """How many rows did not fold: their `factor` is NaN."""
    return tl.sum((factor != factor).to(tl.int32), 0)


@triton.jit
def next_unfit(factor: tl.tensor, rows: tl.tensor, last: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Of `rows`, in ascending order, 32 beyond `last` whose `factor` is NaN, and which of the 32 there are: the others
    are the last of those."""
    found = tl.zeros((32,), tl.int32)
    inside = tl.zeros((32,), tl.int1)
    for i in range(32):
        following = tl.min(tl.where((factor != factor) & (rows > last), rows, 0x7FFFFFFF), 0)
        there = following != 0x7FFFFFFF
        last = tl.where(there, following, last)
        found = tl.where(tl.arange(0, 32) >= i, last, found)
        inside = tl.where(tl.arange(0, 32) == i, there, inside)
    return found, inside


@triton.jit
def store_exact(
    y: tl.tensor,
    x: tl.tensor,
    words: tl.tensor,
    scale_bytes: tl.tensor,
    bias: tl.tensor,
    w_row: tl.tensor,
    n: tl.tensor,
    x_row: tl.tensor,
    m: tl.tensor,
    inside: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    x_stride: tl.tensor,
    MODE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> None:
    """Store columns `n` [64] of rows `m` [32] that are `inside`: the exact product of weight rows `w_row`, which also
    have their bias there, with input rows `x_row`."""
    if MODE is None:
        total = _exact_wide_tile(x, words, scale_bytes, w_row, x_row, inside, K, x_stride)
    else:
        total = exact_tile(x, words, scale_bytes, w_row, x_row, inside, 0, K // 32, K, x_stride, MODE, 64, 32)
    if HAS_BIAS:
        total += tl.load(bias + w_row).to(tl.float32)[:, None]
    at = m[None, :].to(tl.int64) * N + n[:, None]
    tl.store(y + at, total.to(y.dtype.element_ty), mask=inside[None, :])


@triton.jit
def _exact_wide_tile(
    x: tl.tensor,
    words: tl.tensor,
    scale_bytes: tl.tensor,
    n: tl.tensor,
    m: tl.tensor,
    inside: tl.tensor,
    K: tl.tensor,
    x_stride: tl.tensor,
) -> tl.tensor:
    """`exact_tile` [64, 32] of activations that are not quantized, over all blocks: 128 columns at a time, since each
    step waits for its loads."""
    highest = highest_exponent(scale_bytes, n, K)[:, None]
    total = tl.zeros((64, 32), tl.float32)
    for chunk in range((K + 127) // 128):
        column = chunk * 128 + tl.arange(0, 128)
        x_at = m[:, None].to(tl.int64) * x_stride + column[None, :]
        value = tl.load(x + x_at, mask=inside[:, None] & (column < K)[None, :], other=0.0)
        codes, relative = chunk_codes(words, scale_bytes, n, chunk, K)
        w = tl.reshape(codes * e8m0_to_float(tl.maximum(relative + highest, 0))[:, :, None], (64, 128))
        # Both are exact in bf16, which the interpreter does not multiply, and whose subnormals it does not convert.
        if INTERPRETED:
            value = fp32_bits(value).to(tl.float32, bitcast=True)
        else:
            w = w.to(tl.bfloat16)
        total += tl.dot(w, tl.trans(value))
    return total
