"""Many rows sorted by expert times a stack of tiled MXFP4 weights: decoding and tensor cores at the same time.

The kernel is that of `tiled_specialized`. Its copies take neighbouring rows, so a step brings the folded rows into
sorted order, where they are not; a token that goes to several experts is still folded once. What is whose is found on
the device: a kernel makes a table of the tiles that the groups need, and a program for each multiprocessor works
through them. All weight tiles of a group come one after the other, for up to 16 row tiles each, so that one copy of a
weight serves its group from the L2 cache.

Rows beyond the last group, and those that did not fold, are written by a launch of their own afterwards.

Shape suffixes: T input rows, S sorted places, E matrices, N weight rows, K columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxquant.kernels.mxfp4_sm90.activation_fp8 import fold_input
from mxquant.kernels.mxfp4_sm90.exact_fallback import (
    EXACT_WARPS,
    LOOKED_AT,
    exact_grid,
    next_unfit,
    store_exact,
    unfit_count,
)
from mxquant.kernels.mxfp4_sm90.gluon_kernel import product_kernel
from mxquant.kernels.mxfp4_sm90.grouped_gemm import find_group
from mxquant.kernels.mxfp4_sm90.persistent_gemm import constants, descriptors
from mxquant.kernels.mxfp4_sm90.tile_scheduler import TILES
from mxquant.kernels.primitives.pdl import gdc_launch_dependents, gdc_wait
from mxquant.kernels.runtime.launch import cached_launch, cdiv, multiprocessors, next_power_of_2
from mxquant.reference.gated_activation import GatedActivation

# Rows a group on average from which this is faster than `tiled_grouped` on an H200: by a fifth at 16, at 4 not yet.
_LEAST = 8
# Columns that the kernel takes multiples of: of what remains after 256, whole pairs of blocks.
_COLUMNS = 64


def takes(places: int, experts: int, n: int, k: int, device: torch.device) -> bool:
    """Whether `multiply_many_groups` takes K columns, has work for most of the device, and is the faster way."""
    tiles = experts * cdiv(n, 64 * TILES.value)
    return k % _COLUMNS == 0 and places >= _LEAST * experts and 4 * tiles >= 3 * multiprocessors(device)


def multiply_many_groups(
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
    """As `tiled_grouped.multiply_groups`, for K a multiple of 64."""
    experts, device = offsets_E.shape[0], x_TK.device
    values, x_scale, x_TK = fold_input(x_TK, scale_mode, permute=True, rotated=rotated, gate=gate)
    k = x_TK.shape[1]
    s = x_TK.shape[0] if rows_S is None else rows_S.shape[0]
    rows = _rows_of(cdiv(s, min(s, experts)), fp16=scale_mode is None)
    table = table_of_tiles(offsets_E, s, rows)
    if rows_S is not None:
        values, x_scale = gather(values, x_scale, rows_S)
    y = torch.empty(s, n, dtype=dtype, device=device)
    bias = y if bias_EN is None else bias_EN
    pieces = (table.shape[0] - 1) * cdiv(n, 64 * TILES.value)
    product_kernel[(min(multiprocessors(device), pieces),)](
        *descriptors(words, values, rows), bytes_, x_scale, bias, y, x_scale, table, s, n, k, pieces, 1,
        **constants(values, k, rows, bias_EN, grouped=True),
    )  # fmt: skip
    settle(y, x_TK, words, bytes_, bias_EN, offsets_E, rows_S, x_scale, scale_mode)
    return y


def _rows_of(mean: int, *, fp16: bool) -> int:
    """Rows of a tile of the result, for groups of so many on average: the fastest on an H200."""
    few, some = (20, 48) if fp16 else (24, 160)
    return 32 if mean <= few else 64 if mean <= some else 128


def table_of_tiles(offsets_E: Tensor, places: int, rows: int) -> Tensor:
    """The row tiles that groups need, made on the device.

    Args:
        offsets_E: int32, where each group ends.
        rows: rows of a tile.

    Returns:
        int32 [1 + as many as any groups could need, 4]: first how many there are; then of each its matrix, where the
        group begins and ends, and the index of the group's first tile.
    """
    experts = offsets_E.shape[0]
    # Every group has at most one tile that is not full.
    tiles = places // rows + min(places, experts)
    table = torch.empty(1 + tiles, 4, dtype=torch.int32, device=offsets_E.device)
    _table_kernel[(tiles,)](
        offsets_E, table, places, experts, GROUPS=next_power_of_2(experts + 1), BM=rows, launch_pdl=True
    )
    return table


@cached_launch
@triton.jit
def _table_kernel(
    offsets: tl.tensor, table: tl.tensor, S: tl.tensor, E: tl.tensor, GROUPS: tl.constexpr, BM: tl.constexpr
) -> None:
    """A program a tile; each that is no group's may be the first such, which knows how many the others are."""
    gdc_launch_dependents()
    tile = tl.program_id(0)
    group, first, start, end, used = find_group(offsets, tile, S, E, GROUPS, BM)
    if tile == 0:
        tl.store(table, used)
    if group < E:
        entry = table + 4 * (1 + tile)
        tl.store(entry, group)
        tl.store(entry + 1, start)
        tl.store(entry + 2, end)
        tl.store(entry + 3, tile - (first - start) // BM)
    gdc_wait()  # the next launch awaits this one, and what it reads is of the one before


def gather(values: Tensor, row_scale: Tensor, rows_S: Tensor) -> tuple[Tensor, Tensor]:
    """Folded rows and their scales, of the rows `rows_S`."""
    s, width = rows_S.shape[0], values.shape[1]
    sorted_values = values.new_empty(s, width)
    sorted_scale = row_scale.new_empty(s + 127, 1)[:s]  # with room, as `folding` leaves it
    words = width * values.element_size() // 4
    _gather_kernel[(s,)](
        values.view(torch.int32), row_scale, rows_S, sorted_values.view(torch.int32), sorted_scale, words,
        BLOCK=next_power_of_2(words), launch_pdl=True,
    )  # fmt: skip
    return sorted_values, sorted_scale


@cached_launch
@triton.jit
def _gather_kernel(
    values: tl.tensor,
    row_scale: tl.tensor,
    rows: tl.tensor,
    sorted_values: tl.tensor,
    sorted_scale: tl.tensor,
    words: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64)
    gdc_launch_dependents()
    row = tl.load(rows + place)
    word = tl.arange(0, BLOCK)
    gdc_wait()  # for the folded activations
    copied = tl.load(values + row * words + word, mask=word < words)
    tl.store(sorted_values + place * words + word, copied, mask=word < words)
    tl.store(sorted_scale + place, tl.load(row_scale + row))


def settle(
    y_SN: Tensor,
    x_TK: Tensor,
    words: Tensor,
    bytes_: Tensor,
    bias_EN: Tensor | None,
    offsets_E: Tensor,
    rows_S: Tensor | None,
    x_scale_S1: Tensor,
    scale_mode: str | None,
) -> None:
    """Write what the product has not: zeros beyond the last group, and the exact products of rows that did not fold.

    Args:
        y_SN: the product so far; x_TK: its input before quantization; x_scale_S1: the scale of the row at each place.
    """
    (s, n), k, experts = y_SN.shape, x_TK.shape[1], offsets_E.shape[0]
    bias, rows = y_SN if bias_EN is None else bias_EN, offsets_E if rows_S is None else rows_S
    _settle_kernel[exact_grid(s, n, y_SN.device)](
        y_SN, x_TK, words, bytes_, bias, x_scale_S1, offsets_E, rows, s, n, k, x_TK.stride(0), experts,
        GROUPS=next_power_of_2(experts), MODE=scale_mode, GATHER=rows_S is not None, HAS_BIAS=bias_EN is not None,
        num_warps=EXACT_WARPS, launch_pdl=True,
    )  # fmt: skip


@cached_launch
@triton.jit
def _settle_kernel(
    y: tl.tensor,
    x: tl.tensor,
    words: tl.tensor,
    scale_bytes: tl.tensor,
    bias: tl.tensor,
    x_scale: tl.tensor,
    offsets: tl.tensor,
    rows: tl.tensor,
    S: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    x_stride: tl.tensor,
    E: tl.tensor,
    GROUPS: tl.constexpr,
    MODE: tl.constexpr,
    GATHER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> None:
    """Some places, and each 64 columns that lie a grid apart; a program that finds nothing to do returns at once."""
    start = tl.program_id(1) * LOOKED_AT
    places = start + tl.arange(0, LOOKED_AT)
    stop = tl.minimum(start + LOOKED_AT, S)
    total = tl.load(offsets + E - 1)
    group = tl.arange(0, GROUPS)
    gdc_wait()
    factor = tl.load(x_scale + places, mask=places < tl.minimum(stop, total), other=0.0)
    for first in range(tl.maximum(start, total // 32 * 32), stop, 32):
        m = first + tl.arange(0, 32)
        for tile in range(tl.program_id(0), N // 64, tl.num_programs(0)):
            at = m[None, :].to(tl.int64) * N + tile * 64 + tl.arange(0, 64)[:, None]
            tl.store(y + at, tl.zeros((64, 32), y.dtype.element_ty), mask=((m >= total) & (m < stop))[None, :])
    last = start - 1
    for _ in range(0, unfit_count(factor), 32):
        m, unfit = next_unfit(factor, places, last)
        last = tl.max(m, 0)
        row = tl.load(rows + m).to(tl.int64) if GATHER else m.to(tl.int64)
        end = tl.load(offsets + group, mask=group < E, other=S)
        matrix = tl.sum((end[None, :] <= m[:, None]).to(tl.int32), 1)
        for expert in range(tl.min(matrix, 0), tl.max(matrix, 0) + 1):
            inside = unfit & (matrix == expert)
            if tl.max(inside.to(tl.int32), 0) != 0:
                for tile in range(tl.program_id(0), N // 64, tl.num_programs(0)):
                    n = (tile * 64 + tl.arange(0, 64)).to(tl.int64)
                    store_exact(y, x, words, scale_bytes, bias, n + expert * N, n, row, m, inside, N, K, x_stride, MODE,
                                HAS_BIAS)  # fmt: skip
