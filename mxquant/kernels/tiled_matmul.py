"""A few rows times a tiled MXFP4 weight: the weight is decoded in registers, as the A operand of wgmma.

So the product is computed transposed, C^T = W X^T. Activations come from `fold`: E5M2 for MXFP4 activations, FP16 for
bf16 ones, both exact relative to one power of two a row, with the columns permuted as the registers hold the weight.

FP8 tensor cores add up with 14 bits below the largest partial sum, so there partial sums go to fp32 registers every 128
or 256 columns. Rows of activations that do not fold are recomputed block by block.

Each kernel is launched before the one whose result it reads has ended ("programmatic dependent launch"), and waits for
that result after its own preparations.

Shape suffixes: M input rows, N weight rows, K columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mxquant.kernels.fold import row_factor
from mxquant.kernels.tiled import decode_bytes, decode_halves, exact_tile, highest_exponent

# What the row's largest block exponent becomes in E5M2 and in FP16.
_TOP = tl.constexpr(13)


class _Shape(NamedTuple):
    """A configuration. Each was tested against float64: not all that compile are right, or fast."""

    rows_M: int
    tiles_N: int
    """Tiles of 64 weight rows."""
    columns_K: int
    promote: int
    programs: int
    """Programs that keep every multiprocessor's loads in flight; K is split where the tiles are fewer."""
    registers: int | None = None
    """Most registers a thread may take, where the compiler's choice leaves room for fewer programs."""


_FP8_SHAPES = (
    _Shape(16, 1, 256, 128, 550),
    _Shape(32, 2, 256, 256, 300),
    _Shape(64, 2, 256, 256, 300),
    _Shape(128, 1, 256, 256, 400),
)
# Sums of FP16 products are fp32's. Named so, the sum is not folded into the dot, which Triton 3.6 gets wrong.
_NEVER = 1 << 30
_FP16_SHAPES = (
    _Shape(16, 1, 256, _NEVER, 1000, registers=104),
    _Shape(32, 2, 128, _NEVER, 300),
    _Shape(64, 2, 128, _NEVER, 300),
    _Shape(128, 1, 128, _NEVER, 400),
)


