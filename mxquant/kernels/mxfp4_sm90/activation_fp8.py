"""Activations folded, in one pass, into values that are exact relative to one power of two a row.

MXFP4 activations are rotated where the weight is, quantized, and folded into FP8: E2M1 x 2^s is exact in E5M2 for 29
consecutive exponents s, and in E4M3 for 15. So a row of MXFP4 blocks becomes a row of E5M2 values and one scale
wherever the exponents of its blocks span at most 28; all-zero blocks do not count. Rows that span more get a scale of
NaN, never a clamp: the matmul recomputes them.

bf16 activations are folded into FP16: rows whose largest magnitude is brought below 2^15, where values down to 2^-32
of it keep all their bits. Rows with smaller ones get NaN likewise.

What comes out of an expert's first matmul is gated on the way: read as gates and ups, rounded to bf16 as `gate_rows`
does, and rotated and quantized as any row. No gated row is written, but those that the matmul recomputes.

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
from mxquant.kernels.moe.gated_activation import load_gated_pairs
from mxquant.kernels.mxfp4_sm90.activation_fp16 import fold_bfloat16_kernel
from mxquant.kernels.primitives.bf16x2 import four_high_bytes, fp8_word, look_up
from mxquant.kernels.primitives.e2m1x2 import amax_of_pairs, encode_pairs
from mxquant.kernels.primitives.hadamard import hadamard_block
from mxquant.kernels.primitives.numerics import (
    INTERPRETED,
    e8m0_from_amax,
    e8m0_reciprocal,
    power_of_two,
    round_to_element,
)
from mxquant.kernels.primitives.pack import four_nibbles
from mxquant.kernels.primitives.pdl import gdc_launch_dependents, gdc_wait
from mxquant.kernels.primitives.thread_block import (
    fp32_values,
    joined_words,
    load_pairs,
    nearest_pairs,
    odd_pairs,
)
from mxquant.kernels.runtime.launch import cached_launch, cdiv, next_power_of_2
from mxquant.kernels.runtime.plan import Buffer, Step
from mxquant.reference.gated_activation import GatedActivation
from mxquant.reference.hadamard import hadamard

_MXFP4 = FORMATS["mxfp4"]
# Of the row's largest block exponent in E5M2: 6 x 2^13 <= 57344.
TOP, SPAN = 13, 28
# Rows up to this long stay in the registers of one program; longer ones are read twice.
_LONGEST_IN_REGISTERS = 16384
# So many gated rows, which arithmetic bounds, are not given threads without a block: three blocks a thread instead,
# where one each would leave a quarter of the threads without.
_MANY_ROWS = 2048
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
    gate: GatedActivation | None = None,
    rotated: bool = False,
) -> tuple[dict[str, Buffer], Step]:
    """The step from "x" to "values" and "row_scale", and these: of `fold_input`. With a gate or rotated, "before" as
    well: what a matmul recomputes rows that do not fit from, instead of "x"; rows lie `k` apart, no others are written.
    Where columns are to be permuted, there is room behind the row scales, so that kernels may load those of a tile of
    128 rows from any row on.
    """
    height, width = (m + 127, _padded(k)) if permute else (m, k)
    buffers = {"values": Buffer((m, width), torch.float16 if scale_mode is None else torch.float8_e5m2)}
    buffers["row_scale"] = Buffer((height, 1), torch.float32)
    before = "x"
    if rotated or gate is not None:
        before, buffers["before"] = "before", Buffer((m, k), torch.bfloat16)
    if scale_mode is None:
        block_k = min(next_power_of_2(width), _LONGEST_IN_REGISTERS)
        warps = max(1, min(16, block_k // 512))
        constants: dict[str, Any] = {"GATE": gate, "BLOCK_K": block_k, "num_warps": warps, "launch_pdl": True}
        columns = "x", "values", "row_scale", before, k, width, x_stride
        return buffers, Step(fold_bfloat16_kernel, (m,), columns, constants)
    blocks, parts = min(next_power_of_2(width // 32), _LONGEST_IN_REGISTERS // 32), 1
    if gate is not None and m >= _MANY_ROWS and blocks >= 128 and width // 32 <= blocks // 4 * 3:
        blocks, parts = blocks // 4, 3
    rows = max(1, (min(_INTERPRETED, next_power_of_2(m * blocks)) if INTERPRETED.value else 32) // blocks)
    constants = {
        "MODE": scale_mode, "PERMUTE": permute, "GATE": gate, "ROTATED": rotated, "ROWS": rows, "BLOCKS": blocks,
        "PARTS": parts, "WHOLE": width <= 32 * blocks * parts, "TOP": TOP, "SPAN": SPAN,
        "num_warps": max(1, rows * blocks // 32), "launch_pdl": True,
    }  # fmt: skip
    arguments = "x", "values", "row_scale", before, m, k, width, x_stride
    return buffers, Step(_fold_activation_kernel, (cdiv(m, rows),), arguments, constants)


def fold_activation(x: Tensor, scale_mode: str, *, permute: bool) -> tuple[Tensor, Tensor]:
    """Quantize and fold rows.

    Args:
        x: bf16 or fp16 [M, K], K a multiple of 32, last axis contiguous.
        scale_mode: of MXFP4.
        permute: permute the columns for `tiled_matmul`, with zeros up to a multiple of 128.

    Returns:
        values, float8_e5m2 [M, K or wider]; row scales, fp32 [M, 1], NaN of rows that do not fit (span, Inf or NaN).
    """
    values, row_scale, _ = fold_input(x, scale_mode, permute=permute)
    return values, row_scale


def fold_input(
    x: Tensor, scale_mode: str | None, *, permute: bool, rotated: bool = False, gate: GatedActivation | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """What a product of many rows starts from, as its activations ask: those of `fold_activation`, or, where
    `scale_mode` is None, of `fold_bfloat16`.

    Args:
        rotated: bf16 rows that are quantized are rotated first, in blocks of 32 columns: in fp32, rounded to bf16.
        gate: `x` is bf16 [M, 2K], and goes through it before all else.

    Returns:
        values; row scales; and the rows that those which do not fit are recomputed from: `x`, or bf16 [M, K], gated and
        rotated, of which no others are written.
    """
    m, k = x.shape[0], x.shape[1] if gate is None else x.shape[1] // 2
    buffers, step = folding(m, k, x.stride(0), scale_mode, permute=permute, gate=gate, rotated=rotated)
    made = {name: buffer.empty(x.device) for name, buffer in buffers.items()}
    step.launch({"x": x, **made})
    return made["values"], made["row_scale"][:m], made.get("before", x)


def fold_activation_torch(x: Tensor, scale_mode: str, *, permute: bool, rotated: bool = False) -> tuple[Tensor, Tensor]:
    """The twin of `fold_activation`; rows that do not fit hold whatever the casts give."""
    m, k = x.shape
    x = hadamard(x, 32).to(x.dtype) if rotated else x
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
    values, row_scale, _ = fold_input(x, None, permute=True)
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
def _pairs_of(x: tl.tensor, block: tl.tensor, K: tl.tensor, GATE: tl.constexpr, ROTATED: tl.constexpr) -> tl.tuple:
    """Pairs of blocks of the rows that begin at `x`, one in each thread; gated, and rotated and rounded."""
    pairs = load_pairs(x + block * 32) if GATE is None else load_gated_pairs(x, block, K, GATE)
    if ROTATED:
        tl.static_assert(tl.bfloat16 == x.dtype.element_ty)
        pairs = nearest_pairs(hadamard_block(fp32_values(pairs, tl.bfloat16)))
    return pairs


@triton.jit
def _quantize_part(
    x: tl.tensor, block: tl.tensor, K: tl.tensor, MODE: tl.constexpr, GATE: tl.constexpr, ROTATED: tl.constexpr
) -> tuple[tl.tuple, tl.tuple, tl.tensor, tl.tensor]:
    """Of blocks of the rows that begin at `x`, one in each thread: magnitudes' codes, four in the low half of a word,
    and four bytes with their signs on top; exponents, 255 for Inf and NaN; and whether they are empty. A row's extremes
    are waited for with these in registers, which are half as many as pairs and their codes.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    pairs = _pairs_of(x, block, K, GATE, ROTATED)
    if tl.bfloat16 != DTYPE:
        tl.static_assert(GATE is None)
        values = fp32_values(pairs, DTYPE)
        pairs = odd_pairs(values[0::2], values[1::2])
    exponent = e8m0_from_amax(amax_of_pairs(pairs), 2, 1, 7, MODE)
    codes = encode_pairs(pairs, e8m0_reciprocal(exponent), MODE == "floor")
    nibbles: tl.tuple = ()
    signs: tl.tuple = ()
    for i in tl.static_range(0, 16, 2):
        nibbles = nibbles + (four_nibbles(codes[i], codes[i + 1]),)
        signs = signs + (four_high_bytes(pairs[i], pairs[i + 1]),)
    some = nibbles[0]
    for i in tl.static_range(1, 8):
        some = some | nibbles[i]
    return nibbles, signs, exponent, ((some & 0x7777) == 0) & (exponent != 255)


