"""The tile scheduler of the persistent kernel (`gluon_kernel`): which work tiles there are, in order, and where they
lie.

A work tile is a tile of the result, 64 * TILES weight rows by BM input rows, over all columns or over one split of
them. A step is BK of its columns; the last may have fewer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

TILES = tl.constexpr(4)
"""Tiles of 64 weight rows a work tile."""
# Row tiles for each weight tile before the next one, so that both stay in the L2 cache.
_SWIZZLE = tl.constexpr(16)


@dataclass(frozen=True)
class Config:
    """Constants of the persistent kernel."""

    GROUPED: bool
    TILES_EACH: int
    """Tiles of 64 weight rows a consumer."""
    BM: int
    BK: int
    STAGES: int
    K_TAIL: int
    """Blocks of 32 columns beyond the last whole 256 columns."""
    HAS_BIAS: bool


class Schedule(NamedTuple):
    """What there is to compute."""

    M: gl.tensor
    N: gl.tensor
    K: gl.tensor
    whole_tiles: gl.tensor
    """Tiles of the result that are computed over all columns. The others are split."""
    splits: gl.tensor
    table: gl.tensor
    """Of groups: the row tiles, see `persistent_grouped_gemm.row_tile_table`."""


class WorkTile(NamedTuple):
    matrix: gl.tensor
    """Index in the stack."""
    first_row: gl.tensor
    end_row: gl.tensor
    """Beyond the last row of the matrix's group."""
    weight_tile: gl.tensor
    first_step: gl.tensor
    end_step: gl.tensor


@triton.jit
def tile_coordinates(i: tl.tensor, M: tl.tensor, N: tl.tensor, BM: tl.constexpr) -> tuple[tl.tensor, ...]:
    """Row tile and weight tile of the i-th tile of the result."""
    n_tiles = (N + 64 * TILES - 1) // (64 * TILES)
    first = i // (_SWIZZLE * n_tiles) * _SWIZZLE
    size = tl.minimum((M + BM - 1) // BM - first, _SWIZZLE)
    within = i % (_SWIZZLE * n_tiles)
    return first + within % size, within // size


@gluon.jit
def get_work_tile(i: gl.tensor, schedule: Schedule, CONFIG: gl.constexpr) -> WorkTile:
    BM: gl.constexpr = CONFIG.BM
    BK: gl.constexpr = CONFIG.BK
    GROUPED: gl.constexpr = CONFIG.GROUPED
    M, N, K, whole_tiles, splits, table = schedule
    steps = (K + BK - 1) // BK
    if GROUPED:
        n_tiles = (N + 64 * TILES - 1) // (64 * TILES)
        entry = table + 4 * (1 + i // n_tiles)
        matrix, start, stop, slot = gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), gl.load(entry + 3)
        m, n = tile_coordinates(i - slot * n_tiles, stop - start, N, BM)
        return WorkTile(matrix, start + m * BM, stop, n, gl.to_tensor(0), steps)
    else:
        tile = gl.minimum(i, whole_tiles + (i - whole_tiles) // splits)
        m, n = tile_coordinates(tile, M, N, BM)
        split = gl.maximum(i - whole_tiles, 0) % splits
        first_step = gl.where(i < whole_tiles, 0, steps * split // splits)
        end_step = gl.where(i < whole_tiles, steps, steps * (split + 1) // splits)
        return WorkTile(gl.to_tensor(0), m * BM, M, n, first_step, end_step)


@gluon.jit
def count_work_tiles(schedule: Schedule, CONFIG: gl.constexpr) -> gl.tensor:
    GROUPED: gl.constexpr = CONFIG.GROUPED
    BM: gl.constexpr = CONFIG.BM
    n_tiles = (schedule.N + 64 * TILES - 1) // (64 * TILES)
    if GROUPED:
        return gl.load(schedule.table) * n_tiles
    else:
        tiles = (schedule.M + BM - 1) // BM * n_tiles
        return schedule.whole_tiles + (tiles - schedule.whole_tiles) * schedule.splits
