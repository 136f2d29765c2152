"""How a group of warps of `tiled_gluon` finishes a tile of the result.

The names are explained there.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from mxquant.kernels.mxfp4_sm90.activation_fp8 import row_factor
from mxquant.kernels.mxfp4_sm90.mainloop import TOP
from mxquant.kernels.mxfp4_sm90.tile_scheduler import TILES

# The name of later versions of Triton, and of 3.6.
_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.jit
def _highest_of(four: gl.tensor, MMA: gl.constexpr) -> gl.tensor:
    """The largest exponent of each of 64 weight rows, from the upper bits of their first three blocks, which are those
    of the first 3 of 4 neighbouring threads: `tiled.highest_exponent`, of each thread's first four bytes.
    """
    t = gl.arange(0, 128, layout=four.type.layout) % 4
    four = gl.where(t < 3, four, 0)
    parts = gl.join(((four >> 5) & 7) << (3 * t), ((four >> 13) & 7) << (3 * t))
    highest = gl.permute(gl.sum(gl.reshape(parts, (4, 8, 4, 2)), 2), (0, 2, 1))  # warp half g
    return gl.convert_layout(gl.reshape(highest, (64,)), gl.SliceLayout(1, MMA))


@gluon.jit
def finish(
    total: gl.tensor,
    four: gl.tensor,
    tile: gl.tensor,
    i: gl.tensor,
    work: gl.tuple,
    y_smem: gl.shared_memory_descriptor,
    tensors: gl.tuple,
    sizes: gl.tuple,
    MMA: gl.constexpr,
    GROUPED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
) -> None:
    """Store the sums of a tile of weight rows, or of a part of its columns."""
    _, x_scale, bias, y, partial = tensors
    N, whole = sizes[1], sizes[3]
    matrix, first, stop, _, begin, _ = work
    ROWS: gl.constexpr = total.shape[1]
    n = gl.arange(0, 64, layout=gl.SliceLayout(1, MMA))
    m = gl.arange(0, ROWS, layout=gl.SliceLayout(0, MMA))
    total *= row_factor(_highest_of(four, MMA), TOP)[:, None] * gl.load(x_scale + first + m)[None, :]
    if HAS_BIAS:
        added = gl.load(bias + matrix.to(gl.int64) * N + tile * 64 + n).to(gl.float32)
        total += gl.where(begin == 0, added, 0.0)[:, None]
    if GROUPED:
        # The rows beyond belong to the next group.
        y_smem.permute((1, 0)).store(total.to(y_smem.dtype))
        OUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        n = gl.arange(0, 64, layout=gl.SliceLayout(0, OUT))
        m = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
        at = m.to(gl.int64)[:, None] * N + (tile * 64 + n)[None, :]
        gl.store(y + at, y_smem.load(OUT), mask=(m < stop)[:, None])
    elif i < whole:
        tma.store_wait(0)  # until what was stored from here before is read
        y_smem.permute((1, 0)).store(total.to(y_smem.dtype))
        fence_async_shared()
        _store(y, [first, tile * 64], y_smem)
    else:
        partial += ((i - whole) * TILES + tile % TILES).to(gl.int64) * (ROWS * 64)
        gl.store(partial + (n[:, None] * ROWS + m[None, :]), total)
