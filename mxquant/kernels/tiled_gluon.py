"""The kernel of `tiled_specialized`, in Gluon, Triton's language of layouts and warps.

Of a program's warps, one has tiles of the weight and of the activations copied to shared memory, some steps ahead. The
others, in two groups of four or in four, each decode their tiles of 64 weight rows and multiply them: decoded values
are the A operand of wgmma, in registers, so that C^T = W X^T is what is computed, as in `tiled_decode`. All that the
groups wait for each other for is their turn at the tensor cores.

Triton's interpreter doesn't run Gluon. Without a GPU, tests see that this compiles.

Shape suffixes: M input rows, N weight rows, K columns. A piece of work is a tile of the result, 64 * TILES weight rows
by BM input rows, or a part of its columns; a step is BK columns of it; `sizes` are M, N, K, the number of pieces that
are whole tiles, and the parts of each other tile; `tensors` are the bytes of the weight's scales, the activations'
scales, the bias, the result and what parts are stored in.
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
from mxquant.kernels.overlap import await_previous, let_next_start
from mxquant.kernels.tiled import highest_exponent
from mxquant.kernels.tiled_decode import TOP
from mxquant.kernels.word_decode import BYTES_PTX, HALVES_PTX, tables

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
def _work_of(i: gl.tensor, sizes: gl.tuple, BM: gl.constexpr, BK: gl.constexpr) -> tuple[gl.tensor, ...]:
    """Of the i-th piece of work: row tile, weight tile, first step and the one after its last."""
    M, N, K, whole, parts = sizes
    tile = gl.minimum(i, whole + (i - whole) // parts)
    m, n = place_of(tile, M, N, BM)
    steps = K // BK
    part = gl.maximum(i - whole, 0) % parts
    begin = gl.where(i < whole, 0, steps * part // parts)
    end = gl.where(i < whole, steps, steps * (part + 1) // parts)
    return m, n, begin, end


@gluon.jit
def _count(sizes: gl.tuple, BM: gl.constexpr) -> gl.tensor:
    """Pieces of work."""
    M, N, _, whole, parts = sizes
    tiles = (M + BM - 1) // BM * ((N + 64 * TILES - 1) // (64 * TILES))
    return whole + (tiles - whole) * parts


@gluon.jit
def _copy_ahead(
    w_desc: tma.tensor_descriptor,
    x_desc: tma.tensor_descriptor,
    buffers: gl.tuple,
    sizes: gl.tuple,
    BM: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """The warp that has tiles copied: into a stage as soon as all groups have let go of it."""
    w_smem, x_smem, filled, emptied, _ = buffers
    CHUNKS: gl.constexpr = BK // 128
    BYTES: gl.constexpr = TILES * BK * 32 + BM * BK * x_smem.dtype.primitive_bitwidth // 8
    steps = sizes[2] // BK
    let_next_start()
    await_previous()  # for the folded activations
    count = 0
    for i in range(gl.program_id(0), _count(sizes, BM), gl.num_programs(0)):
        m, n, begin, end = _work_of(i, sizes, BM, BK)
        for step in range(begin, end):
            stage = count % STAGES
            mbarrier.wait(emptied.index(stage), count // STAGES % 2 ^ 1)
            bar = filled.index(stage)
            mbarrier.expect(bar, BYTES)
            for tile in gl.static_range(TILES):
                row = ((n * TILES + tile) * steps + step) * (BK // 4)
                _copy(w_desc, [row, 0], bar, w_smem.index(stage * TILES + tile))
            for chunk in gl.static_range(CHUNKS):
                column = step * BK + chunk * 128
                _copy(x_desc, [m * BM, column], bar, x_smem.index(stage * CHUNKS + chunk))
            count += 1


@gluon.jit
def _multiply(
    buffers: gl.tuple,
    tensors: gl.tuple,
    sizes: gl.tuple,
    GROUP: gl.constexpr,
    EACH: gl.constexpr,
    BM: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
) -> None:
    """A group of warps, with one or two of a program's four tiles of weight rows."""
    w_smem, x_smem, filled, emptied, turns = buffers
    _M, N, K, _whole, _parts = sizes
    FP16: gl.constexpr = x_smem.dtype == gl.float16
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16 if FP16 else 32])
    thread = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    scales = tensors[0].to(gl.pointer_type(gl.int32), bitcast=True)
    await_previous()  # for the scales of the activations
    count = 0
    for i in range(gl.program_id(0), _count(sizes, BM), gl.num_programs(0)):
        m, n, begin, end = _work_of(i, sizes, BM, BK)
        tile = n * TILES + GROUP * EACH
        total0, total1 = gl.zeros((64, BM), gl.float32, layout=MMA), gl.zeros((64, BM), gl.float32, layout=MMA)
        # Four exponents of a thread: of 256 columns. The last tiles may lie beyond the weight, and come to nothing.
        at0 = scales + gl.minimum(tile, N // 64 - 1).to(gl.int64) * (K // 2) + thread
        at1 = scales + gl.minimum(tile + 1, N // 64 - 1).to(gl.int64) * (K // 2) + thread
        next0, next1 = gl.load(at0 + begin * BK // 256 * 128), gl.load(at1 + begin * BK // 256 * 128)
        for step in range(begin, end):
            stage = count % STAGES
            four0, four1 = next0 >> (step * BK % 256 // 8), next1 >> (step * BK % 256 // 8)
            ahead = gl.minimum(step + 1, end - 1) * BK // 256 * 128
            next0, next1 = gl.load(at0 + ahead), gl.load(at1 + ahead)
            mbarrier.wait(filled.index(stage), count // STAGES % 2)
            w0 = w_smem.index(stage * TILES + GROUP * EACH)
            w1 = w_smem.index(stage * TILES + GROUP * EACH + EACH - 1)
            if FP16:
                x = x_smem.index(stage).permute((1, 0))
                w = _halves(w0, four0, MMA)
                _await_turn(turns, count, GROUP)
                total0 = warpgroup_mma(w, x, total0, is_async=True)
                if EACH == 2:
                    total1 = warpgroup_mma(_halves(w1, four1, MMA), x, total1, is_async=True)
                _pass_turn(turns, GROUP, EACH)
                if EACH == 2:
                    total0, total1 = warpgroup_mma_wait(0, deps=[total0, total1])
                else:
                    total0 = warpgroup_mma_wait(0, deps=[total0])
            else:
                x0 = x_smem.index(stage * 2).permute((1, 0))
                x1 = x_smem.index(stage * 2 + 1).permute((1, 0))
                total0 += _sum_of_256(w0, four0, x0, x1, turns, count * EACH, GROUP, EACH, MMA, BM)
                if EACH == 2:
                    total1 += _sum_of_256(w1, four1, x0, x1, turns, count * EACH + 1, GROUP, EACH, MMA, BM)
            mbarrier.arrive(emptied.index(stage), count=1)
            count += 1
        if tile * 64 < N:
            _finish(total0, tile, i, m, begin, tensors, sizes, MMA, BM, HAS_BIAS)
        if EACH == 2 and tile * 64 + 64 < N:
            _finish(total1, tile + 1, i, m, begin, tensors, sizes, MMA, BM, HAS_BIAS)


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
    BM: gl.constexpr,
) -> gl.tensor:
    """FP8 products over 256 columns, as many as FP8 tensor cores may add up. Half are decoded during the other half."""
    zero = gl.zeros((64, BM), gl.float32, layout=MMA)
    w = _bytes(words.slice(0, 32), four, MMA)
    _await_turn(turns, turn, GROUP)
    total = warpgroup_mma(w, x0, zero, use_acc=False, is_async=True)
    total = warpgroup_mma(_bytes(words.slice(32, 32), four >> 16, MMA), x1, total, is_async=True)
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
def _tables_of(pieces: gl.tensor, four: gl.tensor) -> tuple[gl.tensor, ...]:
    """The pieces [2 (half), 128 (thread), units] of a chunk of 128 columns, and for each unit the tables of its block
    (`word_decode`), of exponents in the lower half of `four`."""
    LAYOUT: gl.constexpr = pieces.type.layout
    half = gl.arange(0, 2, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    four = gl.convert_layout(four, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)), assert_trivial=True)
    exponent = (four[None, :] >> (half * 8)[:, None]) & 0x1F
    low, high = tables(exponent)
    return gl.broadcast(low[:, :, None], pieces)[0], gl.broadcast(high[:, :, None], pieces)[0]


@gluon.jit
def _bytes(words: gl.shared_memory_descriptor, four: gl.tensor, MMA: gl.constexpr) -> gl.tensor:
    """E5M2 values [64, 128], as wgmma takes them from registers, of a chunk in shared memory, uint8 [32, 128]."""
    LOAD: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    pieces = gl.reshape(words.load(LOAD), (2, 128, 16))
    low, high = _tables_of(pieces, four)
    half0, half1 = gl.inline_asm_elementwise(
        BYTES_PTX, "=&r,=&r,r,r,r,r,r,r,r,r,r", [pieces, low, high], dtype=(gl.uint8, gl.uint8), is_pure=True, pack=4
    )
    w = gl.join(half0, half1).to(gl.float8e5, bitcast=True)
    w = gl.permute(gl.reshape(w, (2, 4, 8, 4, 4, 4, 2)), (1, 0, 2, 4, 6, 3, 5))  # half warp g t j b h
    return gl.convert_layout(gl.reshape(w, (64, 128)), gl.DotOperandLayout(0, MMA, 4), assert_trivial=True)


@gluon.jit
def _halves(words: gl.shared_memory_descriptor, four: gl.tensor, MMA: gl.constexpr) -> gl.tensor:
    """The same in FP16, of uint16 [32, 64]."""
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    pieces = gl.reshape(words.load(LOAD), (2, 128, 8))
    low, high = _tables_of(pieces, four)
    even0, odd0, even1, odd1 = gl.inline_asm_elementwise(
        HALVES_PTX, "=&r,=&r,=&r,=&r,r,r,r,r,r", [pieces, low, high],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=2,
    )  # fmt: skip
    w = gl.join(gl.join(even0, odd0), gl.join(even1, odd1))
    w = gl.permute(gl.reshape(w, (2, 4, 8, 4, 4, 2, 2, 2)), (1, 0, 2, 4, 7, 6, 3, 5))  # half warp g t q e h o
    return gl.convert_layout(gl.reshape(w, (64, 128)), gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)


@gluon.jit
def _finish(
    total: gl.tensor,
    tile: gl.tensor,
    i: gl.tensor,
    m_tile: gl.tensor,
    begin: gl.tensor,
    tensors: gl.tuple,
    sizes: gl.tuple,
    MMA: gl.constexpr,
    BM: gl.constexpr,
    HAS_BIAS: gl.constexpr,
) -> None:
    """Store the sums of a tile of weight rows, or of a part of its columns."""
    bytes_, x_scale, bias, y, partial = tensors
    M, N, K, whole, _ = sizes
    n = tile * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, MMA))
    m = m_tile * BM + gl.arange(0, BM, layout=gl.SliceLayout(0, MMA))
    total *= (
        row_factor(highest_exponent(bytes_, n.to(gl.int64), K), TOP)[:, None]
        * gl.load(x_scale + m, mask=m < M, other=0.0)[None, :]
    )
    if HAS_BIAS:
        total += gl.where(begin == 0, gl.load(bias + n).to(gl.float32), 0.0)[:, None]
    # Threads that have neighbours in y.
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    n = gl.arange(0, 64, layout=gl.SliceLayout(1, OUT))
    m = gl.arange(0, BM, layout=gl.SliceLayout(0, OUT))
    if i < whole:
        m += m_tile * BM
        at = m.to(gl.int64)[None, :] * N + (tile * 64 + n)[:, None]
        gl.store(y + at, gl.convert_layout(total.to(y.dtype.element_ty), OUT), mask=(m < M)[None, :])
    else:
        partial += ((i - whole) * TILES + tile % TILES).to(gl.int64) * (BM * 64)
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
    M: gl.tensor,
    N: gl.tensor,
    K: gl.tensor,
    whole: gl.tensor,
    parts: gl.tensor,
    EACH: gl.constexpr,
    BM: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
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
    sizes = (M, N, K, whole, parts)
    # Registers: the first group has what is left over, no fewer than the others.
    if EACH == 2:
        gl.warp_specialize(
            [
                (_multiply, (buffers, tensors, sizes, 0, 2, BM, BK, STAGES, HAS_BIAS)),
                (_multiply, (buffers, tensors, sizes, 1, 2, BM, BK, STAGES, HAS_BIAS)),
                (_copy_ahead, (w_desc, x_desc, buffers, sizes, BM, BK, STAGES)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (buffers, tensors, sizes, 0, 1, BM, BK, STAGES, HAS_BIAS)),
                (_multiply, (buffers, tensors, sizes, 1, 1, BM, BK, STAGES, HAS_BIAS)),
                (_multiply, (buffers, tensors, sizes, 2, 1, BM, BK, STAGES, HAS_BIAS)),
                (_multiply, (buffers, tensors, sizes, 3, 1, BM, BK, STAGES, HAS_BIAS)),
                (_copy_ahead, (w_desc, x_desc, buffers, sizes, BM, BK, STAGES)),
            ],
            [4, 4, 4, 1],
            [112, 112, 112, 24],
        )
