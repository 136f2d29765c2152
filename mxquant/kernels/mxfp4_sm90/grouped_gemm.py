"""Rows sorted by expert times a stack of packed MXFP4 weights, each group with its own matrix: a grouped split-K GEMM.

No program's work is decided on the host. As many programs are launched as any grouping could need. Each finds its group
from the offsets, and those without one return at once. Rows are gathered as they are loaded, so that a token of several
experts goes through the prologue once.

Shape suffixes: T input rows, S sorted rows, E experts, N weight rows, K columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxquant.kernels.mxfp4_sm90.exact_fallback import any_out_of_range, exact_tile
from mxquant.kernels.mxfp4_sm90.load import PackedWeight, load_max_exponent, row_scale_of
from mxquant.kernels.mxfp4_sm90.mainloop import TOP_EXPONENT, Split, mainloop, split_range
from mxquant.kernels.mxfp4_sm90.split_k_gemm import plan_gemm, store_output
from mxquant.kernels.primitives.pdl import gdc_launch_dependents, gdc_wait
from mxquant.kernels.runtime.launch import cached_launch
from mxquant.kernels.runtime.plan import kind
from mxquant.reference.rescale import Prologue


def grouped_gemm(
    x_TK: Tensor,
    w_packed: Tensor,
    w_scale: Tensor,
    bias_EN: Tensor | None,
    offsets_E: Tensor,
    rows_S: Tensor | None,
    n: int,
    prologue: Prologue,
    dtype: torch.dtype,
) -> Tensor:
    """The products [S, N] in `dtype`; zero beyond the last group. Arguments as of `split_k_gemm`, for a stack of E
    matrices, but:

    Args:
        x_TK: bf16 [T, 2K] with a gate.
        offsets_E: int32, where each group ends.
        rows_S: int64, the input row of each sorted row, one or more; None: the input is sorted.
    """
    (t, width), (x_stride, _) = x_TK.shape, x_TK.stride()
    k = width if prologue.gate is None else width // 2
    s = t if rows_S is None else rows_S.shape[0]
    sizes = (t, n, k, x_stride, s, offsets_E.shape[0])
    kinds = (x_TK.dtype, kind(offsets_E), kind(rows_S), kind(bias_EN))
    tensors = (x_TK, w_packed, w_scale, offsets_E, rows_S, bias_EN)
    plan = plan_gemm(mxquant_mxfp4_grouped_gemm, sizes, kinds, prologue, dtype, x_TK.device)
    return plan(*(tensor for tensor in tensors if tensor is not None))


@triton.jit
def find_group(
    offsets: tl.tensor, row_tile: tl.tensor, S: tl.tensor, E: tl.tensor, GROUPS: tl.constexpr, BM: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """The group of a row tile, where row tiles are numbered group by group.

    Returns:
        the group: E for the rows beyond the last group, more for a tile past the end; where the tile's rows begin;
        where the group begins and ends; how many row tiles all groups have.
    """
    group = tl.arange(0, GROUPS)
    end = tl.minimum(tl.load(offsets + group, mask=group < E, other=S), S)
    start = tl.where(group == 0, 0, tl.load(offsets + group - 1, mask=(group > 0) & (group <= E), other=S))
    tiles = (tl.maximum(end - start, 0) + BM - 1) // BM
    ends = tl.cumsum(tiles, 0)
    found = tl.sum((ends <= row_tile).to(tl.int32), 0)
    is_it = group == found
    start_of = tl.sum(tl.where(is_it, start, 0), 0)
    first = start_of + tl.sum(tl.where(is_it, row_tile - ends + tiles, 0), 0) * BM
    used = tl.sum(tl.where(group < E, tiles, 0), 0)
    return found, first, start_of, tl.sum(tl.where(is_it, end, 0), 0), used


@cached_launch
@triton.jit
def mxquant_mxfp4_grouped_gemm(
    w_packed: tl.tensor,
    w_scale: tl.tensor,
    x: tl.tensor,
    x_scale: tl.tensor,
    x_pre_quant: tl.tensor,
    offsets: tl.tensor,
    rows: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    S: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    x_stride: tl.tensor,
    E: tl.tensor,
    GROUPS: tl.constexpr,
    BM: tl.constexpr,
    K_TAIL: tl.constexpr,
    TILES: tl.constexpr,
    BK: tl.constexpr,
    PROMOTE: tl.constexpr,
    GATHER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    MODE: tl.constexpr,
) -> None:
    BN: tl.constexpr = 64 * TILES
    weight = PackedWeight(w_packed, w_scale, K)
    split = Split(tl.program_id(1), tl.num_programs(1))
    expert, first, _start, end, _used = find_group(offsets, tl.program_id(2), S, E, GROUPS, BM)
    m = first + tl.arange(0, BM)
    inside = m < end
    gdc_launch_dependents()
    gdc_wait()  # for the prologue
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    y_at = y + split.split_id.to(tl.int64) * S * N + m[None, :].to(tl.int64) * N + n[:, None]
    if expert < E:
        tile = expert.to(tl.int64) * (N // 64) + tl.program_id(0) * TILES
        row = tl.load(rows + m, mask=inside, other=0).to(tl.int64) if GATHER else m.to(tl.int64)
        x_row = x + row * ((K + 127) // 128 * 128)
        total = mainloop(weight, x_row, inside, tile, split, K_TAIL, TILES, BK, PROMOTE)
        w_row = tile * 64 + tl.arange(0, BN)
        total *= row_scale_of(load_max_exponent(w_scale, w_row, K), TOP_EXPONENT)[:, None]
        x_row_scale = tl.load(x_scale + row, mask=inside, other=0.0)
        total *= x_row_scale[None, :]
        store_output(y_at, total, bias + w_row, inside & (x_row_scale == x_row_scale), split, HAS_BIAS)
        if any_out_of_range(x_row_scale):
            first_step, steps = split_range(split, K)
            end_block = tl.where(split.split_id == split.num_splits - 1, K // 32, (first_step + steps) * 8)
            out_of_range = x_row_scale != x_row_scale
            total = exact_tile(x_pre_quant, x_stride, weight, w_row, row, out_of_range, first_step * 8, end_block, MODE)
            store_output(y_at, total, bias + w_row, out_of_range, split, HAS_BIAS)
    elif expert == E:
        tl.store(y_at, tl.zeros((BN, BM), y.dtype.element_ty), mask=inside[None, :])
