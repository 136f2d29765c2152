"""Many rows sorted by expert times a stack of packed MXFP4 weights: the persistent kernel on groups (`gluon_kernel`).

TMA copies neighbouring rows, so rescaled rows are first gathered into sorted order where they are not sorted. A token
of several experts still goes through the prologue once. The host does not know the groups: one kernel makes a table of
the row tiles that they need, and a program for each multiprocessor works through them. All weight tiles of a group
follow one another, for up to 16 row tiles each, so that one copy of a weight serves its group from the L2 cache.

A fixup launch writes the rows beyond the last group, and those out of range.

Shape suffixes: T input rows, S sorted rows, E experts, N weight rows, K columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxquant.kernels.mxfp4_sm90.activation import rescale_activation
from mxquant.kernels.mxfp4_sm90.exact_fallback import grouped_fixup
from mxquant.kernels.mxfp4_sm90.gluon_kernel import mxquant_mxfp4_persistent_gemm
from mxquant.kernels.mxfp4_sm90.grouped_gemm import find_group
from mxquant.kernels.mxfp4_sm90.persistent_gemm import kernel_constants, tma_descriptors
from mxquant.kernels.mxfp4_sm90.tile_scheduler import TILES
from mxquant.kernels.primitives.pdl import gdc_launch_dependents, gdc_wait
from mxquant.kernels.runtime.launch import cached_launch, cdiv, multiprocessors, next_power_of_2
from mxquant.reference.rescale import Prologue

# Average rows a group from which this is faster than `grouped_gemm` on an H200: by a fifth at 16, at 4 not yet.
_MIN_ROWS_PER_GROUP = 8


def is_faster(sorted_rows: int, experts: int, n: int, k: int, device: torch.device) -> bool:
    """Whether `persistent_grouped_gemm` takes K columns, has work for most of the device, and is the faster kernel."""
    tiles = experts * cdiv(n, 64 * TILES.value)
    enough_rows = sorted_rows >= _MIN_ROWS_PER_GROUP * experts
    # NOTE: the kernel takes whole pairs of blocks beyond the last 256 columns.
    return k % 64 == 0 and enough_rows and 4 * tiles >= 3 * multiprocessors(device)


def persistent_grouped_gemm(
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
    """As `grouped_gemm`, for K a multiple of 64."""
    experts, device = offsets_E.shape[0], x_TK.device
    values, x_scale, x_TK = rescale_activation(x_TK, prologue, permute=True)
    k = x_TK.shape[1]
    s = x_TK.shape[0] if rows_S is None else rows_S.shape[0]
    block_m = _group_block_m(cdiv(s, min(s, experts)), fp16=prologue.scale_mode is None)
    table = row_tile_table(offsets_E, s, block_m)
    if rows_S is not None:
        values, x_scale = gather_rows(values, x_scale, rows_S)
    y = torch.empty(s, n, dtype=dtype, device=device)
    bias = y if bias_EN is None else bias_EN  # NOTE: `y`, and `x_scale` for partial sums, are passed and not read
    work_tiles = (table.shape[0] - 1) * cdiv(n, 64 * TILES.value)
    mxquant_mxfp4_persistent_gemm[(min(multiprocessors(device), work_tiles),)](
        *tma_descriptors(w_packed, values, block_m), w_scale, x_scale, bias, y, x_scale, table, s, n, k, work_tiles, 1,
        **kernel_constants(values, k, block_m, bias_EN, grouped=True),
    )  # fmt: skip
    grouped_fixup(y, x_TK, w_packed, w_scale, bias_EN, offsets_E, rows_S, x_scale, prologue.scale_mode)
    return y


def _group_block_m(mean_rows: int, *, fp16: bool) -> int:
    """For groups of so many rows on average: the fastest on an H200."""
    most_for_32, most_for_64 = (20, 48) if fp16 else (24, 160)
    return 32 if mean_rows <= most_for_32 else 64 if mean_rows <= most_for_64 else 128


def row_tile_table(offsets_E: Tensor, sorted_rows: int, block_m: int) -> Tensor:
    """The row tiles, of `block_m` rows, that groups need, found on the device.

    Returns:
        int32 [1 + as many as any groups could need, 4]. The first entry begins with the number of row tiles. Each other
        entry is of a row tile: its matrix, where the group begins and ends, and the index of the group's first row
        tile.
    """
    experts = offsets_E.shape[0]
    # Every group has at most one tile that is not full.
    tiles = sorted_rows // block_m + min(sorted_rows, experts)
    table = torch.empty(1 + tiles, 4, dtype=torch.int32, device=offsets_E.device)
    mxquant_row_tile_table[(tiles,)](
        offsets_E, table, sorted_rows, experts, GROUPS=next_power_of_2(experts + 1), BM=block_m, launch_pdl=True
    )
    return table


@cached_launch
@triton.jit
def mxquant_row_tile_table(
    offsets: tl.tensor, table: tl.tensor, S: tl.tensor, E: tl.tensor, GROUPS: tl.constexpr, BM: tl.constexpr
) -> None:
    """One row tile. The first program also stores how many there are."""
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
    gdc_wait()  # NOTE: the next launch waits for this one only, and reads what the one before has written


def gather_rows(values: Tensor, row_scale: Tensor, rows_S: Tensor) -> tuple[Tensor, Tensor]:
    """The rescaled rows `rows_S` and their scales."""
    s, width = rows_S.shape[0], values.shape[1]
    sorted_values = values.new_empty(s, width)
    sorted_scale = row_scale.new_empty(s + 127, 1)[:s]  # with room behind, see `plan_prologue`
    words = width * values.element_size() // 4
    mxquant_gather_rows[(s,)](
        values.view(torch.int32), row_scale, rows_S, sorted_values.view(torch.int32), sorted_scale, words,
        BLOCK=next_power_of_2(words), launch_pdl=True,
    )  # fmt: skip
    return sorted_values, sorted_scale


@cached_launch
@triton.jit
def mxquant_gather_rows(
    values: tl.tensor,
    row_scale: tl.tensor,
    rows: tl.tensor,
    sorted_values: tl.tensor,
    sorted_scale: tl.tensor,
    words: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    sorted_row = tl.program_id(0).to(tl.int64)
    gdc_launch_dependents()
    row = tl.load(rows + sorted_row)
    word = tl.arange(0, BLOCK)
    gdc_wait()  # for the prologue
    copied = tl.load(values + row * words + word, mask=word < words)
    tl.store(sorted_values + sorted_row * words + word, copied, mask=word < words)
    tl.store(sorted_scale + sorted_row, tl.load(row_scale + row))
