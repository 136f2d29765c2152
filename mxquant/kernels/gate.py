"""The gate functions between the two matmuls of an expert, in one pass instead of one a torch operator.

Twin: `mxquant.modules.gates.KnownGate`. Each step is rounded to the dtype of the input, as torch's operators do, so
that both are equal but for the last bits of the exponential.

Shape suffixes: S places, F width inside an expert.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxquant.kernels.launch import cached_launch, cdiv
from mxquant.kernels.triton_numerics import from_fp32


def gate(both_S2F: Tensor, interleaved: bool, limit: float | None, alpha: float | None) -> Tensor:
    """silu(gate) * up; with `limit` and `alpha` the clamped gate of gpt-oss, (up + 1) * gate * sigmoid(alpha * gate).

    Args:
        both_S2F: contiguous, half precision or fp32; gates then ups, or gate, up, gate, up where `interleaved`.

    Returns:
        [S, F] in its dtype.
    """
    places, width = both_S2F.shape[0], both_S2F.shape[1] // 2
    out = torch.empty(places, width, dtype=both_S2F.dtype, device=both_S2F.device)
    with torch.cuda.device_of(both_S2F):
        _gate_kernel[(places, cdiv(width, 1024))](
            both_S2F, out, width, INTERLEAVED=interleaved, LIMIT=limit, ALPHA=alpha, BLOCK=1024
        )
    return out


@cached_launch
@triton.jit
def _gate_kernel(
    both: tl.tensor,
    out: tl.tensor,
    F: tl.tensor,
    INTERLEAVED: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = both + place * 2 * F
    if INTERLEAVED:
        pair = tl.program_id(1) * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
        values = tl.load(row + pair, mask=pair < 2 * F, other=0.0).to(tl.float32)
        gates, up = tl.split(tl.reshape(values, (BLOCK, 2)))
    else:
        gates = tl.load(row + column, mask=column < F, other=0.0).to(tl.float32)
        up = tl.load(row + F + column, mask=column < F, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    if LIMIT is None:
        gated = _rounded(gates / (1 + tl.exp(-gates)), dtype) * up
    else:
        # Comparisons, which let NaN through as torch's clamp does.
        gates = tl.where(gates > LIMIT, LIMIT, gates)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        sigmoid = _rounded(1 / (1 + tl.exp(-_rounded(gates * ALPHA, dtype))), dtype)
        gated = _rounded(up + 1, dtype) * _rounded(gates * sigmoid, dtype)
    tl.store(out + place * F + column, from_fp32(gated, dtype), mask=column < F)


@triton.jit
def _rounded(value: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    return from_fp32(value, dtype).to(tl.float32)