def multiply_few(
    folded: tuple[Tensor, Tensor, Tensor],
    x_MK: Tensor,
    words: Tensor,
    bytes_: Tensor,
    bias_N: Tensor | None,
    n: int,
    scale_mode: str | None,
    dtype: torch.dtype,
) -> Tensor:
    """The product [M, N] in `dtype` of some rows with a tiled weight of N rows.

    Args:
        folded: of `fold_activation(x_MK, scale_mode, permute=True)`, or of `fold_bfloat16(x_MK)`.
        words, bytes_: of `pack_tiles`.
        bias_N: any float dtype, or None.
        scale_mode: of MXFP4 activations; None: they are not quantized.
    """
    (m, k), device = x_MK.shape, x_MK.device
    shapes = _FP16_SHAPES if scale_mode is None else _FP8_SHAPES
    shape = next((shape for shape in shapes if m <= shape.rows_M), shapes[-1])
    tiles = shape.tiles_N if n % (64 * shape.tiles_N) == 0 else 1
    programs, row_tiles = n // (64 * tiles), triton.cdiv(m, shape.rows_M)
    split = _split(programs * row_tiles, k // 256, shape.programs)
    y = torch.empty(m, n, dtype=dtype, device=device)
    partial = y if split == 1 else torch.empty(split, m, n, dtype=torch.float32, device=device)
    bias = y if bias_N is None else bias_N
    _multiply_few_kernel[(programs, split, row_tiles)](
        words, words.view(torch.int32), bytes_.view(torch.int32), bytes_, *folded, x_MK, bias, partial, m, n, k,
        x_MK.stride(0), BM=shape.rows_M, TILES=tiles, BK=shape.columns_K, SPLIT=split, PROMOTE=shape.promote,
        HAS_BIAS=bias_N is not None and split == 1, MODE=scale_mode, num_warps=4, num_stages=3,
        maxnreg=shape.registers, launch_pdl=True,
    )  # fmt: skip
    if split > 1:
        _add_parts_kernel[(triton.cdiv(n, 512), m)](
            partial, bias, y, m * n, n, SPLIT=split, HAS_BIAS=bias_N is not None, BLOCK=512, launch_pdl=True
        )
    return y


def _split(programs: int, steps: int, enough: int) -> int:
    """Into how many parts K is split, a divisor of its steps; they are added up in a fixed order."""
    wanted = max(1, enough // programs)
    return max(part for part in range(1, min(wanted, steps) + 1) if steps % part == 0)


@triton.jit
def _block_exponents(four: tl.tensor, step: tl.tensor, R: tl.constexpr) -> tl.tensor:
    """Relative exponents [R, 128] of pieces, from the int32 of 256 columns, of which a step may be one half."""
    shift = tl.arange(0, 4) * 8 if four.shape[0] * 4 == R else step % 2 * 16 + tl.arange(0, 2) * 8
    return tl.reshape((four[:, None, :] >> shift[None, :, None]) & 0x1F, (R, 128))


@triton.jit
def _decode_tile(packed: tl.tensor, exponent: tl.tensor, TILES: tl.constexpr, CHUNKS: tl.constexpr) -> tl.tensor:
    """E5M2 or FP16 values [64 * TILES, 128 * CHUNKS] of 16-byte pieces [R, 128 * 16 bytes] and exponents [R, 128]."""
    R: tl.constexpr = TILES * CHUNKS * 2
    UNITS: tl.constexpr = packed.shape[1] // 128
    # E5M2 bytes of 0, 0.5, 1, 1.5 and of 2, 3, 4, 6 times 2^(exponent - 14).
    low = tl.broadcast_to((exponent * 0x04040400 + 0x06040000)[:, :, None], (R, 128, UNITS))
    high = tl.broadcast_to((exponent * 0x04040404 + 0x0E0C0A08)[:, :, None], (R, 128, UNITS))
    word = tl.reshape(packed, (R, 128, UNITS))
    if packed.dtype == tl.uint8:
        half0, half1 = decode_bytes(word, low, high)
        w = tl.join(half0, half1).to(tl.float8e5, bitcast=True)
        w = tl.reshape(w, (TILES, CHUNKS, 2, 4, 8, 4, 4, 4, 2))  # tile chunk half warp g t j b h
        w = tl.permute(w, (0, 3, 2, 4, 1, 6, 8, 5, 7))
    else:
        even0, odd0, even1, odd1 = decode_halves(word, low, high)
        w = tl.join(tl.join(even0, odd0), tl.join(even1, odd1))
        w = tl.reshape(w, (TILES, CHUNKS, 2, 4, 8, 4, 4, 2, 2, 2))  # tile chunk half warp g t q e h o
        w = tl.permute(w, (0, 3, 2, 4, 1, 6, 9, 8, 5, 7))
    return tl.reshape(w, (64 * TILES, 128 * CHUNKS))


@triton.jit
def _piece_pointers(
    words: tl.tensor,
    scales: tl.tensor,
    tile: tl.tensor,
    first: tl.tensor,
    K: tl.constexpr,
    R: tl.constexpr,
    CHUNKS: tl.constexpr,
    UNITS: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Pointers to the pieces of the first step, and to the exponents of the first 256 columns."""
    # Two-dimensional pointers [piece, thread x 16 bytes] keep the copies to shared memory free of bank conflicts.
    piece = tl.arange(0, R)
    unit = tl.arange(0, 128 * UNITS)
    word_ptr = words + (tile + piece[:, None] // (2 * CHUNKS)) * (K * 2 * UNITS)
    word_ptr += (first * CHUNKS * 2 + piece[:, None] % (2 * CHUNKS)) * (128 * UNITS) + unit[None, :]
    PAIRS: tl.constexpr = (CHUNKS + 1) // 2  # int32 of exponents, of 256 columns each
    quad = tl.arange(0, R // (2 * CHUNKS) * PAIRS)
    scale_ptr = scales + (tile + quad[:, None] // PAIRS) * (K // 2)
    scale_ptr += (quad[:, None] % PAIRS) * 128 + tl.arange(0, 128)[None, :]
    return word_ptr, scale_ptr


@triton.jit
def _decode_rest(
    words: tl.tensor,
    scale_bytes: tl.tensor,
    tile: tl.tensor,
    chunk: tl.constexpr,
    K: tl.constexpr,
    TILES: tl.constexpr,
    UNITS: tl.constexpr,
) -> tl.tensor:
    """`_decode_tile` of a chunk beyond the last 256 columns; zeros beyond K."""
    BLOCKS: tl.constexpr = K // 32 - chunk * 4 if K // 32 - chunk * 4 < 4 else 4
    piece = tl.arange(0, 2 * TILES)  # tile, half
    tile_of = tile + piece[:, None] // 2
    half = piece[:, None] % 2
    unit = tl.arange(0, 128 * UNITS)[None, :]
    address = half * (32 * BLOCKS) + unit // (4 * UNITS) * BLOCKS + unit // UNITS % 4
    address = tile_of * (K * 2 * UNITS) + chunk * (256 * UNITS) + address * UNITS + unit % UNITS
    packed = tl.load(words + address, mask=unit // UNITS % 4 < BLOCKS, other=0)
    thread = tl.arange(0, 128)[None, :]
    address = tile_of * (K * 2) + chunk * 256 + (thread // 4 * BLOCKS + thread % 4) * 2 + half
    byte = tl.load(scale_bytes + address, mask=thread % 4 < BLOCKS, other=0)
    return _decode_tile(packed, byte.to(tl.int32) & 0x1F, TILES, 1)


@triton.jit
def _multiply_few_kernel(
    words: tl.tensor,
    words32: tl.tensor,
    scales: tl.tensor,
    scale_bytes: tl.tensor,
    x: tl.tensor,
    x_scale: tl.tensor,
    unfit: tl.tensor,
    x_before: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.constexpr,
    x_stride: tl.tensor,
    BM: tl.constexpr,
    TILES: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    PROMOTE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    MODE: tl.constexpr,
) -> None:
    BN: tl.constexpr = 64 * TILES
    CHUNKS: tl.constexpr = BK // 128
    R: tl.constexpr = TILES * CHUNKS * 2  # 16-byte pieces of a thread: tile, chunk, half
    WHOLE: tl.constexpr = K // 256 * 256
    WIDTH: tl.constexpr = (K + 127) // 128 * 128  # of a folded row
    STEPS: tl.constexpr = WHOLE // BK // SPLIT
    FP16: tl.constexpr = x.dtype.element_ty == tl.float16
    UNITS: tl.constexpr = 8 if FP16 else 16  # of a piece, as the decoder takes them
    source = words.to(tl.pointer_type(tl.uint16)) if FP16 else words
    tile = tl.program_id(0).to(tl.int64) * TILES
    first = tl.program_id(1) * STEPS
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    word_ptr, scale_ptr = _piece_pointers(source, scales, tile, first, K, R, CHUNKS, UNITS)
    x_ptr = x + m[None, :].to(tl.int64) * WIDTH + first * BK + tl.arange(0, BK)[:, None]
    inside = m < M
    total = tl.zeros((BN, BM), tl.float32)
    gdc_launch_dependents()
    gdc_wait()  # for the folded activations
    for step in range(first, first + STEPS):
        packed = tl.load(word_ptr)
        four = tl.load(scale_ptr + step * BK // 256 * 128)
        x_tile = tl.load(x_ptr, mask=inside[None, :], other=0.0)
        w = _decode_tile(packed, _block_exponents(four, step, R), TILES, CHUNKS)
        total += tl.dot(w, x_tile, max_num_imprecise_acc=PROMOTE)
        word_ptr += CHUNKS * 256 * UNITS
        x_ptr += BK
    if WHOLE < K and tl.program_id(1) == SPLIT - 1:
        for chunk in tl.static_range(WHOLE // 128, WIDTH // 128):
            w = _decode_rest(source, scale_bytes, tile, chunk, K, TILES, UNITS)
            column = chunk * 128 + tl.arange(0, 128)
            x_tile = tl.load(x + m[None, :].to(tl.int64) * WIDTH + column[:, None], mask=inside[None, :], other=0.0)
            total += tl.dot(w, x_tile, max_num_imprecise_acc=PROMOTE if PROMOTE > BK else 128)
    n = tile * 64 + tl.arange(0, BN)
    w_factor = row_factor(highest_exponent(scale_bytes, n, K), _TOP)
    total = total * w_factor[:, None] * tl.load(x_scale + m, mask=inside, other=0.0)[None, :]
    end_block = tl.where(tl.program_id(1) == SPLIT - 1, K // 32, (first + STEPS) * (BK // 32))
    if tl.max(tl.load(unfit + m, mask=inside, other=0), 0) != 0:
        total = exact_tile(x_before, words32, scale_bytes, n, m, inside, first * (BK // 32), end_block,
                           K, x_stride, MODE, BN, BM)  # fmt: skip
    if HAS_BIAS:
        total += tl.load(bias + n).to(tl.float32)[:, None]
    y += tl.program_id(1).to(tl.int64) * M * N
    tl.store(y + m[None, :].to(tl.int64) * N + n[:, None], total.to(y.dtype.element_ty), mask=inside[None, :])


@triton.jit
def _add_parts_kernel(
    partial: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    part_size: tl.tensor,
    N: tl.tensor,
    SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.program_id(1).to(tl.int64) * N + n
    gdc_wait()
    total = tl.load(partial + at, mask=n < N, other=0.0)
    for part in tl.static_range(1, SPLIT):
        total += tl.load(partial + part * part_size + at, mask=n < N, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=n < N)
