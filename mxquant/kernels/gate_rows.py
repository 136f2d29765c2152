"""The gate functions between the two matmuls of an expert, in one pass instead of one a torch operator; and their
arithmetic, for kernels that go on with what they give.

Twin: `KnownGate` of `mxquant.kernels.gate`. Each step is rounded to the dtype of the input, as torch's operators do, so
that both are equal but for the last bits of the exponential.

Shape suffixes: S places, F width inside an expert.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxquant.kernels.block_in_thread import four_pairs
from mxquant.kernels.gate import KnownGate
from mxquant.kernels.launch import cached_launch, cdiv
from mxquant.kernels.triton_numerics import from_fp32


def gate(both_S2F: Tensor, known: KnownGate) -> Tensor:
    """`known` of gates and ups.

    Args:
        both_S2F: contiguous, half precision or fp32.

    Returns:
        [S, F] in its dtype.
    """
    places, width = both_S2F.shape[0], both_S2F.shape[1] // 2
    out = torch.empty(places, width, dtype=both_S2F.dtype, device=both_S2F.device)
    with torch.cuda.device_of(both_S2F):
        _gate_kernel[(places, cdiv(width, 1024))](both_S2F, out, width, GATE=known, BLOCK=1024)
    return out


@cached_launch
@triton.jit
def _gate_kernel(both: tl.tensor, out: tl.tensor, F: tl.tensor, GATE: tl.constexpr, BLOCK: tl.constexpr) -> None:
    place = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    gated = load_gated(both + place * 2 * F, start, F, GATE, BLOCK)
    column = start + tl.arange(0, BLOCK)
    tl.store(out + place * F + column, gated, mask=column < F)


@triton.jit
def load_gated(row: tl.tensor, start: tl.tensor, F: tl.tensor, GATE: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """Columns [BLOCK], from `start` on, of the gated row of F whose gates and ups begin at `row`; beyond F, zeros."""
    if GATE.interleaved:
        pair = 2 * start + tl.arange(0, 2 * BLOCK)
        both = tl.load(row + pair, mask=pair < 2 * F, other=0.0)
        gates, up = tl.split(tl.reshape(both, (BLOCK, 2)))
    else:
        column = start + tl.arange(0, BLOCK)
        gates = tl.load(row + column, mask=column < F, other=0.0)
        up = tl.load(row + F + column, mask=column < F, other=0.0)
    return _gated(gates, up, GATE)


@triton.jit
def load_gated_pairs(row: tl.tensor, block: tl.tensor, F: tl.tensor, GATE: tl.constexpr) -> tl.tuple:
    """As `load_pairs`: blocks [BLOCKS] of 32 columns of gated rows, whose gates and ups begin at `row` [BLOCKS].

    Eight gates and ups at a time, which is 16 bytes of each: what one thread loads at once.
    """
    eight = tl.arange(0, 8)[None, :]
    words: tl.tuple = ()
    for i in tl.static_range(0, 32, 8):
        if GATE.interleaved:
            at = (row + block * 64)[:, None] + (2 * i + eight)
            both = tl.permute(tl.join(tl.load(at), tl.load(at + 8)), (0, 2, 1))
            gates, up = tl.split(tl.reshape(both, (row.shape[0], 8, 2)))
        else:
            at = (row + block * 32)[:, None] + (i + eight)
            gates, up = tl.load(at), tl.load(at + F)
        words = words + four_pairs(_gated(gates, up, GATE))
    return words


@triton.jit
def _gated(gates: tl.tensor, up: tl.tensor, GATE: tl.constexpr) -> tl.tensor:
    dtype = gates.dtype
    gates, up = gates.to(tl.float32), up.to(tl.float32)
    if GATE.limit is None:
        gated = _rounded(gates / (1 + tl.exp(-gates)), dtype) * up
    else:
        # Comparisons, which let NaN through as torch's clamp does.
        gates = tl.where(gates > GATE.limit, GATE.limit, gates)
        up = tl.where(up > GATE.limit, GATE.limit, tl.where(up < -GATE.limit, -GATE.limit, up))
        sigmoid = _rounded(1 / (1 + tl.exp(-_rounded(gates * GATE.alpha, dtype))), dtype)
        gated = _rounded(up + 1, dtype) * _rounded(gates * sigmoid, dtype)
    return from_fp32(gated, dtype)


@triton.jit
def _rounded(value: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    return from_fp32(value, dtype).to(tl.float32)
