"""Rows sorted by expert times a stack of tiled MXFP4 weights, each group with its own matrix (`tiled_decode`).

No program's work is decided on the host: as many programs are launched as any grouping could need, each finds its
group from the offsets, and the rest return at once. Rows are gathered as they are loaded, so that a token that goes to
several experts is folded once.

Shape suffixes: T input rows, S sorted places, E matrices, N weight rows, K columns.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxquant.kernels.mxfp4_sm90.activation_fp8 import any_unfit, folding, row_factor
from mxquant.kernels.mxfp4_sm90.load import exact_tile, highest_exponent, store_tile
from mxquant.kernels.mxfp4_sm90.mainloop import TOP, columns_of, tile_product
from mxquant.kernels.mxfp4_sm90.split_k_gemm import adding, arrange, shape_for
from mxquant.kernels.primitives.pdl import gdc_launch_dependents, gdc_wait
from mxquant.kernels.runtime.launch import cached_launch, cdiv, next_power_of_2
from mxquant.kernels.runtime.plan import Buffer, Kind, Plan, Step, kind
from mxquant.reference.gated_activation import GatedActivation


def multiply_groups(
    x_TK: Tensor,
    words: Tensor,
    bytes_: Tensor,
    bias_EN: Tensor | None,
    offsets_E: Tensor,
    rows_S: Tensor | None,
    n: int,
    scale_mode: str | None,
    dtype: torch.dtype,
    *,
    gate: GatedActivation | None = None,
    rotated: bool = False,
) -> Tensor:
    """The products [S, N] in `dtype`; zero beyond the last group.

    Args:
        x_TK: bf16 (or fp16 where it is quantized), last axis contiguous; bf16 [T, 2K] with a gate.
        words, bytes_: of `pack_tiles`, of a stack of E matrices.
        bias_EN: any float dtype, or None.
        offsets_E: int32, where each group ends.
        rows_S: int64, the row of `x_TK` at each place, one or more; None: places are rows.
        scale_mode: of MXFP4 activations; None: they are not quantized.
        gate: what `x_TK` goes through first.
        rotated: rotate bf16 activations before they are quantized.
    """
    gathered = None if rows_S is None else rows_S.shape[0]
    kinds = x_TK.dtype, kind(offsets_E), kind(rows_S), kind(bias_EN)
    (t, width), (x_stride, _) = x_TK.shape, x_TK.stride()
    k = width if gate is None else width // 2
    plan = _plan(t, k, n, offsets_E.shape[0], x_stride, gathered, *kinds, scale_mode, gate, rotated, dtype, x_TK.device)
    given = (x_TK, words, bytes_, offsets_E, rows_S, bias_EN)
    return plan(*(tensor for tensor in given if tensor is not None))


@functools.lru_cache(maxsize=4096)
def _plan(
    t: int,
    k: int,
    n: int,
    experts: int,
    x_stride: int,
    gathered: int | None,
    x_dtype: torch.dtype,  # as the kinds, also what kernels are compiled for
    offsets: Kind | None,
    rows: Kind | None,
    bias: Kind | None,
    scale_mode: str | None,
    gate: GatedActivation | None,
    rotated: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> Plan:
    s = t if gathered is None else gathered
    shape = shape_for(cdiv(s, min(s, experts)), scale_mode is not None)
    # Every group has at most one tile of rows that is not full; the rows beyond the last one are a group as well.
    row_tiles = s // shape.rows_M + min(s, experts + 1)
    tiles, split = arrange(n, k, row_tiles, shape)
    between, fold = folding(t, k, x_stride, scale_mode, gate=gate, rotated=rotated)
    x, stride = ("before", k) if "before" in between else ("x", x_stride)
    sums, add = adding(split, s, n)
    has_rows, has_bias = rows is not None, bias is not None
    multiply = Step(
        _multiply_groups_kernel,
        (n // (64 * tiles), split, row_tiles),
        ("words", "bytes", "values", "row_scale", x, "offsets", "rows" if has_rows else "offsets",
         "bias" if has_bias else "y", "partial" if add else "y", s, n, k, stride, experts),
        {"GROUPS": next_power_of_2(experts + 1), "BM": shape.rows_M, "TILES": tiles, "REST": k // 32 % 8,
         "BK": shape.columns_K, "PROMOTE": shape.promote, "GATHER": has_rows,
         "HAS_BIAS": has_bias, "MODE": scale_mode, "num_warps": 4, "num_stages": 3,
         "maxnreg": 128 if shape.rows_M == 16 else None, "launch_pdl": True},
    )  # fmt: skip
    given = "x", "words", "bytes", "offsets", *(("rows",) if has_rows else ()), *(("bias",) if has_bias else ())
    return Plan(given, ("y", Buffer((s, n), dtype)), between | sums, [fold, multiply, *add], device)


@triton.jit
def find_group(
    offsets: tl.tensor, slot: tl.tensor, S: tl.tensor, E: tl.tensor, GROUPS: tl.constexpr, BM: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """The group of a slot, E for the rows beyond the last; where its rows of the slot, its own, and the next one's
    begin; and how many slots the groups have. All past the end: group > E."""
    group = tl.arange(0, GROUPS)
    end = tl.minimum(tl.load(offsets + group, mask=group < E, other=S), S)
    start = tl.where(group == 0, 0, tl.load(offsets + group - 1, mask=(group > 0) & (group <= E), other=S))
    slots = (tl.maximum(end - start, 0) + BM - 1) // BM
    ends = tl.cumsum(slots, 0)
    found = tl.sum((ends <= slot).to(tl.int32), 0)
    is_it = group == found
    start_of = tl.sum(tl.where(is_it, start, 0), 0)
    first = start_of + tl.sum(tl.where(is_it, slot - ends + slots, 0), 0) * BM
    used = tl.sum(tl.where(group < E, slots, 0), 0)
    return found, first, start_of, tl.sum(tl.where(is_it, end, 0), 0), used


@cached_launch
@triton.jit
def _multiply_groups_kernel(
    words: tl.tensor,
    scale_bytes: tl.tensor,
    x: tl.tensor,
    x_scale: tl.tensor,
    x_before: tl.tensor,
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
    REST: tl.constexpr,
    TILES: tl.constexpr,
    BK: tl.constexpr,
    PROMOTE: tl.constexpr,
    GATHER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    MODE: tl.constexpr,
) -> None:
    part, parts = tl.program_id(1), tl.num_programs(1)
    expert, first, _start, end, _used = find_group(offsets, tl.program_id(2), S, E, GROUPS, BM)
    place = first + tl.arange(0, BM)
    inside = place < end
    gdc_launch_dependents()
    gdc_wait()  # for the folded activations
    n = tl.program_id(0) * (64 * TILES) + tl.arange(0, 64 * TILES)
    y_at = y + part.to(tl.int64) * S * N + place[None, :].to(tl.int64) * N + n[:, None]
    if expert < E:
        tile = expert.to(tl.int64) * (N // 64) + tl.program_id(0) * TILES
        row = tl.load(rows + place, mask=inside, other=0).to(tl.int64) if GATHER else place.to(tl.int64)
        x_row = x + row * ((K + 127) // 128 * 128)
        total = tile_product(words, scale_bytes, x_row, inside, tile, part, parts, K, REST, TILES, BK, PROMOTE)
        w_row = tile * 64 + tl.arange(0, 64 * TILES)
        total *= row_factor(highest_exponent(scale_bytes, w_row, K), TOP)[:, None]
        x_factor = tl.load(x_scale + row, mask=inside, other=0.0)
        store_tile(y_at, total * x_factor[None, :], bias + w_row, inside & (x_factor == x_factor), part, HAS_BIAS)
        if any_unfit(x_factor):
            begin, steps = columns_of(part, parts, K)
            last = tl.where(part == parts - 1, K // 32, (begin + steps) * 8)
            unfit = x_factor != x_factor
            total = exact_tile(x_before, words, scale_bytes, w_row, row, unfit, begin * 8, last, K, x_stride, MODE,
                               64 * TILES, BM)  # fmt: skip
            store_tile(y_at, total, bias + w_row, unfit, part, HAS_BIAS)
    elif expert == E:
        tl.store(y_at, tl.zeros((64 * TILES, BM), y.dtype.element_ty), mask=inside[None, :])
