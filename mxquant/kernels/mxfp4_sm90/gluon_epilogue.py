"""The epilogue of the persistent kernel (`gluon_kernel`): a consumer scales a tile of the result and stores it."""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from mxquant.kernels.mxfp4_sm90.load import row_scale_of
from mxquant.kernels.mxfp4_sm90.mainloop import TOP_EXPONENT
from mxquant.kernels.mxfp4_sm90.tile_scheduler import TILES, Schedule, WorkTile

# The name of later versions of Triton, and of 3.6.
_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


class GlobalTensors(NamedTuple):
    """What consumers read and write in global memory."""

    w_scale: gl.tensor
    x_scale: gl.tensor
    bias: gl.tensor
    y: tma.tensor_descriptor | gl.tensor
    """A descriptor for copies of whole tiles; of groups, a pointer."""
    partial: gl.tensor
    """Sums over splits of the columns."""


@gluon.jit
def _max_exponent(packed_exponents: gl.tensor, MMA_LAYOUT: gl.constexpr) -> gl.tensor:
    """The largest exponent of each of 64 weight rows, as `load.load_max_exponent`, from each thread's first four
    exponents: a row's first three blocks are those of the first 3 of 4 neighbouring threads.
    """
    t = gl.arange(0, 128, layout=packed_exponents.type.layout) % 4
    packed_exponents = gl.where(t < 3, packed_exponents, 0)
    bits = gl.join(((packed_exponents >> 5) & 7) << (3 * t), ((packed_exponents >> 13) & 7) << (3 * t))
    exponent = gl.permute(gl.sum(gl.reshape(bits, (4, 8, 4, 2)), 2), (0, 2, 1))  # warp half g
    return gl.convert_layout(gl.reshape(exponent, (64,)), gl.SliceLayout(1, MMA_LAYOUT))


@gluon.jit
def epilogue(
    total: gl.tensor,
    packed_exponents: gl.tensor,
    tile: gl.tensor,
    i: gl.tensor,
    work: WorkTile,
    y_smem: gl.shared_memory_descriptor,
    tensors: GlobalTensors,
    schedule: Schedule,
    CONFIG: gl.constexpr,
) -> None:
    """Store the sums of a tile of weight rows, or of a split of its columns.

    Args:
        total: [64, rows], relative to the row scales.
        packed_exponents: each thread's first four.
        i: index of the work tile.
    """
    HAS_BIAS: gl.constexpr = CONFIG.HAS_BIAS
    GROUPED: gl.constexpr = CONFIG.GROUPED
    MMA_LAYOUT: gl.constexpr = total.type.layout
    ROWS: gl.constexpr = total.shape[1]
    x_scale, bias, y, partial = tensors.x_scale, tensors.bias, tensors.y, tensors.partial
    N, whole_tiles = schedule.N, schedule.whole_tiles
    n = gl.arange(0, 64, layout=gl.SliceLayout(1, MMA_LAYOUT))
    m = gl.arange(0, ROWS, layout=gl.SliceLayout(0, MMA_LAYOUT))
    w_row_scale = row_scale_of(_max_exponent(packed_exponents, MMA_LAYOUT), TOP_EXPONENT)
    total *= w_row_scale[:, None] * gl.load(x_scale + work.first_row + m)[None, :]
    if HAS_BIAS:
        added = gl.load(bias + work.matrix.to(gl.int64) * N + tile * 64 + n).to(gl.float32)
        total += gl.where(work.first_step == 0, added, 0.0)[:, None]
    if GROUPED:
        # NOTE: stored by vectors with a mask, as the rows beyond belong to the next group.
        y_smem.permute((1, 0)).store(total.to(y_smem.dtype))
        OUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        n = gl.arange(0, 64, layout=gl.SliceLayout(0, OUT))
        m = work.first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
        at = m.to(gl.int64)[:, None] * N + (tile * 64 + n)[None, :]
        gl.store(y + at, y_smem.load(OUT), mask=(m < work.end_row)[:, None])
    elif i < whole_tiles:
        tma.store_wait(0)  # until what was stored from here before is read
        y_smem.permute((1, 0)).store(total.to(y_smem.dtype))
        fence_async_shared()
        _store(y, [work.first_row, tile * 64], y_smem)
    else:
        partial += ((i - whole_tiles) * TILES + tile % TILES).to(gl.int64) * (ROWS * 64)
        gl.store(partial + (n[:, None] * ROWS + m[None, :]), total)