@triton.jit
def _folded_words(nibbles: tl.tuple, signs: tl.tuple, relative: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """E2M1 codes times 2^relative as E5M2, by a table of each block's eight magnitudes: words [threads, 8]; of blocks
    that are not there, zeros.
    """
    one = power_of_two(tl.minimum(tl.maximum(relative, -126), 13))
    one = tl.where(inside, one, 0.0)
    low = fp8_word(one * 0.0, one * 0.5, one, one * 1.5, 5, 2)
    high = fp8_word(one * 2.0, one * 3.0, one * 4.0, one * 6.0, 5, 2)
    words: tl.tuple = ()
    for i in tl.static_range(8):
        words = words + (look_up(low, high, nibbles[i], signs[i]),)
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
    highest: tl.tensor, lowest: tl.tensor, part: tl.tuple, ROWS: tl.constexpr, BLOCKS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The largest and the smallest exponent of each row so far and in a part, empty blocks aside."""
    _, _, exponent, empty = part
    high = tl.max(tl.reshape(tl.where(empty, 0, exponent), (ROWS, BLOCKS)), 1)
    low = tl.min(tl.reshape(tl.where(empty, 255, exponent), (ROWS, BLOCKS)), 1)
    return tl.maximum(highest, high), tl.minimum(lowest, low)


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
    before: tl.tensor,
    M: tl.tensor,
    K: tl.tensor,
    width: tl.tensor,
    x_stride: tl.tensor,
    MODE: tl.constexpr,
    PERMUTE: tl.constexpr,
    GATE: tl.constexpr,
    ROTATED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PARTS: tl.constexpr,
    WHOLE: tl.constexpr,
    TOP: tl.constexpr,
    SPAN: tl.constexpr,
) -> None:
    """Some rows, their first PARTS in registers. WHOLE: that's all of them; of others, the rest is read twice. In place
    of rows and blocks that aren't there, the last are read.
    """
    gdc_wait()
    gdc_launch_dependents()
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = _each_block(rows, ROWS, BLOCKS)
    x += tl.minimum(row, M - 1) * x_stride
    block = tl.arange(0, ROWS * BLOCKS) % BLOCKS
    last = K // 32 - 1
    kept: tl.tuple = ()
    highest, lowest = tl.zeros((ROWS,), tl.int32), tl.full((ROWS,), 255, tl.int32)
    for i in tl.static_range(PARTS):
        kept = kept + (_quantize_part(x, tl.minimum(i * BLOCKS + block, last), K, MODE, GATE, ROTATED),)
        highest, lowest = _extremes(highest, lowest, kept[i], ROWS, BLOCKS)
    if not WHOLE:
        for first in range(PARTS * BLOCKS, width // 32, BLOCKS):
            part = _quantize_part(x, tl.minimum(first + block, last), K, MODE, GATE, ROTATED)
            highest, lowest = _extremes(highest, lowest, part, ROWS, BLOCKS)
    fits = (highest - lowest <= SPAN) & (highest != 255)
    tl.store(row_scale + rows, tl.where(fits, row_factor(highest, TOP), float("nan")), mask=rows < M)

    for i in tl.static_range(PARTS):
        _store_part(values, before, x, kept[i], rows, i * BLOCKS, highest, fits, M, K, width, PERMUTE, GATE, ROTATED,
                    ROWS, BLOCKS, TOP)  # fmt: skip
    if not WHOLE:
        for first in range(PARTS * BLOCKS, width // 32, BLOCKS):
            part = _quantize_part(x, tl.minimum(first + block, last), K, MODE, GATE, ROTATED)
            _store_part(values, before, x, part, rows, first, highest, fits, M, K, width, PERMUTE, GATE, ROTATED,
                        ROWS, BLOCKS, TOP)  # fmt: skip


@triton.jit
def _store_part(
    values: tl.tensor,
    before: tl.tensor,
    x: tl.tensor,
    part: tl.tuple,
    rows: tl.tensor,
    first: tl.tensor,
    highest: tl.tensor,
    fits: tl.tensor,
    M: tl.tensor,
    K: tl.tensor,
    width: tl.tensor,
    PERMUTE: tl.constexpr,
    GATE: tl.constexpr,
    ROTATED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    TOP: tl.constexpr,
) -> None:
    """Store the blocks of `_quantize_part` from `first` on, folded; gated or rotated, of rows that do not fit, also
    themselves.
    """
    nibbles, signs, exponent, _ = part
    block = first + tl.arange(0, ROWS * BLOCKS) % BLOCKS
    inside = block < K // 32
    relative = exponent - _each_block(highest, ROWS, BLOCKS) + TOP
    _store_folded(values, _folded_words(nibbles, signs, relative, inside), rows, first, M, width, PERMUTE, ROWS, BLOCKS)
    if (ROTATED or GATE is not None) and tl.min(fits.to(tl.int32), 0) == 0:
        row = _each_block(rows, ROWS, BLOCKS)
        wanted = (row < M) & inside & (_each_block(fits.to(tl.int32), ROWS, BLOCKS) == 0)
        # Computed again: that row is rare, and what it takes to keep the pairs, or to store them by vectors, are
        # registers of every row.
        pairs = _pairs_of(x, tl.minimum(block, K // 32 - 1), K, GATE, ROTATED)
        into = before.to(tl.pointer_type(tl.int32), bitcast=True) + row * (K // 2) + block * 16
        for i in tl.static_range(16):
            tl.store(into + i, pairs[i], mask=wanted)
