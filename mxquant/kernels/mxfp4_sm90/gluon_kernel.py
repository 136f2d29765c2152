"""The kernel of `tiled_specialized`, in Gluon, Triton's language of layouts and warps.

Of a program's warps, one has tiles of the weight and of the activations copied to shared memory, some steps ahead. The
others, in two groups of four or in four, each decode their tiles of 64 weight rows and multiply them: decoded values
are the A operand of wgmma, in registers, so that C^T = W X^T is what is computed, as in `tiled_decode`. A group decodes
while the tensor cores have what another one decoded.

Rows may be sorted into groups, each with its own matrix of a stack: then a table that was made on the device says where
the groups' tiles of the result are (`grouped_specialized`).

Triton's interpreter doesn't run Gluon. Without a GPU, tests see that this compiles.

Shape suffixes: M input rows, N weight rows, K columns. A piece of work is a tile of the result, 64 * TILES weight rows
by BM input rows, or a part of its columns; a step is BK columns of it, the last possibly fewer: REST blocks remain
after K // 256 * 256 columns. `sizes` are M, N, K, the number of pieces that are whole tiles, the parts of each other
tile, and the table of groups; `tensors` are the bytes of the weight's scales, the activations' scales, the bias, the
result, which copies of whole tiles are described for or, of groups, a pointer, and what parts are stored in; `work` is
what `gluon_work.work_of` says of a piece, `exponents` what `_first_exponents` does.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mxquant.kernels.mxfp4_sm90.gluon_decode import bytes_of, halves_of, rest_exponents
from mxquant.kernels.mxfp4_sm90.gluon_epilogue import finish
from mxquant.kernels.mxfp4_sm90.tile_scheduler import TILES, count_of, work_of
from mxquant.kernels.primitives.pdl import gdc_launch_dependents, gdc_wait

# The name of later versions of Triton, and of 3.6.
_copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


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
    w_smem, x_smem, _, filled, emptied = buffers
    CHUNKS: gl.constexpr = BK // 128
    BYTES: gl.constexpr = TILES * BK * 32 + BM * BK * x_smem.dtype.primitive_bitwidth // 8
    N, K = sizes[1], sizes[2]
    gdc_launch_dependents()
    gdc_wait()  # for the folded activations
    count = 0
    for i in range(gl.program_id(0), count_of(sizes, GROUPED, BM), gl.num_programs(0)):
        matrix, first, _stop, n, begin, end = work_of(i, sizes, GROUPED, BM, BK)
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
    gdc_wait()  # for the scales of the activations
    pieces = count_of(sizes, GROUPED, BM)
    if gl.program_id(0) < pieces:
        count = 0
        work = work_of(gl.program_id(0), sizes, GROUPED, BM, BK)
        exponents = _first_exponents(work, tensors[0], sizes, GROUP * EACH, BK)
        for i in range(gl.program_id(0), pieces, gl.num_programs(0)):
            done = count + work[5] - work[4]
            # The last tile of a group is often less than half full, where tiles are large.
            if GROUPED and BM == 128:
                if work[2] - work[1] <= BM // 2:
                    work, exponents = _multiply_tile(
                        i, pieces, work, exponents, count, buffers, tensors, sizes, GROUP, EACH, GROUPED, BM, BM // 2,
                        BK, STAGES, REST, HAS_BIAS,
                    )  # fmt: skip
                else:
                    work, exponents = _multiply_tile(
                        i, pieces, work, exponents, count, buffers, tensors, sizes, GROUP, EACH, GROUPED, BM, BM,
                        BK, STAGES, REST, HAS_BIAS,
                    )  # fmt: skip
            else:
                work, exponents = _multiply_tile(
                    i, pieces, work, exponents, count, buffers, tensors, sizes, GROUP, EACH, GROUPED, BM, BM,
                    BK, STAGES, REST, HAS_BIAS,
                )  # fmt: skip
            count = done
        if not GROUPED:
            tma.store_wait(0)


@gluon.jit
def _first_exponents(
    work: gl.tuple, bytes_: gl.tensor, sizes: gl.tuple, tile: gl.constexpr, BK: gl.constexpr
) -> gl.tuple:
    """Of a group's two tiles of weight rows, from `tile` of a piece's on: where the first four exponents of each thread
    lie, and those four that the piece begins with: a thread has four of 256 columns. The last tiles may lie beyond the
    weight, and come to nothing.
    """
    matrix, _first, _stop, n, begin, _end = work
    N, K = sizes[1], sizes[2]
    words = bytes_.to(gl.pointer_type(gl.int32), bitcast=True)
    words += gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    at0 = words + (matrix.to(gl.int64) * (N // 64) + gl.minimum(n * TILES + tile, N // 64 - 1)) * (K // 2)
    at1 = words + (matrix.to(gl.int64) * (N // 64) + gl.minimum(n * TILES + tile + 1, N // 64 - 1)) * (K // 2)
    start = begin * BK // 256 * 128
    return at0, at1, gl.load(at0 + start), gl.load(at1 + start)


@gluon.jit
def _multiply_tile(
    i: gl.tensor,
    pieces: gl.tensor,
    work: gl.tuple,
    exponents: gl.tuple,
    count: gl.tensor,
    buffers: gl.tuple,
    tensors: gl.tuple,
    sizes: gl.tuple,
    GROUP: gl.constexpr,
    EACH: gl.constexpr,
    GROUPED: gl.constexpr,
    BM: gl.constexpr,
    ROWS: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    REST: gl.constexpr,
    HAS_BIAS: gl.constexpr,
) -> tuple[gl.tuple, gl.tuple]:
    """A group's share of a piece of work, of which the first ROWS rows are of interest; `count` steps were before.

    Returns work and exponents of the next piece, which come in while this one is finished.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, ROWS, 256 // buffers[1].dtype.primitive_bitwidth]
    )
    N, K = sizes[1], sizes[2]
    at0, at1, next0, next1 = exponents
    matrix, _first, _stop, n, begin, end = work
    total0, total1 = gl.zeros((64, ROWS), gl.float32, layout=MMA), gl.zeros((64, ROWS), gl.float32, layout=MMA)
    # Every part has a step of whole columns, and the last of them the steps that remain.
    last = gl.minimum(end, K // 256 * (256 // BK)) if REST > 0 else end
    for step in range(begin, last):
        four0, four1 = next0 >> (step * BK % 256 // 8), next1 >> (step * BK % 256 // 8)
        ahead = gl.minimum(step + 1, last - 1) * BK // 256 * 128
        next0, next1 = gl.load(at0 + ahead), gl.load(at1 + ahead)
        total0, total1 = _add_step(total0, total1, four0, four1, count, buffers, GROUP, EACH, STAGES, BK // 32, MMA)
        count += 1
    tile = n * TILES + GROUP * EACH
    if REST > 0 and last < end:
        for rest in gl.static_range(0, REST, BK // 32):
            four0 = _last_exponents(tensors[0], matrix, tile, K // 256 * 8 + rest, sizes, min(REST - rest, BK // 32))
            four1 = _last_exponents(
                tensors[0], matrix, tile + 1, K // 256 * 8 + rest, sizes, min(REST - rest, BK // 32)
            )
            total0, total1 = _add_step(
                total0, total1, four0, four1, count, buffers, GROUP, EACH, STAGES, min(REST - rest, BK // 32), MMA
            )
            count += 1
    first0, first1 = gl.load(at0), gl.load(at1)
    following = work_of(gl.minimum(i + gl.num_programs(0), pieces - 1), sizes, GROUPED, BM, BK)
    exponents = _first_exponents(following, tensors[0], sizes, GROUP * EACH, BK)
    y_smem = buffers[2].index(GROUP).slice(0, ROWS)
    if tile * 64 < N:
        finish(total0, first0, tile, i, work, y_smem, tensors, sizes, MMA, GROUPED, HAS_BIAS)
    if EACH == 2 and tile * 64 + 64 < N:
        finish(total1, first1, tile + 1, i, work, y_smem, tensors, sizes, MMA, GROUPED, HAS_BIAS)
    return following, exponents


@gluon.jit
def _last_exponents(
    bytes_: gl.tensor, matrix: gl.tensor, tile: gl.tensor, block: gl.tensor, sizes: gl.tuple, BLOCKS: gl.constexpr
) -> gl.tensor:
    """As the four exponents of a thread, of the BLOCKS from `block` on that remain of a tile of weight rows."""
    N, K = sizes[1], sizes[2]
    thread = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    row = (matrix.to(gl.int64) * (N // 64) + gl.minimum(tile, N // 64 - 1)) * 64
    return rest_exponents(bytes_, row, thread, block, K, BLOCKS)


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
    w_smem, x_smem, _, filled, emptied = buffers
    ROWS: gl.constexpr = total0.shape[1]
    stage = count % STAGES
    mbarrier.wait(filled.index(stage), count // STAGES % 2)
    w0 = w_smem.index(stage * TILES + GROUP * EACH)
    w1 = w_smem.index(stage * TILES + GROUP * EACH + EACH - 1)
    if x_smem.dtype == gl.float16:
        x = x_smem.index(stage).slice(0, ROWS).permute((1, 0))
        total0 = warpgroup_mma(halves_of(w0, four0, MMA, BLOCKS), x, total0, is_async=True)
        if EACH == 2:
            total1 = warpgroup_mma(halves_of(w1, four1, MMA, BLOCKS), x, total1, is_async=True)
            total0, total1 = warpgroup_mma_wait(0, deps=[total0, total1])
        else:
            total0 = warpgroup_mma_wait(0, deps=[total0])
    else:
        x0 = x_smem.index(stage * 2).slice(0, ROWS).permute((1, 0))
        x1 = x_smem.index(stage * 2 + 1).slice(0, ROWS).permute((1, 0))
        total0 += _sum_of_256(w0, four0, x0, x1, MMA, BLOCKS)
        if EACH == 2:
            total1 += _sum_of_256(w1, four1, x0, x1, MMA, BLOCKS)
    mbarrier.arrive(emptied.index(stage), count=1)
    return total0, total1


@gluon.jit
def _sum_of_256(
    words: gl.shared_memory_descriptor,
    four: gl.tensor,
    x0: gl.shared_memory_descriptor,
    x1: gl.shared_memory_descriptor,
    MMA: gl.constexpr,
    BLOCKS: gl.constexpr,
) -> gl.tensor:
    """FP8 products over 256 columns, as many as FP8 tensor cores may add up, or of fewer BLOCKS. All are decoded first:
    meanwhile the tensor cores have what the other groups decoded.
    """
    ROWS: gl.constexpr = x0.shape[1]
    zero = gl.zeros((64, ROWS), gl.float32, layout=MMA)
    w0 = bytes_of(words.slice(0, 32), four, MMA, BLOCKS if BLOCKS < 4 else 4)
    if BLOCKS > 4:
        w1 = bytes_of(words.slice(32, 32), four >> 16, MMA, BLOCKS - 4)
    total = warpgroup_mma(w0, x0, zero, use_acc=False, is_async=True)
    if BLOCKS > 4:
        total = warpgroup_mma(w1, x1, total, is_async=True)
    return warpgroup_mma_wait(0, deps=[total])


# Compiled once for every number of rows: the numbers below are divided by, not multiplied to addresses.
@gluon.jit(do_not_specialize=("M", "whole", "parts"))
def product_kernel(
    w_desc: tma.tensor_descriptor,
    x_desc: tma.tensor_descriptor,
    bytes_: gl.tensor,
    x_scale: gl.tensor,
    bias: gl.tensor,
    y: tma.tensor_descriptor | gl.tensor,
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
    Y_TYPE: gl.constexpr = y.dtype.element_ty if GROUPED else y.dtype
    y_smem = gl.allocate_shared_memory(Y_TYPE, [TILES // EACH, BM, 64], gl.NVMMASharedLayout(128, 16, 2))
    fence_async_shared()
    buffers = (w_smem, x_smem, y_smem, filled, emptied)
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
