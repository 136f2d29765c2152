"""Activations folded, in one pass, into values that are exact relative to one power of two a row.

MXFP4 activations are rotated where the weight is, quantized, and folded into FP8: E2M1 x 2^s is exact in E5M2 for 29
consecutive exponents s, and in E4M3 for 15. So a row of MXFP4 blocks becomes a row of E5M2 values and one scale
wherever the exponents of its blocks span at most 28; all-zero blocks do not count. Rows that span more get a scale of
NaN, never a clamp: the matmul recomputes them.

bf16 activations are folded into FP16: rows whose largest magnitude is brought below 2^15, where values down to 2^-32
of it keep all their bits. Rows with smaller ones get NaN likewise.

For `tiled_matmul` the columns are permuted within each 128, as its registers hold the weight: in FP8, position
32j + 16h + 4t + b holds column 32t + 8j + 4h + b; in FP16, position 32q + 16o + 8h + 2t + e holds column
32t + 8q + 4o + 2e + h. A product does not change when both sides are permuted alike.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from mxquant.formats.block import dequantize_blocks, quantize_blocks
from mxquant.formats.spec import FORMATS
from mxquant.kernels.bf16_pairs import fp8_word, look_up
from mxquant.kernels.block_in_thread import (
    four_nibbles,
    fp32_values,
    joined_words,
    load_pairs,
    nearest_pairs,
    odd_pairs,
    store_block,
)
from mxquant.kernels.butterfly import rotate_block
from mxquant.kernels.encode_pairs import encode_pairs, largest_of_pairs
from mxquant.kernels.launch import cached_launch, cdiv, next_power_of_2
from mxquant.kernels.overlap import let_next_start
from mxquant.kernels.plan import Buffer, Step
from mxquant.kernels.rotate import rotate
from mxquant.kernels.triton_numerics import INTERPRETED, e8m0_from_amax, e8m0_reciprocal, fp32_bits, round_to_element

_MXFP4 = FORMATS["mxfp4"]
# Of the row's largest block exponent in E5M2: 6 x 2^13 <= 57344.
TOP, SPAN = 13, 28
# Rows up to this long stay in the registers of one program; longer ones are read twice.
_LONGEST_IN_REGISTERS = 16384
# Blocks of a program in the interpreter, which spends its time on operations, not on elements.
_INTERPRETED = 256


def _padded(columns: int) -> int:
    return cdiv(columns, 128) * 128


def folding(
    m: int,
    k: int,
    x_stride: int,
    scale_mode: str | None,
    *,
    permute: bool = True,
    rotated: bool = False,
    unfit_only: bool = False,
) -> tuple[dict[str, Buffer], Step]:
    """The step from "x" to "values" and "row_scale", and these: of `fold_activation`, or, where `scale_mode` is None,
    of `fold_bfloat16`. Where rows are `rotated`, "rotated" as well: what a matmul recomputes rows from, instead of "x",
    and its rows lie `k` apart; `unfit_only`: no other row is written to it.
    """
    width = _padded(k) if permute else k
    buffers = {"values": Buffer((m, width), torch.float16 if scale_mode is None else torch.float8_e5m2)}
    buffers["row_scale"] = Buffer((m, 1), torch.float32)
    if scale_mode is None:
        block_k = min(next_power_of_2(width), _LONGEST_IN_REGISTERS)
        warps = max(1, min(16, block_k // 512))
        constants: dict[str, Any] = {"BLOCK_K": block_k, "num_warps": warps}
        return buffers, Step(_fold_bfloat16_kernel, (m,), ("x", *buffers, k, width, x_stride), constants)
    if rotated:
        buffers["rotated"] = Buffer((m, k), torch.bfloat16)
    blocks = min(next_power_of_2(width // 32), _LONGEST_IN_REGISTERS // 32)
    rows = max(1, (min(_INTERPRETED, next_power_of_2(m * blocks)) if INTERPRETED.value else 32) // blocks)
    constants = {
        "MODE": scale_mode, "PERMUTE": permute, "ROTATED": rotated, "UNFIT_ONLY": unfit_only, "ROWS": rows,
        "BLOCKS": blocks, "ONE_PART": width <= 32 * blocks, "TOP": TOP, "SPAN": SPAN,
        "num_warps": max(1, rows * blocks // 32),
    }  # fmt: skip
    arguments = "x", "values", "row_scale", "rotated" if rotated else "x", m, k, width, x_stride
    return buffers, Step(_fold_activation_kernel, (cdiv(m, rows),), arguments, constants)


def _fold(x: Tensor, scale_mode: str | None, *, permute: bool, rotated: bool = False) -> list[Tensor]:
    m, k = x.shape
    buffers, step = folding(m, k, x.stride(0), scale_mode, permute=permute, rotated=rotated, unfit_only=True)
    made = {name: buffer.empty(x.device) for name, buffer in buffers.items()}
    step.launch({"x": x, **made})
    return list(made.values())


def fold_activation(x: Tensor, scale_mode: str, *, permute: bool) -> tuple[Tensor, Tensor]:
    """Quantize and fold rows.

    Args:
        x: bf16 or fp16 [M, K], K a multiple of 32, last axis contiguous.
        scale_mode: of MXFP4.
        permute: permute the columns for `tiled_matmul`, with zeros up to a multiple of 128.

    Returns:
        values, float8_e5m2 [M, K or wider]; row scales, fp32 [M, 1], NaN of rows that do not fit (span, Inf or NaN).
    """
    values, row_scale = _fold(x, scale_mode, permute=permute)
    return values, row_scale


def fold_rotated(x: Tensor, scale_mode: str, *, permute: bool) -> tuple[Tensor, Tensor, Tensor]:
    """As `fold_activation`, of bf16 rows rotated in blocks of 32 columns first: in fp32, rounded to bf16.

    Returns:
        values and row scales; and the rotated rows, bf16 [M, K], of which only those that do not fit are written.
    """
    values, row_scale, rotated = _fold(x, scale_mode, permute=permute, rotated=True)
    return values, row_scale, rotated


def fold_input(x: Tensor, scale_mode: str | None, *, permute: bool, rotated: bool) -> tuple[Tensor, Tensor, Tensor]:
    """What a product of many rows starts from, as its activations ask: `fold_activation`, `fold_rotated`, or, where
    `scale_mode` is None, `fold_bfloat16`.

    Returns:
        values; row scales; and the rows that those which do not fit are recomputed from.
    """
    if scale_mode is None:
        return *fold_bfloat16(x), x
    if rotated:
        return fold_rotated(x, scale_mode, permute=permute)
    return *fold_activation(x, scale_mode, permute=permute), x


def fold_activation_torch(x: Tensor, scale_mode: str, *, permute: bool, rotated: bool = False) -> tuple[Tensor, Tensor]:
    """The twin of `fold_activation`; rows that do not fit hold whatever the casts give."""
    m, k = x.shape
    x = rotate(x, 32).to(x.dtype) if rotated else x
    qdata, scale = quantize_blocks(x, _MXFP4, scale_mode)
    exponent = scale.int()
    empty = ((qdata.unflatten(1, (k // 32, 16)) & 0x77).amax(-1) == 0) & (exponent != 255)
    highest = torch.where(empty, 0, exponent).amax(1, keepdim=True)
    lowest = torch.where(empty, 255, exponent).amin(1, keepdim=True)
    unfit = (highest - lowest > SPAN) | (highest == 255)
    # The byte of 2^(exponent - highest + TOP); an empty block's is arbitrary, its codes are zero.
    relative = torch.where(empty, 127, exponent - highest + TOP + 127).clamp(0, 254).to(torch.uint8)
    values = dequantize_blocks(qdata, relative, _MXFP4, k).to(torch.float8_e5m2)
    if permute:
        bits = F.pad(values.view(torch.uint8), (0, _padded(k) - k)).view(m, -1, 4, 4, 2, 4)
        values = bits.permute(0, 1, 3, 4, 2, 5).reshape(m, -1).view(torch.float8_e5m2)
    row_scale = torch.exp2((highest - TOP - 127).double()).float()
    return values, row_scale.masked_fill(unfit, torch.nan)


def fold_bfloat16(x: Tensor) -> tuple[Tensor, Tensor]:
    """Fold rows that are not quantized, columns permuted for `tiled_matmul`.

    Args:
        x: bf16 [M, K], last axis contiguous.

    Returns:
        values, float16 [M, K], with zeros up to a multiple of 128; row scales, fp32 [M, 1], NaN of rows that do not
        fit.
    """
    values, row_scale = _fold(x, None, permute=True)
    return values, row_scale


def fold_bfloat16_torch(x: Tensor) -> tuple[Tensor, Tensor]:
    """The twin of `fold_bfloat16`; rows that do not fit hold whatever the casts give."""
    value = x.double()
    largest = (x.view(torch.int16).int() & 0x7FFF).amax(1, keepdim=True) >> 7
    exponent = (largest - 14).clamp(1, 253) - 127
    values = (value * torch.exp2(-exponent.double())).to(torch.float16)
    unfit = (values.double() * torch.exp2(exponent.double()) != value).any(1, keepdim=True)
    values = F.pad(values, (0, _padded(x.shape[1]) - x.shape[1])).view(x.shape[0], -1, 4, 4, 2, 2, 2)
    values = values.permute(0, 1, 3, 4, 6, 2, 5).reshape(x.shape[0], -1)
    return values, torch.exp2(exponent.float()).masked_fill(unfit, torch.nan)


@triton.jit
def power_of_two(exponent: tl.tensor) -> tl.tensor:
    """2^exponent for -126..127, from its bits."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def row_factor(highest: tl.tensor, TOP: tl.constexpr) -> tl.tensor:
    """2^(highest - TOP - 127), subnormal where `highest` is small: a product of two normal factors."""
    exponent = highest - TOP - 127
    return power_of_two(tl.maximum(exponent, -126)) * power_of_two(tl.minimum(exponent + 126, 0))


