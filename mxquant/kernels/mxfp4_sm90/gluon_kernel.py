"""The persistent kernel: a persistent, warp-specialized GEMM in Gluon, Triton's language of layouts and warps.

Of a program's warps, one is the producer: by TMA it copies tiles of the weight and of the activations to shared memory,
some steps ahead. The others are consumers, two or four warpgroups of four warps. All consumers share a work tile, as in
CUTLASS's cooperative kernels (not ping-pong). Each decodes its own tiles of 64 weight rows and multiplies them. The
decoded values are the A operand of wgmma, in registers, so the product is computed transposed, C^T = W X^T. While one
warpgroup decodes, the tensor cores have what another one decoded.

If GROUPED, rows are sorted by expert, and each expert's group of rows has its own matrix of a stack. Then a table made
on the device says where the row tiles of the groups are (`persistent_grouped_gemm`).

Triton's interpreter does not run Gluon. Without a GPU, tests check that the kernel compiles.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mxquant.kernels.mxfp4_sm90.gluon_decode import load_fp8_operand, load_fp16_operand, load_tail_exponents
from mxquant.kernels.mxfp4_sm90.gluon_epilogue import GlobalTensors, epilogue
from mxquant.kernels.mxfp4_sm90.tile_scheduler import (
    TILES,
    Config,
    Schedule,
    WorkTile,
    count_work_tiles,
    get_work_tile,
)
from mxquant.kernels.primitives.pdl import gdc_launch_dependents, gdc_wait

# The name of later versions of Triton, and of 3.6.
_copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


class SharedBuffers(NamedTuple):
    """Shared memory: the pipeline's stages with their full and empty barriers, and the tiles of the result."""

    w: gl.shared_memory_descriptor
    x: gl.shared_memory_descriptor
    y: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class Context(NamedTuple):
    """What a consumer warpgroup works with."""

    buffers: SharedBuffers
    tensors: GlobalTensors
    schedule: Schedule


class Exponents(NamedTuple):
    """Of a consumer's two tiles of weight rows: pointers to the first packed exponents of each thread, and the next
    ones.

    An int32 packs four exponents, which are what a thread has of 256 columns.
    """

    ptr0: gl.tensor
    ptr1: gl.tensor
    next0: gl.tensor
    next1: gl.tensor


