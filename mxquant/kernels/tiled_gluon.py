"""The kernel of `tiled_specialized`, in Gluon, Triton's language of layouts and warps.

Of a program's warps, one has tiles of the weight and of the activations copied to shared memory, some steps ahead. The
others, in two groups of four or in four, each decode their tiles of 64 weight rows and multiply them: decoded values
are the A operand of wgmma, in registers, so that C^T = W X^T is what is computed, as in `tiled_decode`. All that the
groups wait for each other for is their turn at the tensor cores.

Rows may be sorted into groups, each with its own matrix of a stack: then a table that was made on the device says where
the groups' tiles of the result are (`grouped_specialized`).

Triton's interpreter doesn't run Gluon. Without a GPU, tests see that this compiles.

Shape suffixes: M input rows, N weight rows, K columns. A piece of work is a tile of the result, 64 * TILES weight rows
by BM input rows, or a part of its columns; a step is BK columns of it, the last possibly fewer: REST blocks remain
after K // 256 * 256 columns. `sizes` are M, N, K, the number of pieces that are whole tiles, the parts of each other
tile, and the table of groups; `tensors` are the bytes of the weight's scales, the activations' scales, the bias, the
result and what parts are stored in; `work` is what `_work_of` says of a piece.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mxquant.kernels.fold import row_factor
from mxquant.kernels.gluon_decode import bytes_of, halves_of, rest_exponents
from mxquant.kernels.overlap import await_previous, let_next_start
from mxquant.kernels.tiled import highest_exponent
from mxquant.kernels.tiled_decode import TOP

TILES = tl.constexpr(4)
"""Tiles of 64 weight rows a program."""
# Row tiles that programs work through for one weight tile before the next: they stay in the L2 cache.
_GROUP = tl.constexpr(16)
# The name of later versions of Triton, and of 3.6.
_copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@triton.jit
def place_of(i: tl.tensor, M: tl.tensor, N: tl.tensor, BM: tl.constexpr) -> tuple[tl.tensor, ...]:
    """Row tile and weight tile of the i-th tile of the result."""
    n_tiles = (N + 64 * TILES - 1) // (64 * TILES)
    first = i // (_GROUP * n_tiles) * _GROUP
    size = tl.minimum((M + BM - 1) // BM - first, _GROUP)
    within = i % (_GROUP * n_tiles)
    return first + within % size, within // size


@gluon.jit
def _work_of(i: gl.tensor, sizes: gl.tuple, GROUPED: gl.constexpr, BM: gl.constexpr, BK: gl.constexpr) -> gl.tuple:
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
def _count(sizes: gl.tuple, GROUPED: gl.constexpr, BM: gl.constexpr) -> gl.tensor:
    """Pieces of work."""
    M, N, _, whole, parts, table = sizes
    n_tiles = (N + 64 * TILES - 1) // (64 * TILES)
    if GROUPED:
        return gl.load(table) * n_tiles
    else:
        tiles = (M + BM - 1) // BM * n_tiles
        return whole + (tiles - whole) * parts


@gluon.jit
def _copy_ahead(
    w_desc: tma.tensor_descriptor,
    x_desc: tma.tensor_descriptor,
    buffers: gl.tuple,
    sizes: gl.tuple,
    GROUPED: gl.constexpr,
    BM: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """The warp that has tiles copied: into a stage as soon as all groups have let go of it.

    What lies outside of a tensor is copied as zeros. Of a last step of fewer columns, some words are of other tiles.
    """
    w_smem, x_smem, filled, emptied, _ = buffers
    CHUNKS: gl.constexpr = BK // 128
    BYTES: gl.constexpr = TILES * BK * 32 + BM * BK * x_smem.dtype.primitive_bitwidth // 8
    N, K = sizes[1], sizes[2]
    let_next_start()
    await_previous()  # for the folded activations
    count = 0
    for i in range(gl.program_id(0), _count(sizes, GROUPED, BM), gl.num_programs(0)):
        matrix, first, _stop, n, begin, end = _work_of(i, sizes, GROUPED, BM, BK)
        for step in range(begin, end):
            stage = count % STAGES
            mbarrier.wait(emptied.index(stage), count // STAGES % 2 ^ 1)
            bar = filled.index(stage)
            mbarrier.expect(bar, BYTES)
            for tile in gl.static_range(TILES):
                row = (matrix * (N // 64) + n * TILES + tile) * (K // 4) + step * (BK // 4)
                _copy(w_desc, [row, 0], bar, w_smem.index(stage * TILES + tile))
            for chunk in gl.static_range(CHUNKS):
                column = step * BK + chunk * 128
                _copy(x_desc, [first, column], bar, x_smem.index(stage * CHUNKS + chunk))
            count += 1


@gluon.jit
def _multiply(
    buffers: gl.tuple,
    tensors: gl.tuple,
    sizes: gl.tuple,
    GROUP: gl.constexpr,
    EACH: gl.constexpr,
    GROUPED: gl.constexpr,
    BM: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    REST: gl.constexpr,
    HAS_BIAS: gl.constexpr,
) -> None:
    """A group of warps, with one or two of a program's four tiles of weight rows."""
    await_previous()  # for the scales of the activations
    count = 0
    for i in range(gl.program_id(0), _count(sizes, GROUPED, BM), gl.num_programs(0)):
        work = _work_of(i, sizes, GROUPED, BM, BK)
        # The last tile of a group is often less than half full, where tiles are large.
        if GROUPED and BM == 128:
            if work[2] - work[1] <= BM // 2:
                _multiply_tile(i, work, count, buffers, tensors, sizes, GROUP, EACH, GROUPED, BM // 2, BK, STAGES, REST,
                               HAS_BIAS)  # fmt: skip
            else:
                _multiply_tile(i, work, count, buffers, tensors, sizes, GROUP, EACH, GROUPED, BM, BK, STAGES, REST,
                               HAS_BIAS)  # fmt: skip
        else:
            _multiply_tile(i, work, count, buffers, tensors, sizes, GROUP, EACH, GROUPED, BM, BK, STAGES, REST,
                           HAS_BIAS)  # fmt: skip
        count += work[5] - work[4]


