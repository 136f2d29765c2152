"""The gated activation between the two matmuls of an expert: a kernel of one pass, and device functions for prologues.

Twin: `GatedActivation` of `mxquant.reference.gated_activation`. Each step is rounded to the dtype of the input, as
torch's operators do: both are equal but for the last bits of the exponential.

Shape suffixes: S sorted token-expert pairs, F width inside an expert.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxquant.kernels import reject_unlisted
from mxquant.kernels.primitives.bf16x2 import halves, nearest_pair
from mxquant.kernels.primitives.numerics import DTYPES, INTERPRETED, from_fp32
from mxquant.kernels.primitives.thread_block import four_pairs, four_words, joined_words
from mxquant.kernels.runtime.launch import cached_launch, cdiv
from mxquant.reference.gated_activation import GatedActivation

_HAS_PTX = tl.constexpr(not INTERPRETED.value and torch.version.hip is None)
_SIGMOID_PTX = tl.constexpr(
    """{
        .reg .f32 power;
        mul.f32 power, $1, 0fBFB8AA3B;
        ex2.approx.ftz.f32 power, power;
        add.f32 power, power, 0f3F800000;
        rcp.approx.ftz.f32 $0, power;
    }"""
)
# NOTE: two at a time, since a single conversion to bf16 is as slow as an exponential.
_ROUNDED_PTX = tl.constexpr(
    """{
        .reg .b32 both;
        cvt.rn.bf16x2.f32 both, $3, $2;
        shl.b32 $0, both, 16;
        and.b32 $1, both, 0xFFFF0000;
    }"""
)


def reject(gate_up_S2F: Tensor) -> str | None:
    """None if the kernel reads gates and ups of this dtype and layout, else the reason why not."""
    if reason := reject_unlisted("dtype", gate_up_S2F.dtype, DTYPES):
        return reason
    return None if gate_up_S2F.is_contiguous() else "reads contiguous gates and ups only"


def gated_activation(gate_up_S2F: Tensor, gate: GatedActivation) -> Tensor:
    """`gate` of gates and ups.

    Args:
        gate_up_S2F: contiguous, half precision or fp32.

    Returns:
        [S, F] in its dtype.
    """
    pairs, width = gate_up_S2F.shape[0], gate_up_S2F.shape[1] // 2
    out = torch.empty(pairs, width, dtype=gate_up_S2F.dtype, device=gate_up_S2F.device)
    with torch.cuda.device_of(gate_up_S2F):
        mxquant_gated_activation[(pairs, cdiv(width, 1024))](gate_up_S2F, out, width, GATE=gate, BLOCK=1024)
    return out


@cached_launch
@triton.jit
def mxquant_gated_activation(
    both: tl.tensor, out: tl.tensor, F: tl.tensor, GATE: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    pair = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    gated = load_gated(both + pair * 2 * F, start, F, GATE, BLOCK)
    column = start + tl.arange(0, BLOCK)
    tl.store(out + pair * F + column, gated, mask=column < F)


@triton.jit
def load_gated(row: tl.tensor, start: tl.tensor, F: tl.tensor, GATE: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """Columns [BLOCK] from `start` on of a gated row of width F, whose gates and ups begin at `row`; zeros beyond F."""
    if GATE.interleaved:
        pair = 2 * start + tl.arange(0, 2 * BLOCK)
        both = tl.load(row + pair, mask=pair < 2 * F, other=0.0)
        gates, up = tl.split(tl.reshape(both, (BLOCK, 2)))
    else:
        column = start + tl.arange(0, BLOCK)
        gates = tl.load(row + column, mask=column < F, other=0.0)
        up = tl.load(row + F + column, mask=column < F, other=0.0)
    return from_fp32(_gated(gates.to(tl.float32), up.to(tl.float32), gates.dtype, GATE), gates.dtype)


@triton.jit
def load_gated_pairs(row: tl.tensor, block: tl.tensor, F: tl.tensor, GATE: tl.constexpr) -> tl.tuple:
    """As `load_pairs`: blocks [BLOCKS] of 32 columns of gated rows, whose gates and ups begin at `row` [BLOCKS].

    Loads eight gates and eight ups at a time: vectors of 16 bytes.
    """
    eight = tl.arange(0, 8)[None, :]
    words: tl.tuple = ()
    for i in tl.static_range(0, 32, 8):
        if GATE.interleaved:
            at = (row + block * 64)[:, None] + (2 * i + eight)
            gates, up = halves(joined_words(four_pairs(tl.load(at)) + four_pairs(tl.load(at + 8))))
        else:
            at = (row + block * 32)[:, None] + (i + eight)
            gates, up = _eight_bits(tl.load(at)), _eight_bits(tl.load(at + F))
        gated = _gated(gates.to(tl.float32, bitcast=True), up.to(tl.float32, bitcast=True), tl.bfloat16, GATE)
        even, odd = tl.split(tl.reshape(gated, (row.shape[0], 4, 2)))
        words = words + four_words(nearest_pair(even, odd))
    return words


@triton.jit
def _eight_bits(eight: tl.tensor) -> tl.tensor:
    """The fp32 bits of bf16 numbers [BLOCKS, 8]."""
    low, high = halves(joined_words(four_pairs(eight)))
    return tl.reshape(tl.join(low, high), (eight.shape[0], 8))


@triton.jit
def _gated(gates: tl.tensor, up: tl.tensor, dtype: tl.constexpr, GATE: tl.constexpr) -> tl.tensor:
    """The gated activation in fp32; the caller rounds the last product to `dtype`."""
    if GATE.limit is None:
        return _rounded(gates * _sigmoid(gates), dtype) * up
    else:
        # NaN stays NaN, as in torch's clamp.
        gates = tl.minimum(gates, GATE.limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, GATE.limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -GATE.limit, propagate_nan=tl.PropagateNan.ALL)
        sigmoid = _rounded(_sigmoid(_rounded(gates * GATE.alpha, dtype)), dtype)
        return _rounded(up + 1, dtype) * _rounded(gates * sigmoid, dtype)


@triton.jit
def _sigmoid(value: tl.tensor) -> tl.tensor:
    """1 / (1 + exp(-value)); on NVIDIA GPUs, 0 where that is less than 2^-126."""
    if not _HAS_PTX:
        return 1 / (1 + tl.exp(-value))
    else:
        return tl.inline_asm_elementwise(_SIGMOID_PTX, "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _rounded(value: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    if _HAS_PTX and tl.bfloat16 == dtype:
        return tl.inline_asm_elementwise(_ROUNDED_PTX, "=r,=r,r,r", [value], dtype=tl.float32, is_pure=True, pack=2)
    else:
        return from_fp32(value, dtype).to(tl.float32)