@triton.jit
def any_unfit(row_scale: tl.tensor) -> tl.tensor:
    """Whether a row did not fold: its scale is NaN."""
    return tl.max((row_scale != row_scale).to(tl.int32), 0) != 0


@triton.jit
def quantize_mxfp4(value: tl.tensor, MODE: tl.constexpr) -> tuple[tl.tensor, ...]:
    """Block exponents [B], 255 for Inf and NaN, and E2M1 values [B, 32] of fp32 `value` [B, 32]."""
    exponent = e8m0_from_amax(tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1), 2, 1, 7, MODE)
    return exponent, round_to_element(value * e8m0_reciprocal(exponent)[:, None], 2, 1, 7)


@triton.jit
def _quantize_part(
    x: tl.tensor, DTYPE: tl.constexpr, MODE: tl.constexpr, ROTATED: tl.constexpr
) -> tuple[tl.tuple, tl.tuple, tl.tensor, tl.tensor]:
    """Pairs and codes of the blocks that begin at `x`, one in each thread, their exponents, 255 for Inf and NaN, and
    whether they are empty.
    """
    pairs = load_pairs(x)
    if ROTATED:
        tl.static_assert(tl.bfloat16 == DTYPE)
        pairs = nearest_pairs(rotate_block(fp32_values(pairs, DTYPE)))
    elif tl.bfloat16 != DTYPE:
        pairs = odd_pairs(fp32_values(pairs, DTYPE))
    exponent = e8m0_from_amax(largest_of_pairs(pairs), 2, 1, 7, MODE)
    codes = encode_pairs(pairs, e8m0_reciprocal(exponent), 2, 1, 7, MODE == "floor")
    some = codes[0]
    for i in tl.static_range(1, 16):
        some = some | codes[i]
    return pairs, codes, exponent, ((some & 0x70007) == 0) & (exponent != 255)


