"""MXFP4 x MXFP4 on FP8 tensor cores with exact operands, from tiled weights (`tiles`) and folded activations (`fold`).

- `multiply_few`: few rows. Weights are decoded in registers, as the A operand of wgmma, so the product is computed
  transposed, C^T = W X^T. A byte permute turns four codes into four E5M2 bytes: the table of a block is its exponent.
- `expand`: many rows. The weight becomes E4M3 once, in a workspace, for `torch._scaled_mm`; `repair` follows that.

FP8 tensor cores add up with 14 bits below the largest partial sum, so partial sums go to fp32 registers every 128 or
256 columns. Rows of activations that E5M2 could not hold are recomputed block by block, with exact sums.

Shape suffixes: M input rows, N weight rows, K columns.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxquant.formats.element import element_values
from mxquant.formats.spec import ELEMENT_FORMATS
from mxquant.kernels.fold import quantize_mxfp4, row_factor
from mxquant.kernels.launch import cached_launch, cdiv
from mxquant.kernels.triton_numerics import e8m0_to_float, fp32_bits

# What the row's largest block exponent becomes in E5M2 (`multiply_few`) and in E4M3 (`expand`): 6 x 2^6 <= 448.
_DECODE_TOP, _EXPAND_TOP = tl.constexpr(13), 6


class _Shape(NamedTuple):
    """A configuration of `multiply_few`. Each was tested against float64: not all that compile are right, or fast."""

    rows_M: int
    tiles_N: int
    promote: int
    programs: int
    """Programs that keep every multiprocessor's loads in flight; K is split where the tiles are fewer."""


_SHAPES = (_Shape(16, 1, 128, 550), _Shape(32, 1, 128, 550), _Shape(64, 2, 256, 300), _Shape(128, 1, 256, 400))
MOST_ROWS = 256
_COLUMNS = 256


