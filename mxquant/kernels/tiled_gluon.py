"""The kernel of `tiled_specialized`, in Gluon, Triton's language of layouts and warps.

Of a program's warps, one has tiles of the weight and of the activations copied to shared memory, some steps ahead. The
others, in two groups of four or in four, each decode their tiles of 64 weight rows and multiply them: decoded values
are the A operand of wgmma, in registers, so that C^T = W X^T is what is computed, as in `tiled_decode`. A group decodes
while the tensor cores have what another one decoded.

Triton's interpreter doesn't run Gluon. Without a GPU, tests see that this compiles.

Shape suffixes: M input rows, N weight rows, K columns. A piece of work is a tile of the result, 64 * TILES weight rows
by BM input rows, or a part of its columns; a step is BK columns of it; `sizes` are M, N, K, the number of pieces that
are whole tiles, and the parts of each other tile; `tensors` are the bytes of the weight's scales, the activations'
scales, the bias and what parts are stored in.
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
from mxquant.kernels.tiled_decode import TOP
from mxquant.kernels.word_decode import BYTES_PTX, HALVES_PTX, tables

TILES = tl.constexpr(4)
"""Tiles of 64 weight rows a program."""
# Row tiles that programs work through for one weight tile before the next: they stay in the L2 cache.
_GROUP = tl.constexpr(16)
# The name of later versions of Triton, and of 3.6.
_copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


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
    w_smem, x_smem, _, filled, emptied = buffers
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
    y_desc: tma.tensor_descriptor,
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
    w_smem, x_smem, y_smem, filled, emptied = buffers
    _M, N, K, _whole, _parts = sizes
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 256 // x_smem.dtype.primitive_bitwidth])
    pieces = _count(sizes, BM)
    await_previous()  # for the scales of the activations
    count = 0
    m, n, begin, end = _work_of(gl.program_id(0), sizes, BM, BK)
    tile = n * TILES + GROUP * EACH
    at0, at1, next0, next1 = _first_exponents(tensors[0], tile, begin * BK, N, K)
    for i in range(gl.program_id(0), pieces, gl.num_programs(0)):
        total0, total1 = gl.zeros((64, BM), gl.float32, layout=MMA), gl.zeros((64, BM), gl.float32, layout=MMA)
        for step in range(begin, end):
            stage = count % STAGES
            four0, four1 = next0 >> (step * BK % 256 // 8), next1 >> (step * BK % 256 // 8)
            ahead = gl.minimum(step + 1, end - 1) * BK // 256 * 128
            next0, next1 = gl.load(at0 + ahead), gl.load(at1 + ahead)
            mbarrier.wait(filled.index(stage), count // STAGES % 2)
            w0 = w_smem.index(stage * TILES + GROUP * EACH)
            w1 = w_smem.index(stage * TILES + GROUP * EACH + EACH - 1)
            total0, total1 = _add_products(total0, total1, w0, w1, four0, four1, x_smem, stage, EACH, MMA, BM)
            mbarrier.arrive(emptied.index(stage), count=1)
            count += 1
        highest0, highest1 = gl.load(at0), gl.load(at1)
        m_tile, done, first = m, tile, begin
        # Those of the next piece come in while this one is finished.
        m, n, begin, end = _work_of(gl.minimum(i + gl.num_programs(0), pieces - 1), sizes, BM, BK)
        tile = n * TILES + GROUP * EACH
        at0, at1, next0, next1 = _first_exponents(tensors[0], tile, begin * BK, N, K)
        y = y_smem.index(GROUP)
        if done * 64 < N:
            _finish(total0, highest0, done, i, m_tile, first, y_desc, y, tensors, sizes, MMA, BM, HAS_BIAS)
        if EACH == 2 and done * 64 + 64 < N:
            _finish(total1, highest1, done + 1, i, m_tile, first, y_desc, y, tensors, sizes, MMA, BM, HAS_BIAS)
    tma.store_wait(0)


@gluon.jit
def _first_exponents(
    bytes_: gl.tensor, tile: gl.tensor, column: gl.tensor, N: gl.tensor, K: gl.tensor
) -> tuple[gl.tensor, ...]:
    """Where the first four exponents of each thread lie, of two tiles of weight rows, and those four that `column` is
    of: a thread has four of 256 columns. A program's last tiles may lie beyond the weight, and come to nothing.
    """
    words = bytes_.to(gl.pointer_type(gl.int32), bitcast=True)
    thread = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    at0 = words + gl.minimum(tile, N // 64 - 1).to(gl.int64) * (K // 2) + thread
    at1 = words + gl.minimum(tile + 1, N // 64 - 1).to(gl.int64) * (K // 2) + thread
    return at0, at1, gl.load(at0 + column // 256 * 128), gl.load(at1 + column // 256 * 128)


@gluon.jit
def _add_products(
    total0: gl.tensor,
    total1: gl.tensor,
    w0: gl.shared_memory_descriptor,
    w1: gl.shared_memory_descriptor,
    four0: gl.tensor,
    four1: gl.tensor,
    x_smem: gl.shared_memory_descriptor,
    stage: gl.tensor,
    EACH: gl.constexpr,
    MMA: gl.constexpr,
    BM: gl.constexpr,
) -> tuple[gl.tensor, ...]:
    """The totals of one or two tiles of weight rows, and the products of a step."""
    if x_smem.dtype == gl.float16:
        x = x_smem.index(stage).permute((1, 0))
        total0 = warpgroup_mma(_halves(w0, four0, MMA), x, total0, is_async=True)
        if EACH == 2:
            total1 = warpgroup_mma(_halves(w1, four1, MMA), x, total1, is_async=True)
            total0, total1 = warpgroup_mma_wait(0, deps=[total0, total1])
        else:
            total0 = warpgroup_mma_wait(0, deps=[total0])
    else:
        x0, x1 = x_smem.index(stage * 2).permute((1, 0)), x_smem.index(stage * 2 + 1).permute((1, 0))
        total0 += _sum_of_256(w0, four0, x0, x1, MMA, BM)
        if EACH == 2:
            total1 += _sum_of_256(w1, four1, x0, x1, MMA, BM)
    return total0, total1


@gluon.jit
def _sum_of_256(
    words: gl.shared_memory_descriptor,
    four: gl.tensor,
    x0: gl.shared_memory_descriptor,
    x1: gl.shared_memory_descriptor,
    MMA: gl.constexpr,
    BM: gl.constexpr,
) -> gl.tensor:
    """FP8 products over 256 columns, as many as FP8 tensor cores may add up. All are decoded first: meanwhile the
    tensor cores have what the other groups decoded.
    """
    zero = gl.zeros((64, BM), gl.float32, layout=MMA)
    w0, w1 = _bytes(words.slice(0, 32), four, MMA), _bytes(words.slice(32, 32), four >> 16, MMA)
    total = warpgroup_mma(w0, x0, zero, use_acc=False, is_async=True)
    total = warpgroup_mma(w1, x1, total, is_async=True)
    return warpgroup_mma_wait(0, deps=[total])


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
def _finish(
    total: gl.tensor,
    four: gl.tensor,
    tile: gl.tensor,
    i: gl.tensor,
    m_tile: gl.tensor,
    begin: gl.tensor,
    y_desc: tma.tensor_descriptor,
    y_smem: gl.shared_memory_descriptor,
    tensors: gl.tuple,
    sizes: gl.tuple,
    MMA: gl.constexpr,
    BM: gl.constexpr,
    HAS_BIAS: gl.constexpr,
) -> None:
    """Store the sums of a tile of weight rows, or of a part of its columns."""
    _, x_scale, bias, partial = tensors
    whole = sizes[3]
    n = gl.arange(0, 64, layout=gl.SliceLayout(1, MMA))
    m = gl.arange(0, BM, layout=gl.SliceLayout(0, MMA))
    total *= row_factor(_highest_of(four, MMA), TOP)[:, None] * gl.load(x_scale + m_tile * BM + m)[None, :]
    if HAS_BIAS:
        total += gl.where(begin == 0, gl.load(bias + tile * 64 + n).to(gl.float32), 0.0)[:, None]
    if i < whole:
        tma.store_wait(0)  # until what was stored from here before is read
        y_smem.permute((1, 0)).store(total.to(y_smem.dtype))
        fence_async_shared()
        _store(y_desc, [m_tile * BM, tile * 64], y_smem)
    else:
        partial += ((i - whole) * TILES + tile % TILES).to(gl.int64) * (BM * 64)
        gl.store(partial + (n[:, None] * BM + m[None, :]), total)


# Compiled once for every number of rows: the numbers below are divided by, not multiplied to addresses.
@gluon.jit(do_not_specialize=("M", "whole", "parts"))
def product_kernel(
    w_desc: tma.tensor_descriptor,
    x_desc: tma.tensor_descriptor,
    y_desc: tma.tensor_descriptor,
    bytes_: gl.tensor,
    x_scale: gl.tensor,
    bias: gl.tensor,
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
    y_smem = gl.allocate_shared_memory(y_desc.dtype, [TILES // EACH, BM, 64], y_desc.layout)
    fence_async_shared()
    buffers = (w_smem, x_smem, y_smem, filled, emptied)
    tensors = (bytes_, x_scale, bias, partial)
    sizes = (M, N, K, whole, parts)
    # Registers: the first group has what is left over, no fewer than the others.
    if EACH == 2:
        gl.warp_specialize(
            [
                (_multiply, (y_desc, buffers, tensors, sizes, 0, 2, BM, BK, STAGES, HAS_BIAS)),
                (_multiply, (y_desc, buffers, tensors, sizes, 1, 2, BM, BK, STAGES, HAS_BIAS)),
                (_copy_ahead, (w_desc, x_desc, buffers, sizes, BM, BK, STAGES)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (y_desc, buffers, tensors, sizes, 0, 1, BM, BK, STAGES, HAS_BIAS)),
                (_multiply, (y_desc, buffers, tensors, sizes, 1, 1, BM, BK, STAGES, HAS_BIAS)),
                (_multiply, (y_desc, buffers, tensors, sizes, 2, 1, BM, BK, STAGES, HAS_BIAS)),
                (_multiply, (y_desc, buffers, tensors, sizes, 3, 1, BM, BK, STAGES, HAS_BIAS)),
                (_copy_ahead, (w_desc, x_desc, buffers, sizes, BM, BK, STAGES)),
            ],
            [4, 4, 4, 1],
            [112, 112, 112, 24],
        )
