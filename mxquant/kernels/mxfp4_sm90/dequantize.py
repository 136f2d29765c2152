"""Tiled MXFP4 weights expanded to a workspace, for an ordinary matmul with many rows, and what must follow it.

- `expand_e4m3`: for `torch._scaled_mm`, with MXFP4 activations folded into E5M2. `repair` follows: rows of activations
  that E5M2 could not hold are recomputed block by block, with exact sums.
- `expand_bfloat16`: the dequantized weight, for activations that are not quantized.

Shape suffixes: M input rows, N weight rows, K columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxquant.kernels.mxfp4_sm90.activation_fp8 import row_factor
from mxquant.kernels.mxfp4_sm90.exact_fallback import (
    EXACT_WARPS,
    LOOKED_AT,
    exact_grid,
    next_unfit,
    store_exact,
    unfit_count,
)
from mxquant.kernels.mxfp4_sm90.load import chunk_codes, highest_exponent
from mxquant.kernels.primitives.numerics import e8m0_to_float, power_of_two
from mxquant.kernels.primitives.pdl import gdc_wait
from mxquant.kernels.runtime.launch import cached_launch, cdiv

# What the row's largest block exponent becomes in E4M3: 6 x 2^6 <= 448.
_TOP = 6


def expand_e4m3(words: Tensor, bytes_: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Tiles of K columns as float8_e4m3fn [N, K], columns in order, and fp32 row scales [N, 1]."""
    n = words.shape[0] * 64
    values = torch.empty(n, k, dtype=torch.float8_e4m3fn, device=words.device)
    row_scale = torch.empty(n, 1, dtype=torch.float32, device=words.device)
    _expand_kernel[(n // 64, cdiv(k, 128))](words, bytes_, values, row_scale, k, TOP=_TOP)
    return values, row_scale


def expand_bfloat16(words: Tensor, bytes_: Tensor, k: int) -> Tensor:
    """The values of tiles of K columns, bf16 [N, K], columns in order."""
    n = words.shape[0] * 64
    values = torch.empty(n, k, dtype=torch.bfloat16, device=words.device)
    _expand_kernel[(n // 64, cdiv(k, 128))](words, bytes_, values, values, k, TOP=None)
    return values


@cached_launch
@triton.jit
def _expand_kernel(
    words: tl.tensor,
    scale_bytes: tl.tensor,
    values: tl.tensor,
    row_scale: tl.tensor,
    K: tl.tensor,
    TOP: tl.constexpr,
) -> None:
    """64 rows, 128 columns: 16 words of each row, four a block. TOP: of the row's largest exponent; None: absolute."""
    n = tl.program_id(0).to(tl.int64) * 64 + tl.arange(0, 64)
    codes, relative = chunk_codes(words, scale_bytes, n, tl.program_id(1), K)
    highest = highest_exponent(scale_bytes, n, K)
    if TOP is None:
        factor = e8m0_to_float(tl.maximum(relative + highest[:, None], 0))
    else:
        factor = power_of_two(relative + TOP)
        if tl.program_id(1) == 0:
            tl.store(row_scale + n, row_factor(highest, TOP))
    out = tl.reshape((codes * factor[:, :, None]).to(values.dtype.element_ty), (64, 128))
    column = tl.program_id(1) * 128 + tl.arange(0, 128)
    tl.store(values + n[:, None] * K + column[None, :], out, mask=(column < K)[None, :])


def repair(
    y_MN: Tensor,
    x_MK: Tensor,
    words: Tensor,
    bytes_: Tensor,
    bias_N: Tensor | None,
    x_scale_M1: Tensor,
    scale_mode: str | None,
) -> None:
    """Overwrite the rows of `y_MN` whose activations did not fold with their exact product.

    One launch, and no synchronization: a program whose rows all folded returns at once.

    Args:
        y_MN: the product so far; x_MK: its input before quantization; x_scale_M1: its scales, of `fold_input`.
    """
    (m, n), k = y_MN.shape, x_MK.shape[1]
    _repair_kernel[exact_grid(m, n, y_MN.device)](
        y_MN, x_MK, words, bytes_, y_MN if bias_N is None else bias_N, x_scale_M1, m, n, k,
        x_MK.stride(0), MODE=scale_mode, HAS_BIAS=bias_N is not None, num_warps=EXACT_WARPS, launch_pdl=True,
    )  # fmt: skip


@cached_launch
@triton.jit
def _repair_kernel(
    y: tl.tensor,
    x: tl.tensor,
    words: tl.tensor,
    scale_bytes: tl.tensor,
    bias: tl.tensor,
    x_scale: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    x_stride: tl.tensor,
    MODE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> None:
    start = tl.program_id(1) * LOOKED_AT
    rows = start + tl.arange(0, LOOKED_AT)
    gdc_wait()
    factor = tl.load(x_scale + rows, mask=rows < M, other=0.0)
    last = start - 1
    # The other rows are right, and may be in `x` no more.
    for _ in range(0, unfit_count(factor), 32):
        m, inside = next_unfit(factor, rows, last)
        last = tl.max(m, 0)
        for tile in range(tl.program_id(0), N // 64, tl.num_programs(0)):
            n = (tile * 64 + tl.arange(0, 64)).to(tl.int64)
            store_exact(y, x, words, scale_bytes, bias, n, n, m, m, inside, N, K, x_stride, MODE, HAS_BIAS)
