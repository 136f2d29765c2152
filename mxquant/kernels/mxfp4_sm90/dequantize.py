"""The packed weight dequantized to a workspace, for an ordinary matmul with many rows.

`dequantize_to_e4m3` is for `torch._scaled_mm` with activations rescaled to E5M2; `dequantize_to_bf16` for activations
that are not quantized.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxquant.kernels.mxfp4_sm90.load import PackedWeight, load_chunk, load_max_exponent, row_scale_of
from mxquant.kernels.primitives.numerics import e8m0_to_float, power_of_two
from mxquant.kernels.runtime.launch import cached_launch, cdiv

# What the row's largest block exponent becomes in E4M3: 6 x 2^6 <= 448.
_E4M3_TOP = 6


def dequantize_to_e4m3(w_packed: Tensor, w_scale: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """float8_e4m3fn values [N, K] and fp32 row scales [N, 1] of a packed weight of `k` columns. Exact."""
    n = w_packed.shape[0] * 64
    values = torch.empty(n, k, dtype=torch.float8_e4m3fn, device=w_packed.device)
    row_scale = torch.empty(n, 1, dtype=torch.float32, device=w_packed.device)
    mxquant_mxfp4_dequantize[(n // 64, cdiv(k, 128))](w_packed, w_scale, values, row_scale, k, TOP=_E4M3_TOP)
    return values, row_scale


def dequantize_to_bf16(w_packed: Tensor, w_scale: Tensor, k: int) -> Tensor:
    """bf16 values [N, K] of a packed weight of `k` columns."""
    n = w_packed.shape[0] * 64
    values = torch.empty(n, k, dtype=torch.bfloat16, device=w_packed.device)
    mxquant_mxfp4_dequantize[(n // 64, cdiv(k, 128))](w_packed, w_scale, values, values, k, TOP=None)
    return values


@cached_launch
@triton.jit
def mxquant_mxfp4_dequantize(
    w_packed: tl.tensor,
    w_scale: tl.tensor,
    values: tl.tensor,
    row_scale: tl.tensor,
    K: tl.tensor,
    TOP: tl.constexpr,
) -> None:
    """64 rows and 128 columns: 16 words of each row, four a block.

    Args:
        TOP: what the row's largest exponent becomes; None: exponents are kept, and there are no row scales.
    """
    n = tl.program_id(0).to(tl.int64) * 64 + tl.arange(0, 64)
    codes, relative = load_chunk(PackedWeight(w_packed, w_scale, K), n, tl.program_id(1))
    max_exponent = load_max_exponent(w_scale, n, K)
    if TOP is None:
        factor = e8m0_to_float(tl.maximum(relative + max_exponent[:, None], 0))
    else:
        factor = power_of_two(relative + TOP)
        if tl.program_id(1) == 0:
            tl.store(row_scale + n, row_scale_of(max_exponent, TOP))
    out = tl.reshape((codes * factor[:, :, None]).to(values.dtype.element_ty), (64, 128))
    column = tl.program_id(1) * 128 + tl.arange(0, 128)
    tl.store(values + n[:, None] * K + column[None, :], out, mask=(column < K)[None, :])