@triton.jit
def _folded_words(pairs: tl.tuple, codes: tl.tuple, relative: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """E2M1 codes times 2^relative as E5M2, by a table of each block's eight magnitudes: words [threads, 8]; of blocks
    that are not there, zeros.
    """
    one = power_of_two(tl.minimum(tl.maximum(relative, -126), 13))
    one = tl.where(inside, one, 0.0)
    low = fp8_word(one * 0.0, one * 0.5, one, one * 1.5, 5, 2)
    high = fp8_word(one * 2.0, one * 3.0, one * 4.0, one * 6.0, 5, 2)
    words: tl.tuple = ()
    for i in tl.static_range(0, 16, 2):
        words = words + (look_up(low, high, four_nibbles(codes[i], codes[i + 1]), pairs[i], pairs[i + 1]),)
    return joined_words(words)


@triton.jit
def _store_folded(
    values: tl.tensor,
    folded: tl.tensor,
    rows: tl.tensor,
    first: tl.tensor,
    M: tl.tensor,
    width: tl.tensor,
    PERMUTE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Store words [threads, 8] of the blocks from `first` on, block by block; or those of four blocks, from chunk t
    (jh) to chunk (jh) t, of four columns each.
    """
    GROUP: tl.constexpr = 4 if PERMUTE else 1
    GROUPS: tl.constexpr = BLOCKS // GROUP
    row = _each_block(rows, ROWS, GROUPS)[:, None]
    word = first * 8 + (tl.arange(0, ROWS * GROUPS) % GROUPS)[:, None] * (8 * GROUP) + tl.arange(0, 8 * GROUP)[None, :]
    words_ptr = values.to(tl.pointer_type(tl.int32), bitcast=True) + row * (width // 4)
    permuted = tl.permute(tl.reshape(folded, (ROWS * GROUPS, GROUP, 8)), (0, 2, 1))
    folded = tl.reshape(permuted, (ROWS * GROUPS, 8 * GROUP))
    tl.store(words_ptr + word, folded, mask=(row < M) & (word < width // 4))


@triton.jit
def _extremes(
    exponent: tl.tensor, empty: tl.tensor, ROWS: tl.constexpr, BLOCKS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The largest and the smallest exponent of each row, empty blocks aside."""
    highest = tl.max(tl.reshape(tl.where(empty, 0, exponent), (ROWS, BLOCKS)), 1)
    return highest, tl.min(tl.reshape(tl.where(empty, 255, exponent), (ROWS, BLOCKS)), 1)


@triton.jit
def _each_block(of_rows: tl.tensor, ROWS: tl.constexpr, BLOCKS: tl.constexpr) -> tl.tensor:
    """[ROWS] to [ROWS * BLOCKS]."""
    return tl.reshape(tl.broadcast_to(of_rows[:, None], (ROWS, BLOCKS)), (ROWS * BLOCKS,))


@cached_launch
@triton.jit(do_not_specialize=["M"])
def _fold_activation_kernel(
    x: tl.tensor,
    values: tl.tensor,
    row_scale: tl.tensor,
    rotated: tl.tensor,
    M: tl.tensor,
    K: tl.tensor,
    width: tl.tensor,
    x_stride: tl.tensor,
    MODE: tl.constexpr,
    PERMUTE: tl.constexpr,
    ROTATED: tl.constexpr,
    UNFIT_ONLY: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    ONE_PART: tl.constexpr,
    TOP: tl.constexpr,
    SPAN: tl.constexpr,
) -> None:
    """Some rows. ONE_PART: they stay in registers. In place of rows and blocks that aren't there, the last are read."""
    let_next_start()
    DTYPE: tl.constexpr = x.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = _each_block(rows, ROWS, BLOCKS)
    x += tl.minimum(row, M - 1) * x_stride
    block = tl.arange(0, ROWS * BLOCKS) % BLOCKS
    last = K // 32 - 1
    pairs, codes, exponent, empty = _quantize_part(x + tl.minimum(block, last) * 32, DTYPE, MODE, ROTATED)
    highest, lowest = _extremes(exponent, empty, ROWS, BLOCKS)
    if not ONE_PART:
        for first in range(BLOCKS, width // 32, BLOCKS):
            part = x + tl.minimum(first + block, last) * 32
            pairs, codes, exponent, empty = _quantize_part(part, DTYPE, MODE, ROTATED)
            high, low = _extremes(exponent, empty, ROWS, BLOCKS)
            highest, lowest = tl.maximum(highest, high), tl.minimum(lowest, low)
    fits = (highest - lowest <= SPAN) & (highest != 255)
    tl.store(row_scale + rows, tl.where(fits, row_factor(highest, TOP), float("nan")), mask=rows < M)

    for first in range(0, width // 32, BLOCKS):
        if not ONE_PART:
            part = x + tl.minimum(first + block, last) * 32
            pairs, codes, exponent, empty = _quantize_part(part, DTYPE, MODE, ROTATED)
        relative = exponent - _each_block(highest, ROWS, BLOCKS) + TOP
        folded = _folded_words(pairs, codes, relative, first + block <= last)
        _store_folded(values, folded, rows, first, M, width, PERMUTE, ROWS, BLOCKS)
        if ROTATED and (not UNFIT_ONLY or tl.min(fits.to(tl.int32), 0) == 0):
            wanted = (row < M) & (first + block <= last)
            if UNFIT_ONLY:
                wanted &= _each_block(fits.to(tl.int32), ROWS, BLOCKS) == 0
            into = rotated.to(tl.pointer_type(tl.int32), bitcast=True) + row * (K // 2)
            store_block(into, pairs, first + block, wanted)


@cached_launch
@triton.jit
def _fold_bfloat16_kernel(
    x: tl.tensor,
    values: tl.tensor,
    row_scale: tl.tensor,
    K: tl.tensor,
    width: tl.tensor,
    x_stride: tl.tensor,
    BLOCK_K: tl.constexpr,
) -> None:
    let_next_start()
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    values += row * width
    column = tl.arange(0, BLOCK_K)
    # The last part is read first, and stays in registers where the row is one part.
    last = (width - 1) // BLOCK_K * BLOCK_K
    value = fp32_bits(tl.load(x + last + column, mask=last + column < K, other=0.0))
    largest = tl.max(value & 0x7FFFFFFF, 0)
    for start in range(0, last, BLOCK_K):
        largest = tl.maximum(largest, tl.max(fp32_bits(tl.load(x + start + column)) & 0x7FFFFFFF, 0))
    exponent = tl.minimum(tl.maximum((largest >> 23) - 14, 1), 253) - 127
    missed = _store_folded_bfloat16(values + last, value, exponent, width - last, BLOCK_K)
    for start in range(0, last, BLOCK_K):
        part = fp32_bits(tl.load(x + start + column))
        missed = tl.maximum(missed, _store_folded_bfloat16(values + start, part, exponent, width - start, BLOCK_K))
    tl.store(row_scale + row, tl.where(missed == 0, power_of_two(exponent), float("nan")))


@triton.jit
def _store_folded_bfloat16(
    values: tl.tensor, bits: tl.tensor, exponent: tl.tensor, length: tl.tensor, BLOCK_K: tl.constexpr
) -> tl.tensor:
    """Store up to `length` fp32 `bits` times 2^-exponent as permuted FP16; 1 if one of them changed, else 0."""
    value = bits.to(tl.float32, bitcast=True)
    scaled = value * power_of_two(-exponent)
    folded = scaled.to(tl.float16)
    # A scaled value below fp32's range comes out as 0 too. NaN differs from itself.
    changed = (folded.to(tl.float32) != scaled) | ((folded == 0) & (value != 0))
    permuted = tl.permute(tl.reshape(folded, (BLOCK_K // 128, 4, 4, 2, 2, 2)), (0, 2, 3, 5, 1, 4))  # chunk q o h t e
    column = tl.arange(0, BLOCK_K)
    tl.store(values + column, tl.reshape(permuted, (BLOCK_K,)), mask=column < length)
    return tl.max(changed.to(tl.int32), 0)