def multiply_few(
    folded: tuple[Tensor, Tensor, Tensor],
    x_MK: Tensor,
    words: Tensor,
    bytes_: Tensor,
    bias_N: Tensor | None,
    n: int,
    scale_mode: str,
    dtype: torch.dtype,
) -> Tensor:
    """The product [M, N] in `dtype` of up to `MOST_ROWS` rows with a tiled weight of N rows.

    Args:
        folded: of `fold_activation(x_MK, scale_mode, permute=True)`.
        words, bytes_: of `pack_tiles`.
        bias_N: any float dtype, or None.
    """
    (m, k), device = x_MK.shape, x_MK.device
    shape = next((shape for shape in _SHAPES if m <= shape.rows_M), _SHAPES[-1])
    tiles = shape.tiles_N if n % (64 * shape.tiles_N) == 0 else 1
    programs, row_tiles = n // (64 * tiles), cdiv(m, shape.rows_M)
    split = _split(programs * row_tiles, k // _COLUMNS, shape.programs)
    y = torch.empty(m, n, dtype=dtype, device=device)
    partial = y if split == 1 else torch.empty(split, m, n, dtype=torch.float32, device=device)
    bias = y if bias_N is None else bias_N
    _multiply_few_kernel[(programs, split, row_tiles)](
        words, words.view(torch.int32), bytes_.view(torch.int32), bytes_, *folded, x_MK, bias, partial, m, n, k,
        x_MK.stride(0), BM=shape.rows_M, TILES=tiles, BK=_COLUMNS, SPLIT=split, PROMOTE=shape.promote,
        HAS_BIAS=bias_N is not None and split == 1, MODE=scale_mode, num_warps=4, num_stages=3,
    )  # fmt: skip
    if split > 1:
        _add_parts_kernel[(cdiv(n, 512), m)](
            partial, bias, y, m * n, n, SPLIT=split, HAS_BIAS=bias_N is not None, BLOCK=512
        )
    return y


@functools.lru_cache(maxsize=4096)
def _split(programs: int, steps: int, enough: int) -> int:
    """Into how many parts K is split, a divisor of its steps; they are added up in a fixed order."""
    wanted = max(1, enough // programs)
    return max(part for part in range(1, min(wanted, steps) + 1) if steps % part == 0)


@triton.jit
def _decode_bytes(word: tl.tensor, low: tl.tensor, high: tl.tensor) -> tuple[tl.tensor, ...]:
    """Four bytes of a word (8 codes) to 2 x 4 FP8 bytes; `low` and `high` hold the bytes of magnitudes 0-3 and 4-7."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 index, upper, sign;
        and.b32 index, $2, 0x77777777;
        prmt.b32 $0, $3, $7, index;
        shr.u32 upper, index, 16;
        prmt.b32 $1, $3, $7, upper;
        shl.b32 sign, $2, 4;
        lop3.b32 $0, sign, 0x80808080, $0, 0xEA;
        lop3.b32 $1, $2, 0x80808080, $1, 0xEA;
        }""",
        "=&r,=&r,r,r,r,r,r,r,r,r,r",
        [word, low, high],
        dtype=(tl.uint8, tl.uint8),
        is_pure=True,
        pack=4,
    )


@triton.jit
def _decode_tile(packed: tl.tensor, four: tl.tensor, TILES: tl.constexpr, CHUNKS: tl.constexpr) -> tl.tensor:
    """E5M2 bytes [64 * TILES, 128 * CHUNKS] of 16-byte pieces [R, 128 * 16] and their exponents [R / 4, 128]."""
    R: tl.constexpr = TILES * CHUNKS * 2
    shift = tl.arange(0, 4) * 8
    exponent = tl.reshape((four[:, None, :] >> shift[None, :, None]) & 0x1F, (R, 128))
    # E5M2 bytes of 0, 0.5, 1, 1.5 and of 2, 3, 4, 6 times 2^(exponent - 14).
    low = tl.broadcast_to((exponent * 0x04040400 + 0x06040000)[:, :, None], (R, 128, 16))
    high = tl.broadcast_to((exponent * 0x04040404 + 0x0E0C0A08)[:, :, None], (R, 128, 16))
    half0, half1 = _decode_bytes(tl.reshape(packed, (R, 128, 16)), low, high)
    w = tl.reshape(tl.join(half0, half1), (TILES, CHUNKS, 2, 4, 8, 4, 4, 4, 2))  # tile chunk half warp g t j b h
    return tl.reshape(tl.permute(w, (0, 3, 2, 4, 1, 6, 8, 5, 7)), (64 * TILES, 128 * CHUNKS))


@cached_launch
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
    STEPS: tl.constexpr = K // BK // SPLIT
    tile = tl.program_id(0).to(tl.int64) * TILES
    first = tl.program_id(1) * STEPS
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    piece = tl.arange(0, R)
    byte = tl.arange(0, 128 * 16)
    # Two-dimensional pointers [piece, thread x 16] keep the copies to shared memory free of bank conflicts.
    word_ptr = words + (tile + piece[:, None] // (2 * CHUNKS)) * (K // 128 * 4096) + first * (CHUNKS * 4096)
    word_ptr += (piece[:, None] % (2 * CHUNKS)) * 2048 + byte[None, :]
    quad = tl.arange(0, R // 4)  # four pieces' exponents in one int32
    scale_ptr = scales + (tile + quad[:, None] // (CHUNKS // 2)) * (K // 256 * 128) + first * (CHUNKS // 2 * 128)
    scale_ptr += (quad[:, None] % (CHUNKS // 2)) * 128 + tl.arange(0, 128)[None, :]
    x_ptr = x + m[None, :].to(tl.int64) * K + first * BK + tl.arange(0, BK)[:, None]
    inside = m < M
    total = tl.zeros((BN, BM), tl.float32)
    for _ in range(STEPS):
        packed = tl.load(word_ptr)
        four = tl.load(scale_ptr)
        x_tile = tl.load(x_ptr, mask=inside[None, :], other=0.0)
        w = _decode_tile(packed, four, TILES, CHUNKS)
        total += tl.dot(w.to(tl.float8e5, bitcast=True), x_tile, max_num_imprecise_acc=PROMOTE)
        word_ptr += CHUNKS * 4096
        scale_ptr += CHUNKS // 2 * 128
        x_ptr += BK
    n = tile * 64 + tl.arange(0, BN)
    w_factor = row_factor(_highest_exponent(scale_bytes, n, K), _DECODE_TOP)
    total = total * w_factor[:, None] * tl.load(x_scale + m, mask=inside, other=0.0)[None, :]
    if tl.max(tl.load(unfit + m, mask=inside, other=0), 0) != 0:
        total = _exact_tile(x_before, words32, scale_bytes, n, m, inside, first * (BK // 32), STEPS * (BK // 32),
                            K, x_stride, MODE, BN, BM)  # fmt: skip
    if HAS_BIAS:
        total += tl.load(bias + n).to(tl.float32)[:, None]
    y += tl.program_id(1).to(tl.int64) * M * N
    tl.store(y + m[None, :].to(tl.int64) * N + n[:, None], total.to(y.dtype.element_ty), mask=inside[None, :])


@cached_launch
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
    total = tl.load(partial + at, mask=n < N, other=0.0)
    for part in tl.static_range(1, SPLIT):
        total += tl.load(partial + part * part_size + at, mask=n < N, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=n < N)


@triton.jit
def _scale_address(n: tl.tensor, block: tl.tensor, K: tl.tensor) -> tl.tensor:
    """Where the byte of weight row `n` and block `block` lies in the tiles of scales."""
    row = n % 64
    thread = row // 16 * 32 + row % 8 * 4 + block % 4
    return (n // 64 * (K // 256) + block // 8) * 512 + thread * 4 + block // 4 % 2 * 2 + row // 8 % 2


@triton.jit
def _highest_exponent(scale_bytes: tl.tensor, n: tl.tensor, K: tl.tensor) -> tl.tensor:
    """The largest block exponent of weight rows `n`, from the upper bits of their first three blocks."""
    part0 = tl.load(scale_bytes + _scale_address(n, 0, K)).to(tl.int32) >> 5
    part1 = tl.load(scale_bytes + _scale_address(n, 1, K)).to(tl.int32) >> 5
    part2 = tl.load(scale_bytes + _scale_address(n, 2, K)).to(tl.int32) >> 5
    return part0 | (part1 << 3) | (part2 << 6)


@triton.jit
def _code_values(word: tl.tensor, i: tl.tensor) -> tl.tensor:
    """fp32 E2M1 values of the codes `i` of tiled 32-bit words."""
    magnitude = (((word >> (4 * i)) & 7) << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37  # x 2^126
    negative = ((word >> (8 * (i % 4) + 3 + 4 * (i // 4))) & 1) != 0
    return tl.where(negative, -magnitude, magnitude)


@triton.jit
def _exact_tile(
    x: tl.tensor,
    words32: tl.tensor,
    scale_bytes: tl.tensor,
    n: tl.tensor,
    m: tl.tensor,
    inside: tl.tensor,
    first_block: tl.tensor,
    blocks: tl.tensor,
    K: tl.tensor,
    x_stride: tl.tensor,
    MODE: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
) -> tl.tensor:
    """The product [BN, BM] over some blocks from unfolded activations: for rows that FP8 could not hold."""
    row = n % 64
    code = tl.arange(0, 32)
    highest = _highest_exponent(scale_bytes, n, K)
    total = tl.zeros((BN, BM), tl.float32)
    for block in range(first_block, first_block + blocks):
        x_at = m[:, None].to(tl.int64) * x_stride + block * 32 + code[None, :]
        value = fp32_bits(tl.load(x + x_at, mask=inside[:, None], other=0.0)).to(tl.float32, bitcast=True)
        x_exponent, x_codes = quantize_mxfp4(value, MODE)
        thread = row // 16 * 32 + row % 8 * 4 + block % 4
        address = ((n // 64 * (K // 128) + block // 4) * 2 + row // 8 % 2) * 512 + thread * 4
        w_codes = _code_values(tl.load(words32 + address[:, None] + (code // 8)[None, :]), (code % 8)[None, :])
        relative = tl.load(scale_bytes + _scale_address(n, block, K)).to(tl.int32) & 0x1F
        w_exponent = tl.maximum(relative - 27 + highest, 0)
        # The sum over a block is exact; its factors are applied one by one, as their product may not exist in fp32.
        products = tl.dot(w_codes.to(tl.float16), tl.trans(x_codes.to(tl.float16)))
        total += products * e8m0_to_float(x_exponent)[None, :] * e8m0_to_float(w_exponent)[:, None]
    return total


@functools.cache
def _e4m3_table(device: torch.device) -> Tensor:
    """Row e, int32 [32, 2]: the E4M3 bytes of the eight magnitudes times 2^(e - 27 + 6), exact for e from 13 to 27."""
    values = torch.tensor(element_values(ELEMENT_FORMATS["e2m1"])[:8], dtype=torch.float64)
    exponents = torch.arange(32, dtype=torch.float64).clamp(max=27) - 27 + _EXPAND_TOP
    scaled = (values * torch.exp2(exponents).unsqueeze(1)).float().to(torch.float8_e4m3fn)
    return scaled.view(torch.int32).to(device)


def expand(words: Tensor, bytes_: Tensor, n: int, k: int) -> tuple[Tensor, Tensor]:
    """The tiled weight as float8_e4m3fn [N, K], columns in order, and fp32 row scales [N, 1]."""
    values = torch.empty(n, k, dtype=torch.float8_e4m3fn, device=words.device)
    row_scale = torch.empty(n, 1, dtype=torch.float32, device=words.device)
    _expand_kernel[(n // 64, k // 256)](
        words.view(torch.int32), bytes_, _e4m3_table(words.device), values.view(torch.int32), row_scale, k,
        TOP=_EXPAND_TOP, num_warps=4,
    )  # fmt: skip
    return values, row_scale


@triton.jit
def _decode_words(word: tl.tensor, low: tl.tensor, high: tl.tensor) -> tuple[tl.tensor, ...]:
    """Eight codes of an int32 word to the int32 of their first and of their last four FP8 bytes."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 index, upper, sign;
        and.b32 index, $2, 0x77777777;
        prmt.b32 $0, $3, $4, index;
        shr.u32 upper, index, 16;
        prmt.b32 $1, $3, $4, upper;
        shl.b32 sign, $2, 4;
        lop3.b32 $0, sign, 0x80808080, $0, 0xEA;
        lop3.b32 $1, $2, 0x80808080, $1, 0xEA;
        }""",
        "=&r,=&r,r,r,r",
        [word, low, high],
        dtype=(tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@cached_launch
@triton.jit
def _expand_kernel(
    words32: tl.tensor,
    scale_bytes: tl.tensor,
    table: tl.tensor,
    values32: tl.tensor,
    row_scale: tl.tensor,
    K: tl.tensor,
    TOP: tl.constexpr,
) -> None:
    """64 rows, 256 columns: of each row and chunk of 128 columns, 16 consecutive words, four a block."""
    tile = tl.program_id(0).to(tl.int64)
    pair = tl.program_id(1)
    row = tl.arange(0, 64)
    word = tl.arange(0, 16)
    thread = (row // 16 * 32 + row % 8 * 4)[:, None] + (word // 4)[None, :]
    half = (row // 8 % 2)[:, None]
    n = tile * 64 + row
    for chunk in tl.static_range(2):
        address = ((tile * (K // 128) + pair * 2 + chunk) * 2 + half) * 512 + thread * 4 + (word % 4)[None, :]
        packed = tl.load(words32 + address)
        byte = tl.load(scale_bytes + (tile * (K // 256) + pair) * 512 + thread * 4 + chunk * 2 + half).to(tl.int32)
        at = (byte & 0x1F) * 2
        first, last = _decode_words(packed, tl.load(table + at), tl.load(table + at + 1))
        out = tl.reshape(tl.join(first, last), (64, 32))
        column = pair * 64 + chunk * 32 + tl.arange(0, 32)
        tl.store(values32 + n[:, None] * (K // 4) + column[None, :], out)
    if pair == 0:
        tl.store(row_scale + n, row_factor(_highest_exponent(scale_bytes, n, K), TOP))


_REPAIR_ROWS = 512


def repair(
    y_MN: Tensor, x_MK: Tensor, words: Tensor, bytes_: Tensor, bias_N: Tensor | None, unfit_M: Tensor, scale_mode: str
) -> None:
    """Overwrite the tiles of `y_MN` that have an unfit row of activations with their exact product.

    One launch, and no synchronization: a program whose rows all fit returns at once.

    Args:
        y_MN: the product so far; x_MK: its input before quantization; unfit_M: the marks of `fold_activation`.
    """
    (m, n), k = y_MN.shape, x_MK.shape[1]
    _repair_kernel[(n // 64, cdiv(m, _REPAIR_ROWS))](
        y_MN, x_MK, words.view(torch.int32), bytes_, y_MN if bias_N is None else bias_N, unfit_M, m, n, k,
        x_MK.stride(0), ROWS=_REPAIR_ROWS, MODE=scale_mode, HAS_BIAS=bias_N is not None,
    )  # fmt: skip


@cached_launch
@triton.jit
def _repair_kernel(
    y: tl.tensor,
    x: tl.tensor,
    words32: tl.tensor,
    scale_bytes: tl.tensor,
    bias: tl.tensor,
    unfit: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    x_stride: tl.tensor,
    ROWS: tl.constexpr,
    MODE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> None:
    start = tl.program_id(1) * ROWS
    rows = start + tl.arange(0, ROWS)
    if tl.max(tl.load(unfit + rows, mask=rows < M, other=0), 0) != 0:
        n = tl.program_id(0).to(tl.int64) * 64 + tl.arange(0, 64)
        for first in range(start, start + ROWS, 32):
            m = first + tl.arange(0, 32)
            inside = m < M
            if tl.max(tl.load(unfit + m, mask=inside, other=0), 0) != 0:
                total = _exact_tile(x, words32, scale_bytes, n, m, inside, 0, K // 32, K, x_stride, MODE, 64, 32)
                if HAS_BIAS:
                    total += tl.load(bias + n).to(tl.float32)[:, None]
                at = m[None, :].to(tl.int64) * N + n[:, None]
                tl.store(y + at, total.to(y.dtype.element_ty), mask=inside[None, :])