@gluon.jit
def _multiply_tile(
    i: gl.tensor,
    work: gl.tuple,
    count: gl.tensor,
    buffers: gl.tuple,
    tensors: gl.tuple,
    sizes: gl.tuple,
    GROUP: gl.constexpr,
    EACH: gl.constexpr,
    GROUPED: gl.constexpr,
    ROWS: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    REST: gl.constexpr,
    HAS_BIAS: gl.constexpr,
) -> None:
    """A group's share of a piece of work, of which the first ROWS rows are of interest; `count` steps were before."""
    FP16: gl.constexpr = buffers[1].dtype == gl.float16
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16 if FP16 else 32])
    thread = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    bytes_, N, K = tensors[0], sizes[1], sizes[2]
    matrix, _first, _stop, n, begin, end = work
    tile = n * TILES + GROUP * EACH
    total0, total1 = gl.zeros((64, ROWS), gl.float32, layout=MMA), gl.zeros((64, ROWS), gl.float32, layout=MMA)
    # The last tiles may lie beyond the weight, and come to nothing.
    tile0 = matrix.to(gl.int64) * (N // 64) + gl.minimum(tile, N // 64 - 1)
    tile1 = matrix.to(gl.int64) * (N // 64) + gl.minimum(tile + 1, N // 64 - 1)
    # Four exponents of a thread: of 256 columns.
    scales = bytes_.to(gl.pointer_type(gl.int32), bitcast=True)
    at0, at1 = scales + tile0 * (K // 2) + thread, scales + tile1 * (K // 2) + thread
    next0, next1 = gl.load(at0 + begin * BK // 256 * 128), gl.load(at1 + begin * BK // 256 * 128)
    # Every part has a step of whole columns, and the last of them the steps that remain.
    last = gl.minimum(end, K // 256 * (256 // BK)) if REST > 0 else end
    for step in range(begin, last):
        four0, four1 = next0 >> (step * BK % 256 // 8), next1 >> (step * BK % 256 // 8)
        ahead = gl.minimum(step + 1, last - 1) * BK // 256 * 128
        next0, next1 = gl.load(at0 + ahead), gl.load(at1 + ahead)
        total0, total1 = _add_step(total0, total1, four0, four1, count, buffers, GROUP, EACH, STAGES, BK // 32, MMA)
        count += 1
    if REST > 0 and last < end:
        for rest in gl.static_range(0, REST, BK // 32):
            block = K // 256 * 8 + rest
            four0 = rest_exponents(bytes_, tile0 * 64, thread, block, K, min(REST - rest, BK // 32))
            four1 = rest_exponents(bytes_, tile1 * 64, thread, block, K, min(REST - rest, BK // 32))
            total0, total1 = _add_step(
                total0, total1, four0, four1, count, buffers, GROUP, EACH, STAGES, min(REST - rest, BK // 32), MMA
            )
            count += 1
    if tile * 64 < N:
        _finish(total0, tile, i, work, tensors, sizes, MMA, GROUPED, HAS_BIAS)
    if EACH == 2 and tile * 64 + 64 < N:
        _finish(total1, tile + 1, i, work, tensors, sizes, MMA, GROUPED, HAS_BIAS)


@gluon.jit
def _add_step(
    total0: gl.tensor,
    total1: gl.tensor,
    four0: gl.tensor,
    four1: gl.tensor,
    count: gl.tensor,
    buffers: gl.tuple,
    GROUP: gl.constexpr,
    EACH: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCKS: gl.constexpr,
    MMA: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor]:
    """The sums of a group's tiles and of a step of so many BLOCKS of columns, with their exponents."""
    w_smem, x_smem, filled, emptied, turns = buffers
    ROWS: gl.constexpr = total0.shape[1]
    stage = count % STAGES
    mbarrier.wait(filled.index(stage), count // STAGES % 2)
    w0 = w_smem.index(stage * TILES + GROUP * EACH)
    w1 = w_smem.index(stage * TILES + GROUP * EACH + EACH - 1)
    if x_smem.dtype == gl.float16:
        x = x_smem.index(stage).slice(0, ROWS).permute((1, 0))
        w = halves_of(w0, four0, MMA, BLOCKS)
        _await_turn(turns, count, GROUP)
        total0 = warpgroup_mma(w, x, total0, is_async=True)
        if EACH == 2:
            total1 = warpgroup_mma(halves_of(w1, four1, MMA, BLOCKS), x, total1, is_async=True)
        _pass_turn(turns, GROUP, EACH)
        if EACH == 2:
            total0, total1 = warpgroup_mma_wait(0, deps=[total0, total1])
        else:
            total0 = warpgroup_mma_wait(0, deps=[total0])
    else:
        x0 = x_smem.index(stage * 2).slice(0, ROWS).permute((1, 0))
        x1 = x_smem.index(stage * 2 + 1).slice(0, ROWS).permute((1, 0))
        total0 += _sum_of_256(w0, four0, x0, x1, turns, count * EACH, GROUP, EACH, MMA, BLOCKS)
        if EACH == 2:
            total1 += _sum_of_256(w1, four1, x0, x1, turns, count * EACH + 1, GROUP, EACH, MMA, BLOCKS)
    mbarrier.arrive(emptied.index(stage), count=1)
    return total0, total1


@gluon.jit
def _sum_of_256(
    words: gl.shared_memory_descriptor,
    four: gl.tensor,
    x0: gl.shared_memory_descriptor,
    x1: gl.shared_memory_descriptor,
    turns: gl.shared_memory_descriptor,
    turn: gl.tensor,
    GROUP: gl.constexpr,
    EACH: gl.constexpr,
    MMA: gl.constexpr,
    BLOCKS: gl.constexpr,
) -> gl.tensor:
    """FP8 products over 256 columns, as many as FP8 tensor cores may add up, or of fewer BLOCKS. Half are decoded
    during the other half."""
    ROWS: gl.constexpr = x0.shape[1]
    zero = gl.zeros((64, ROWS), gl.float32, layout=MMA)
    w = bytes_of(words.slice(0, 32), four, MMA, BLOCKS if BLOCKS < 4 else 4)
    _await_turn(turns, turn, GROUP)
    total = warpgroup_mma(w, x0, zero, use_acc=False, is_async=True)
    if BLOCKS > 4:
        w = bytes_of(words.slice(32, 32), four >> 16, MMA, BLOCKS - 4)
        total = warpgroup_mma(w, x1, total, is_async=True)
    _pass_turn(turns, GROUP, EACH)
    return warpgroup_mma_wait(0, deps=[total])


@gluon.jit
def _await_turn(turns: gl.shared_memory_descriptor, turn: gl.tensor, GROUP: gl.constexpr) -> None:
    """The groups take turns at the tensor cores. Left to themselves they share them, and then all decode at once."""
    mbarrier.wait(turns.index(GROUP), (turn + (GROUP == 0)) % 2)


@gluon.jit
def _pass_turn(turns: gl.shared_memory_descriptor, GROUP: gl.constexpr, EACH: gl.constexpr) -> None:
    """Let the next group have what follows in the queue."""
    mbarrier.arrive(turns.index((GROUP + 1) % (TILES // EACH)), count=1)


@gluon.jit
def _finish(
    total: gl.tensor,
    tile: gl.tensor,
    i: gl.tensor,
    work: gl.tuple,
    tensors: gl.tuple,
    sizes: gl.tuple,
    MMA: gl.constexpr,
    GROUPED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
) -> None:
    """Store the sums of a tile of weight rows, or of a part of its columns."""
    bytes_, x_scale, bias, y, partial = tensors
    N, K, whole = sizes[1], sizes[2], sizes[3]
    matrix, first, stop, _, begin, _ = work
    ROWS: gl.constexpr = total.shape[1]
    n = tile * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, MMA))
    n = matrix.to(gl.int64) * N + n
    m = first + gl.arange(0, ROWS, layout=gl.SliceLayout(0, MMA))
    total *= (
        row_factor(highest_exponent(bytes_, n, K), TOP)[:, None]
        * gl.load(x_scale + m, mask=m < stop, other=0.0)[None, :]
    )
    if HAS_BIAS:
        total += gl.where(begin == 0, gl.load(bias + n).to(gl.float32), 0.0)[:, None]
    # Threads that have neighbours in y.
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    n = gl.arange(0, 64, layout=gl.SliceLayout(1, OUT))
    m = gl.arange(0, ROWS, layout=gl.SliceLayout(0, OUT))
    if GROUPED or i < whole:
        m += first
        at = m.to(gl.int64)[None, :] * N + (tile * 64 + n)[:, None]
        gl.store(y + at, gl.convert_layout(total.to(y.dtype.element_ty), OUT), mask=(m < stop)[None, :])
    else:
        partial += ((i - whole) * TILES + tile % TILES).to(gl.int64) * (ROWS * 64)
        gl.store(partial + (m[None, :] * 64 + n[:, None]), gl.convert_layout(total, OUT))


# Compiled once for every number of rows: the numbers below are divided by, not multiplied to addresses.
@gluon.jit(do_not_specialize=("M", "whole", "parts"))
def product_kernel(
    w_desc: tma.tensor_descriptor,
    x_desc: tma.tensor_descriptor,
    bytes_: gl.tensor,
    x_scale: gl.tensor,
    bias: gl.tensor,
    y: gl.tensor,
    partial: gl.tensor,
    table: gl.tensor,
    M: gl.tensor,
    N: gl.tensor,
    K: gl.tensor,
    whole: gl.tensor,
    parts: gl.tensor,
    GROUPED: gl.constexpr,
    EACH: gl.constexpr,
    BM: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    REST: gl.constexpr,
    HAS_BIAS: gl.constexpr,
) -> None:
    CHUNKS: gl.constexpr = BK // 128
    w_smem = gl.allocate_shared_memory(w_desc.dtype, [STAGES * TILES, BK // 4, w_desc.block_shape[1]], w_desc.layout)
    x_smem = gl.allocate_shared_memory(x_desc.dtype, [STAGES * CHUNKS, BM, 128], x_desc.layout)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    emptied = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(filled.index(stage), count=1)
        mbarrier.init(emptied.index(stage), count=TILES // EACH)
    turns = gl.allocate_shared_memory(gl.int64, [TILES // EACH, 1], mbarrier.MBarrierLayout())
    for group in gl.static_range(TILES // EACH):
        mbarrier.init(turns.index(group), count=1)
    fence_async_shared()
    buffers = (w_smem, x_smem, filled, emptied, turns)
    tensors = (bytes_, x_scale, bias, y, partial)
    sizes = (M, N, K, whole, parts, table)
    # Registers: the first group has what is left over, no fewer than the others.
    if EACH == 2:
        gl.warp_specialize(
            [
                (_multiply, (buffers, tensors, sizes, 0, 2, GROUPED, BM, BK, STAGES, REST, HAS_BIAS)),
                (_multiply, (buffers, tensors, sizes, 1, 2, GROUPED, BM, BK, STAGES, REST, HAS_BIAS)),
                (_copy_ahead, (w_desc, x_desc, buffers, sizes, GROUPED, BM, BK, STAGES)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (buffers, tensors, sizes, 0, 1, GROUPED, BM, BK, STAGES, REST, HAS_BIAS)),
                (_multiply, (buffers, tensors, sizes, 1, 1, GROUPED, BM, BK, STAGES, REST, HAS_BIAS)),
                (_multiply, (buffers, tensors, sizes, 2, 1, GROUPED, BM, BK, STAGES, REST, HAS_BIAS)),
                (_multiply, (buffers, tensors, sizes, 3, 1, GROUPED, BM, BK, STAGES, REST, HAS_BIAS)),
                (_copy_ahead, (w_desc, x_desc, buffers, sizes, GROUPED, BM, BK, STAGES)),
            ],
            [4, 4, 4, 1],
            [112, 112, 112, 24],
        )