@gluon.jit
def _producer(
    w_desc: tma.tensor_descriptor,
    x_desc: tma.tensor_descriptor,
    buffers: SharedBuffers,
    schedule: Schedule,
    CONFIG: gl.constexpr,
) -> None:
    """The warp that copies by TMA: into a stage as soon as all consumers have released it.

    NOTE: what lies outside a tensor is copied as zeros. A last step of fewer than BK columns also copies weight words
    of the next tile. Consumers skip them, or multiply them with zeros.
    """
    BK: gl.constexpr = CONFIG.BK
    STAGES: gl.constexpr = CONFIG.STAGES
    BM: gl.constexpr = CONFIG.BM
    w_smem, x_smem, _, full, empty = buffers
    CHUNKS: gl.constexpr = BK // 128
    BYTES: gl.constexpr = TILES * BK * 32 + BM * BK * x_smem.dtype.primitive_bitwidth // 8
    N, K = schedule.N, schedule.K
    gdc_launch_dependents()
    gdc_wait()  # for the prologue
    count = 0
    for i in range(gl.program_id(0), count_work_tiles(schedule, CONFIG), gl.num_programs(0)):
        work = get_work_tile(i, schedule, CONFIG)
        for step in range(work.first_step, work.end_step):
            stage = count % STAGES
            mbarrier.wait(empty.index(stage), count // STAGES % 2 ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, BYTES)
            for tile in gl.static_range(TILES):
                row = (work.matrix * (N // 64) + work.weight_tile * TILES + tile) * (K // 4) + step * (BK // 4)
                _copy(w_desc, [row, 0], bar, w_smem.index(stage * TILES + tile))
            for chunk in gl.static_range(CHUNKS):
                column = step * BK + chunk * 128
                _copy(x_desc, [work.first_row, column], bar, x_smem.index(stage * CHUNKS + chunk))
            count += 1


@gluon.jit
def _consumer(context: Context, CONSUMER: gl.constexpr, CONFIG: gl.constexpr) -> None:
    """A warpgroup, with one or two of a program's four tiles of weight rows."""
    BM: gl.constexpr = CONFIG.BM
    GROUPED: gl.constexpr = CONFIG.GROUPED
    gdc_wait()  # for the row scales of the prologue
    schedule = context.schedule
    num_work_tiles = count_work_tiles(schedule, CONFIG)
    if gl.program_id(0) < num_work_tiles:
        count = 0
        work = get_work_tile(gl.program_id(0), schedule, CONFIG)
        exponents = _prefetch_exponents(work, context, CONSUMER, CONFIG)
        for i in range(gl.program_id(0), num_work_tiles, gl.num_programs(0)):
            next_count = count + work.end_step - work.first_step
            # The last row tile of a group is often less than half full, where tiles are large.
            if GROUPED and BM == 128 and work.end_row - work.first_row <= BM // 2:
                work, exponents = _consume(
                    i, num_work_tiles, work, exponents, count, context, CONSUMER, BM // 2, CONFIG
                )
            else:
                work, exponents = _consume(i, num_work_tiles, work, exponents, count, context, CONSUMER, BM, CONFIG)
            count = next_count
        if not GROUPED:
            tma.store_wait(0)


@gluon.jit
def _prefetch_exponents(work: WorkTile, context: Context, CONSUMER: gl.constexpr, CONFIG: gl.constexpr) -> Exponents:
    """The exponents that a consumer begins a work tile with.

    NOTE: the last tiles may lie beyond the weight. The last one that exists is read, and its sums are not stored.
    """
    TILES_EACH: gl.constexpr = CONFIG.TILES_EACH
    BK: gl.constexpr = CONFIG.BK
    N, K = context.schedule.N, context.schedule.K
    FIRST: gl.constexpr = CONSUMER * TILES_EACH
    matrix, tile = work.matrix, work.weight_tile
    words = context.tensors.w_scale.to(gl.pointer_type(gl.int32), bitcast=True)
    words += gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    ptr0 = words + (matrix.to(gl.int64) * (N // 64) + gl.minimum(tile * TILES + FIRST, N // 64 - 1)) * (K // 2)
    ptr1 = words + (matrix.to(gl.int64) * (N // 64) + gl.minimum(tile * TILES + FIRST + 1, N // 64 - 1)) * (K // 2)
    start = work.first_step * BK // 256 * 128
    return Exponents(ptr0, ptr1, gl.load(ptr0 + start), gl.load(ptr1 + start))


@gluon.jit
def _consume(
    i: gl.tensor,
    num_work_tiles: gl.tensor,
    work: WorkTile,
    exponents: Exponents,
    count: gl.tensor,
    context: Context,
    CONSUMER: gl.constexpr,
    ROWS: gl.constexpr,
    CONFIG: gl.constexpr,
) -> tuple[WorkTile, Exponents]:
    """A consumer's share of work tile `i`, of which the first ROWS rows are of interest; `count` steps were before.

    Returns:
        the next work tile and its exponents, which are loaded during the epilogue of this one.
    """
    BK: gl.constexpr = CONFIG.BK
    K_TAIL: gl.constexpr = CONFIG.K_TAIL
    TILES_EACH: gl.constexpr = CONFIG.TILES_EACH
    buffers, tensors, schedule = context
    MMA_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, ROWS, 256 // buffers.x.dtype.primitive_bitwidth]
    )
    N, K = schedule.N, schedule.K
    ptr0, ptr1, next0, next1 = exponents
    acc0 = gl.zeros((64, ROWS), gl.float32, layout=MMA_LAYOUT)
    acc1 = gl.zeros((64, ROWS), gl.float32, layout=MMA_LAYOUT)
    # Every split has a step of whole columns. The last one has the tail as well.
    last = gl.minimum(work.end_step, K // 256 * (256 // BK)) if K_TAIL > 0 else work.end_step
    for step in range(work.first_step, last):
        packed0, packed1 = next0 >> (step * BK % 256 // 8), next1 >> (step * BK % 256 // 8)
        ahead = gl.minimum(step + 1, last - 1) * BK // 256 * 128
        next0, next1 = gl.load(ptr0 + ahead), gl.load(ptr1 + ahead)
        acc0, acc1 = _mainloop_step(acc0, acc1, packed0, packed1, count, buffers, CONSUMER, BK // 32, CONFIG)
        count += 1
    tile = work.weight_tile * TILES + CONSUMER * TILES_EACH
    if K_TAIL > 0 and last < work.end_step:
        for tail_block in gl.static_range(0, K_TAIL, BK // 32):
            block = K // 256 * 8 + tail_block
            # NOTE: no variable, as an assignment would make min() a tensor.
            packed0 = _tail_exponents(
                tensors.w_scale, work.matrix, tile, block, schedule, min(K_TAIL - tail_block, BK // 32)
            )
            packed1 = _tail_exponents(
                tensors.w_scale, work.matrix, tile + 1, block, schedule, min(K_TAIL - tail_block, BK // 32)
            )
            acc0, acc1 = _mainloop_step(
                acc0, acc1, packed0, packed1, count, buffers, CONSUMER, min(K_TAIL - tail_block, BK // 32), CONFIG
            )
            count += 1
    first0, first1 = gl.load(ptr0), gl.load(ptr1)
    following = get_work_tile(gl.minimum(i + gl.num_programs(0), num_work_tiles - 1), schedule, CONFIG)
    exponents = _prefetch_exponents(following, context, CONSUMER, CONFIG)
    y_smem = buffers.y.index(CONSUMER).slice(0, ROWS)
    if tile * 64 < N:
        epilogue(acc0, first0, tile, i, work, y_smem, tensors, schedule, CONFIG)
    if TILES_EACH == 2 and tile * 64 + 64 < N:
        epilogue(acc1, first1, tile + 1, i, work, y_smem, tensors, schedule, CONFIG)
    return following, exponents


@gluon.jit
def _tail_exponents(
    w_scale: gl.tensor, matrix: gl.tensor, tile: gl.tensor, block: gl.tensor, schedule: Schedule, BLOCKS: gl.constexpr
) -> gl.tensor:
    """A thread's packed exponents of the BLOCKS from `block` on, of a tile of weight rows."""
    N, K = schedule.N, schedule.K
    thread = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    row = (matrix.to(gl.int64) * (N // 64) + gl.minimum(tile, N // 64 - 1)) * 64
    return load_tail_exponents(w_scale, row, thread, block, K, BLOCKS)


@gluon.jit
def _mainloop_step(
    acc0: gl.tensor,
    acc1: gl.tensor,
    packed0: gl.tensor,
    packed1: gl.tensor,
    count: gl.tensor,
    buffers: SharedBuffers,
    CONSUMER: gl.constexpr,
    BLOCKS: gl.constexpr,
    CONFIG: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor]:
    """The sums of a consumer's tiles, and of one step of BLOCKS blocks with the packed exponents."""
    TILES_EACH: gl.constexpr = CONFIG.TILES_EACH
    STAGES: gl.constexpr = CONFIG.STAGES
    MMA_LAYOUT: gl.constexpr = acc0.type.layout
    ROWS: gl.constexpr = acc0.shape[1]
    w_smem, x_smem, _, full, empty = buffers
    stage = count % STAGES
    mbarrier.wait(full.index(stage), count // STAGES % 2)
    w0 = w_smem.index(stage * TILES + CONSUMER * TILES_EACH)
    w1 = w_smem.index(stage * TILES + CONSUMER * TILES_EACH + TILES_EACH - 1)
    if x_smem.dtype == gl.float16:
        x = x_smem.index(stage).slice(0, ROWS).permute((1, 0))
        acc0 = warpgroup_mma(load_fp16_operand(w0, packed0, MMA_LAYOUT, BLOCKS), x, acc0, is_async=True)
        if TILES_EACH == 2:
            acc1 = warpgroup_mma(load_fp16_operand(w1, packed1, MMA_LAYOUT, BLOCKS), x, acc1, is_async=True)
            acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
        else:
            acc0 = warpgroup_mma_wait(0, deps=[acc0])
    else:
        x0 = x_smem.index(stage * 2).slice(0, ROWS).permute((1, 0))
        x1 = x_smem.index(stage * 2 + 1).slice(0, ROWS).permute((1, 0))
        acc0 += _fp8_dot(w0, packed0, x0, x1, MMA_LAYOUT, BLOCKS)
        if TILES_EACH == 2:
            acc1 += _fp8_dot(w1, packed1, x0, x1, MMA_LAYOUT, BLOCKS)
    mbarrier.arrive(empty.index(stage), count=1)
    return acc0, acc1


@gluon.jit
def _fp8_dot(
    words: gl.shared_memory_descriptor,
    packed_exponents: gl.tensor,
    x0: gl.shared_memory_descriptor,
    x1: gl.shared_memory_descriptor,
    MMA_LAYOUT: gl.constexpr,
    BLOCKS: gl.constexpr,
) -> gl.tensor:
    """FP8 products over up to 256 columns, as many as FP8 tensor cores may add up.

    NOTE: all are decoded first. Meanwhile the tensor cores have what the other consumers decoded.
    """
    ROWS: gl.constexpr = x0.shape[1]
    zero = gl.zeros((64, ROWS), gl.float32, layout=MMA_LAYOUT)
    w0 = load_fp8_operand(words.slice(0, 32), packed_exponents, MMA_LAYOUT, BLOCKS if BLOCKS < 4 else 4)
    if BLOCKS > 4:
        w1 = load_fp8_operand(words.slice(32, 32), packed_exponents >> 16, MMA_LAYOUT, BLOCKS - 4)
    acc = warpgroup_mma(w0, x0, zero, use_acc=False, is_async=True)
    if BLOCKS > 4:
        acc = warpgroup_mma(w1, x1, acc, is_async=True)
    return warpgroup_mma_wait(0, deps=[acc])


@gluon.constexpr_function
def _config(*constants: Any) -> Config:
    return Config(*constants)


# One compilation serves every number of rows. No stride is among the numbers named here, so nothing is gained by
# specializing on them.
@gluon.jit(do_not_specialize=("M", "whole_tiles", "splits"))
def mxquant_mxfp4_persistent_gemm(
    w_desc: tma.tensor_descriptor,
    x_desc: tma.tensor_descriptor,
    w_scale: gl.tensor,
    x_scale: gl.tensor,
    bias: gl.tensor,
    y: tma.tensor_descriptor | gl.tensor,
    partial: gl.tensor,
    table: gl.tensor,
    M: gl.tensor,
    N: gl.tensor,
    K: gl.tensor,
    whole_tiles: gl.tensor,
    splits: gl.tensor,
    GROUPED: gl.constexpr,
    TILES_EACH: gl.constexpr,
    BM: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    K_TAIL: gl.constexpr,
    HAS_BIAS: gl.constexpr,
) -> None:
    CONFIG: gl.constexpr = _config(GROUPED, TILES_EACH, BM, BK, STAGES, K_TAIL, HAS_BIAS)
    CHUNKS: gl.constexpr = BK // 128
    w_smem = gl.allocate_shared_memory(w_desc.dtype, [STAGES * TILES, BK // 4, w_desc.block_shape[1]], w_desc.layout)
    x_smem = gl.allocate_shared_memory(x_desc.dtype, [STAGES * CHUNKS, BM, 128], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=TILES // TILES_EACH)
    Y_TYPE: gl.constexpr = y.dtype.element_ty if GROUPED else y.dtype
    y_smem = gl.allocate_shared_memory(Y_TYPE, [TILES // TILES_EACH, BM, 64], gl.NVMMASharedLayout(128, 16, 2))
    fence_async_shared()
    buffers = SharedBuffers(w_smem, x_smem, y_smem, full, empty)
    schedule = Schedule(M, N, K, whole_tiles, splits, table)
    context = Context(buffers, GlobalTensors(w_scale, x_scale, bias, y, partial), schedule)
    # NOTE: warps and registers of all but the first consumer. It has what is left over, no fewer than the others.
    if TILES_EACH == 2:
        gl.warp_specialize(
            [
                (_consumer, (context, 0, CONFIG)),
                (_consumer, (context, 1, CONFIG)),
                (_producer, (w_desc, x_desc, buffers, schedule, CONFIG)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (context, 0, CONFIG)),
                (_consumer, (context, 1, CONFIG)),
                (_consumer, (context, 2, CONFIG)),
                (_consumer, (context, 3, CONFIG)),
                (_producer, (w_desc, x_desc, buffers, schedule, CONFIG)),
            ],
            [4, 4, 4, 1],
            [112, 112, 112, 24],
        )
