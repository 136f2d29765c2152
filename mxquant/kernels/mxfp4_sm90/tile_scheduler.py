"""What each program of `tiled_gluon` works on: its pieces of work, in order, and where they lie.

The names are explained there.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

TILES = tl.constexpr(4)
"""Tiles of 64 weight rows a program."""
# Row tiles that programs work through for one weight tile before the next: they stay in the L2 cache.
_GROUP = tl.constexpr(16)


@triton.jit
def place_of(i: tl.tensor, M: tl.tensor, N: tl.tensor, BM: tl.constexpr) -> tuple[tl.tensor, ...]:
    """Row tile and weight tile of the i-th tile of the result."""
    n_tiles = (N + 64 * TILES - 1) // (64 * TILES)
    first = i // (_GROUP * n_tiles) * _GROUP
    size = tl.minimum((M + BM - 1) // BM - first, _GROUP)
    within = i % (_GROUP * n_tiles)
    return first + within % size, within // size


@gluon.jit
def work_of(i: gl.tensor, sizes: gl.tuple, GROUPED: gl.constexpr, BM: gl.constexpr, BK: gl.constexpr) -> gl.tuple:
    """Of the i-th piece of work: the matrix, the first row, the one after the matrix's last, the weight tile, the first
    step and the one after the last."""
    M, N, K, whole, parts, table = sizes
    steps = (K + BK - 1) // BK
    if GROUPED:
        n_tiles = (N + 64 * TILES - 1) // (64 * TILES)
        entry = table + 4 * (1 + i // n_tiles)
        matrix, start, stop, slot = gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), gl.load(entry + 3)
        m, n = place_of(i - slot * n_tiles, stop - start, N, BM)
        return matrix, start + m * BM, stop, n, gl.to_tensor(0), steps
    else:
        tile = gl.minimum(i, whole + (i - whole) // parts)
        m, n = place_of(tile, M, N, BM)
        part = gl.maximum(i - whole, 0) % parts
        begin = gl.where(i < whole, 0, steps * part // parts)
        end = gl.where(i < whole, steps, steps * (part + 1) // parts)
        return gl.to_tensor(0), m * BM, M, n, begin, end


@gluon.jit
def count_of(sizes: gl.tuple, GROUPED: gl.constexpr, BM: gl.constexpr) -> gl.tensor:
    """Pieces of work."""
    M, N, _, whole, parts, table = sizes
    n_tiles = (N + 64 * TILES - 1) // (64 * TILES)
    if GROUPED:
        return gl.load(table) * n_tiles
    else:
        tiles = (M + BM - 1) // BM * n_tiles
        return whole + (tiles - whole) * parts
