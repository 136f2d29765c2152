"""GPTQ's inner loop, the columns of one block rounded in turn, in one launch.

A program holds some rows of the weight, with all columns of the block, in registers. Rows are independent.

Twin: `mxquant.reference.gptq_columns`, equal bit by bit where products and sums are exact. Elsewhere a product and its
sum are rounded once here (fused), and once or twice in torch, by the vector length of the device.

Legend: K columns of the block, N rows of the weight. Tensors are transposed: each row holds a column of the weight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxquant.formats.spec import ElementFormat
from mxquant.kernels import reject_unlisted
from mxquant.kernels.primitives.numerics import element_constants, round_to_element
from mxquant.kernels.runtime.launch import cached_launch, cdiv, next_power_of_2

# Rows of a program of one warp, so that sums over columns need no shared memory; more in the interpreter, where the
# number of operations counts.
_ROWS, _INTERPRETED = 32, 1024

ELEMENTS = ("e2m1", "e2m3", "e3m2", "e4m3", "e5m2")


def reject(element: ElementFormat) -> str | None:
    """None if the kernel rounds to the element format, else the reason why not."""
    return reject_unlisted("element format", element.name, ELEMENTS)


def gptq_columns(w_KN: Tensor, scale_KN: Tensor, factor_KK: Tensor, element: ElementFormat) -> tuple[Tensor, Tensor]:
    """Arguments and results are those of the twin; `w_KN` is only read."""
    k, n = w_KN.shape
    rounded_KN, error_KN = torch.empty_like(w_KN), torch.empty_like(w_KN)
    rows = _ROWS if w_KN.is_cuda else _INTERPRETED
    with torch.cuda.device_of(w_KN):
        mxquant_gptq_columns[(cdiv(n, rows),)](
            w_KN, scale_KN, factor_KK.contiguous(), rounded_KN, error_KN, n, k, *scale_KN.stride(),
            **element_constants(element), COLUMNS=next_power_of_2(k), ROWS=rows,
            num_warps=1,
        )  # fmt: skip
    return rounded_KN, error_KN


@cached_launch
@triton.jit(do_not_specialize=["n", "k"])
def mxquant_gptq_columns(
    w_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    factor_ptr: tl.tensor,
    rounded_ptr: tl.tensor,
    error_ptr: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    scale_stride_k: tl.tensor,
    scale_stride_n: tl.tensor,
    EXPONENT_BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    MAX_CODE: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    row_N = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row_N = row_N < n
    column_K = tl.arange(0, COLUMNS)
    at_KN = column_K[:, None] * n.to(tl.int64) + row_N[None, :]
    w_KN = tl.load(w_ptr + at_KN, mask=(column_K < k)[:, None] & is_row_N[None, :], other=0.0)
    for i in range(k):
        # Select column i by a sum of bits, which is exact: all others are zero.
        w_N = tl.sum(tl.where((column_K == i)[:, None], w_KN.to(tl.int32, bitcast=True), 0), 0)
        w_N = w_N.to(tl.float32, bitcast=True)
        scale_N = tl.load(scale_ptr + i * scale_stride_k + row_N * scale_stride_n, mask=is_row_N, other=1.0)
        rounded_N = round_to_element(tl.div_rn(w_N, scale_N), EXPONENT_BITS, MANTISSA_BITS, MAX_CODE)
        pivot = tl.load(factor_ptr + i * k + i)
        error_N = tl.div_rn(tl.fma(-rounded_N, scale_N, w_N), pivot)
        tl.store(rounded_ptr + i * n.to(tl.int64) + row_N, rounded_N, mask=is_row_N)
        tl.store(error_ptr + i * n.to(tl.int64) + row_N, error_N, mask=is_row_N)
        factor_K = tl.load(factor_ptr + i * k + column_K, mask=(column_K > i) & (column_K < k), other=0.0)
        w_KN = tl.fma(-factor_K[:, None], error_N[None, :], w_KN)
