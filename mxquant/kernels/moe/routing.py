"""Routing of tokens to experts: sort token-expert pairs by expert in one launch, add up their outputs in another.

Twins: `route` and `combine` of `mxquant.reference.routing`.

Shape suffixes: T tokens, K choices a token, S = T K sorted token-expert pairs, E experts, H width of a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxquant.kernels import reject_unlisted
from mxquant.kernels.primitives.numerics import DTYPES, from_fp32
from mxquant.kernels.runtime.launch import cached_launch, cdiv, next_power_of_2
from mxquant.reference.routing import Routing


def route(ids_TK: Tensor, experts: int) -> Routing:
    """`ids_TK` int32 or int64, at least one."""
    ids = ids_TK.contiguous()
    offsets = torch.empty(experts, dtype=torch.int32, device=ids.device)
    # NOTE: not one tensor for both, since the second half would not be aligned for an odd number of pairs.
    order = torch.empty(ids.numel(), dtype=torch.int64, device=ids.device)
    sorted_index = torch.empty_like(order)
    block = max(16, min(1024, next_power_of_2(ids.numel())))
    with torch.cuda.device_of(ids):
        mxquant_route[(experts + 1,)](ids, offsets, order, sorted_index, ids.numel(), experts, BLOCK=block)
    return Routing(offsets, order, sorted_index, ids_TK)


@cached_launch
@triton.jit
def mxquant_route(
    ids: tl.tensor,
    offsets: tl.tensor,
    order: tl.tensor,
    sorted_index: tl.tensor,
    S: tl.tensor,
    E: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One program an expert, and one for the pairs of no expert. Each counts the pairs that sort before its own."""
    expert = tl.program_id(0)
    before = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, S, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        before += (_expert_of(ids, pair, S, E) < expert).to(tl.int32)
    at = tl.sum(before, 0)
    for start in range(0, S, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        mine = (_expert_of(ids, pair, S, E) == expert).to(tl.int32)
        position = (at + tl.cumsum(mine, 0) - 1).to(tl.int64)
        tl.store(order + position, pair.to(tl.int64), mask=mine != 0)
        tl.store(sorted_index + pair, position, mask=mine != 0)
        at += tl.sum(mine, 0)
    if expert < E:
        tl.store(offsets + expert, at)


@triton.jit
def _expert_of(ids: tl.tensor, pair: tl.tensor, S: tl.tensor, E: tl.tensor) -> tl.tensor:
    """E for a pair of no expert here, E + 1 beyond the last pair."""
    value = tl.load(ids + pair, mask=pair < S, other=0)
    local = tl.where((value >= 0) & (value < E), value, E).to(tl.int32)
    return tl.where(pair < S, local, E + 1)


def reject_combine(y_SH: Tensor) -> str | None:
    """None if the kernel adds up outputs of this dtype and layout, else the reason why not."""
    if reason := reject_unlisted("dtype", y_SH.dtype, DTYPES):
        return reason
    return None if y_SH.is_contiguous() and y_SH.numel() else "reads contiguous outputs only, of one pair at least"


def combine(y_SH: Tensor, routing: Routing, weights_TK: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`y_SH` half precision or fp32; `weights_TK` any float dtype, None: 1."""
    ids_TK, experts = routing.ids_TK, routing.offsets_E.shape[0]
    tokens, choices = ids_TK.shape
    width = y_SH.shape[1]
    out = torch.empty(tokens, width, dtype=dtype, device=y_SH.device)
    weights = y_SH if weights_TK is None else weights_TK.contiguous()
    with torch.cuda.device_of(y_SH):
        mxquant_combine[(tokens, cdiv(width, 1024))](
            y_SH, routing.sorted_index_S, ids_TK.contiguous(), weights, out, width, choices, experts,
            WEIGHTED=weights_TK is not None, BLOCK=1024,
        )  # fmt: skip
    return out


@cached_launch
@triton.jit
def mxquant_combine(
    y: tl.tensor,
    sorted_index: tl.tensor,
    ids: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    H: tl.tensor,
    choices: tl.tensor,
    E: tl.tensor,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in range(choices):
        pair = token * choices + choice
        expert = tl.load(ids + pair)
        if (expert >= 0) & (expert < E):
            row = y + tl.load(sorted_index + pair) * H
            value = tl.load(row + column, mask=column < H, other=0.0).to(tl.float32)
            total += value * tl.load(weights + pair).to(tl.float32) if WEIGHTED else value
    tl.store(out + token * H + column, from_fp32(total, out.dtype.element_ty), mask=column < H)
