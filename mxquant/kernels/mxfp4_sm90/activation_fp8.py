"""The activation prologue to FP8: rows are gated, rotated, quantized to MXFP4 and rescaled to E5M2, in one pass.

Twin: `mxquant.reference.rescale.rescale_to_fp8`.

The input of an expert's second matmul comes as gates and ups. They are gated and rounded to bf16 as by
`kernels.moe.gated_activation`. Gated rows are not written, but those out of range, which the matmul recomputes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from mxquant.kernels.moe.gated_activation import load_gated_pairs
from mxquant.kernels.mxfp4_sm90.load import row_scale_of
from mxquant.kernels.primitives.bf16x2 import four_high_bytes, fp8_word, look_up, odd_pair
from mxquant.kernels.primitives.e2m1x2 import amax_of_pairs, encode_pairs
from mxquant.kernels.primitives.hadamard import hadamard_block
from mxquant.kernels.primitives.numerics import INTERPRETED, e8m0_from_amax, e8m0_reciprocal, power_of_two
from mxquant.kernels.primitives.pack import four_nibbles
from mxquant.kernels.primitives.pdl import gdc_launch_dependents, gdc_wait
from mxquant.kernels.primitives.thread_block import fp32_values, join_pairs, joined_words, load_pairs, nearest_pairs
from mxquant.kernels.runtime.launch import cached_launch, cdiv, next_power_of_2
from mxquant.kernels.runtime.plan import Step
from mxquant.reference.gated_activation import GatedActivation
from mxquant.reference.rescale import E5M2_SPAN, E5M2_TOP, Prologue

# Columns of a row in the registers of one program. Longer rows are read twice.
_MAX_COLUMNS = 16384
# From so many gated rows on, which are bound by arithmetic, a thread has three blocks where one block each would leave
# a quarter of the threads idle.
_MANY_ROWS = 2048
# Blocks of a program in the interpreter, whose time goes by operations, not by elements.
_INTERPRETED_BLOCKS = 256


def fp8_step(
    tensors: tuple[str, str, str, str], sizes: tuple[int, int, int, int], prologue: Prologue, permute: bool
) -> Step:
    """The step that writes values, row scales and, of gated or rotated rows out of range, the rows themselves.

    Args:
        tensors: names of x, values, row_scale and x_pre_quant.
        sizes: M, K, the width of the values, and how far rows of x lie apart.
    """
    m, _, width, _ = sizes
    scale_mode, rotated, gate = prologue
    blocks, chunks = min(next_power_of_2(width // 32), _MAX_COLUMNS // 32), 1
    if gate is not None and m >= _MANY_ROWS and blocks >= 128 and width // 32 <= blocks // 4 * 3:
        blocks, chunks = blocks // 4, 3
    rows = max(1, (min(_INTERPRETED_BLOCKS, next_power_of_2(m * blocks)) if INTERPRETED.value else 32) // blocks)
    constants = {
        "MODE": scale_mode, "PERMUTE": permute, "GATE": gate, "ROTATED": rotated, "ROWS": rows, "BLOCKS": blocks,
        "CHUNKS": chunks, "IN_REGISTERS": width <= 32 * blocks * chunks, "TOP": E5M2_TOP, "SPAN": E5M2_SPAN,
        "num_warps": max(1, rows * blocks // 32), "launch_pdl": True,
    }  # fmt: skip
    return Step(mxquant_mxfp4_rescale_to_fp8, (cdiv(m, rows),), (*tensors, *sizes), constants)


@dataclass(frozen=True)
class _Constants:
    """The constants of `mxquant_mxfp4_rescale_to_fp8` that its functions share."""

    MODE: str
    PERMUTE: bool
    GATE: GatedActivation | None
    ROTATED: bool
    ROWS: int
    BLOCKS: int
    TOP: int


@triton.constexpr_function
def _constants(*values: Any) -> _Constants:
    return _Constants(*values)


class _Sizes(NamedTuple):
    M: tl.tensor
    K: tl.tensor
    width: tl.tensor


class _Rows(NamedTuple):
    """Rows [ROWS] of a program: their indices, their largest block exponents, and whether they are in range."""

    index: tl.tensor
    max_exponent: tl.tensor
    in_range: tl.tensor


@triton.jit
def _load_pairs(x: tl.tensor, block: tl.tensor, K: tl.tensor, CONFIG: tl.constexpr) -> tl.tuple:
    """Blocks of the rows that begin at `x`, as pairs, one block in each thread; gated, rotated and rounded."""
    GATE: tl.constexpr = CONFIG.GATE
    ROTATED: tl.constexpr = CONFIG.ROTATED
    pairs = load_pairs(x + block * 32) if GATE is None else load_gated_pairs(x, block, K, GATE)
    if ROTATED:
        tl.static_assert(tl.bfloat16 == x.dtype.element_ty)
        pairs = nearest_pairs(hadamard_block(fp32_values(pairs, tl.bfloat16)))
    return pairs


@triton.jit
def _quantize_chunk(x: tl.tensor, block: tl.tensor, K: tl.tensor, CONFIG: tl.constexpr) -> tl.tuple:
    """Quantize blocks of the rows that begin at `x`, one in each thread.

    Returns:
        nibbles, 8 words with the codes of four magnitudes each; signs, 8 words with the signs on top of four bytes
        each; the exponent, 255 for Inf and NaN; whether all codes are zero.

    NOTE: the chunk stays in registers until the row's extremes are known. It takes half as many as pairs and codes. It
    is no NamedTuple, since Triton 3.6 forgets the fields of those that are kept in a tuple.
    """
    GATE: tl.constexpr = CONFIG.GATE
    MODE: tl.constexpr = CONFIG.MODE
    DTYPE: tl.constexpr = x.dtype.element_ty
    pairs = _load_pairs(x, block, K, CONFIG)
    if tl.bfloat16 != DTYPE:
        tl.static_assert(GATE is None)
        values = fp32_values(pairs, DTYPE)
        pairs = join_pairs(odd_pair, values[0::2], values[1::2])
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
def _rescale_chunk(chunk: tl.tuple, relative: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """E2M1 codes times 2^relative as E5M2, by a table of each block's eight magnitudes: words [threads, 8], zeros in
    blocks that are not `inside`.
    """
    nibbles, signs, _, _ = chunk
    one = power_of_two(tl.minimum(tl.maximum(relative, -126), 13))
    one = tl.where(inside, one, 0.0)
    low = fp8_word(one * 0.0, one * 0.5, one, one * 1.5, 5, 2)
    high = fp8_word(one * 2.0, one * 3.0, one * 4.0, one * 6.0, 5, 2)
    words: tl.tuple = ()
    for i in tl.static_range(8):
        words = words + (look_up(low, high, nibbles[i], signs[i]),)
    return joined_words(words)


@triton.jit
def _store_words(
    values: tl.tensor, words: tl.tensor, rows: tl.tensor, first: tl.tensor, sizes: _Sizes, CONFIG: tl.constexpr
) -> None:
    """Store words [threads, 8] of the blocks from `first` on, block by block. Where columns are permuted, four blocks
    lie together: chunk t (jh) becomes chunk (jh) t, of four columns each.
    """
    PERMUTE: tl.constexpr = CONFIG.PERMUTE
    BLOCKS: tl.constexpr = CONFIG.BLOCKS
    ROWS: tl.constexpr = CONFIG.ROWS
    GROUP: tl.constexpr = 4 if PERMUTE else 1
    GROUPS: tl.constexpr = BLOCKS // GROUP
    row = _per_block(rows, ROWS, GROUPS)[:, None]
    word = first * 8 + (tl.arange(0, ROWS * GROUPS) % GROUPS)[:, None] * (8 * GROUP) + tl.arange(0, 8 * GROUP)[None, :]
    words_ptr = values.to(tl.pointer_type(tl.int32), bitcast=True) + row * (sizes.width // 4)
    permuted = tl.permute(tl.reshape(words, (ROWS * GROUPS, GROUP, 8)), (0, 2, 1))
    words = tl.reshape(permuted, (ROWS * GROUPS, 8 * GROUP))
    tl.store(words_ptr + word, words, mask=(row < sizes.M) & (word < sizes.width // 4))


@triton.jit
def _update_extremes(
    highest: tl.tensor, lowest: tl.tensor, chunk: tl.tuple, CONFIG: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The largest and the smallest exponent of each row so far and in a chunk, empty blocks aside."""
    ROWS: tl.constexpr = CONFIG.ROWS
    BLOCKS: tl.constexpr = CONFIG.BLOCKS
    _, _, exponent, empty = chunk
    high = tl.max(tl.reshape(tl.where(empty, 0, exponent), (ROWS, BLOCKS)), 1)
    low = tl.min(tl.reshape(tl.where(empty, 255, exponent), (ROWS, BLOCKS)), 1)
    return tl.maximum(highest, high), tl.minimum(lowest, low)


@triton.jit
def _per_block(of_rows: tl.tensor, ROWS: tl.constexpr, BLOCKS: tl.constexpr) -> tl.tensor:
    """[ROWS] to [ROWS * BLOCKS]."""
    return tl.reshape(tl.broadcast_to(of_rows[:, None], (ROWS, BLOCKS)), (ROWS * BLOCKS,))


@cached_launch
@triton.jit(do_not_specialize=["M"])
def mxquant_mxfp4_rescale_to_fp8(
    x: tl.tensor,
    values: tl.tensor,
    row_scale: tl.tensor,
    x_pre_quant: tl.tensor,
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
    CHUNKS: tl.constexpr,
    IN_REGISTERS: tl.constexpr,
    TOP: tl.constexpr,
    SPAN: tl.constexpr,
) -> None:
    """Some rows. Their first CHUNKS chunks of BLOCKS blocks stay in registers; the rest, if any, is read twice.

    NOTE: in place of rows and blocks that do not exist, the last ones are read.
    """
    CONFIG: tl.constexpr = _constants(MODE, PERMUTE, GATE, ROTATED, ROWS, BLOCKS, TOP)
    sizes = _Sizes(M, K, width)
    gdc_wait()
    gdc_launch_dependents()
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = _per_block(rows, ROWS, BLOCKS)
    x += tl.minimum(row, M - 1) * x_stride
    block = tl.arange(0, ROWS * BLOCKS) % BLOCKS
    last = K // 32 - 1
    kept: tl.tuple = ()
    highest, lowest = tl.zeros((ROWS,), tl.int32), tl.full((ROWS,), 255, tl.int32)
    for i in tl.static_range(CHUNKS):
        kept = kept + (_quantize_chunk(x, tl.minimum(i * BLOCKS + block, last), K, CONFIG),)
        highest, lowest = _update_extremes(highest, lowest, kept[i], CONFIG)
    if not IN_REGISTERS:
        for first in range(CHUNKS * BLOCKS, width // 32, BLOCKS):
            chunk = _quantize_chunk(x, tl.minimum(first + block, last), K, CONFIG)
            highest, lowest = _update_extremes(highest, lowest, chunk, CONFIG)
    in_range = (highest - lowest <= SPAN) & (highest != 255)
    tl.store(row_scale + rows, tl.where(in_range, row_scale_of(highest, TOP), float("nan")), mask=rows < M)

    state = _Rows(rows, highest, in_range)
    for i in tl.static_range(CHUNKS):
        _store_chunk(values, x_pre_quant, x, kept[i], i * BLOCKS, state, sizes, CONFIG)
    if not IN_REGISTERS:
        for first in range(CHUNKS * BLOCKS, width // 32, BLOCKS):
            chunk = _quantize_chunk(x, tl.minimum(first + block, last), K, CONFIG)
            _store_chunk(values, x_pre_quant, x, chunk, first, state, sizes, CONFIG)


@triton.jit
def _store_chunk(
    values: tl.tensor,
    x_pre_quant: tl.tensor,
    x: tl.tensor,
    chunk: tl.tuple,
    first: tl.tensor,
    rows: _Rows,
    sizes: _Sizes,
    CONFIG: tl.constexpr,
) -> None:
    """Store the blocks from `first` on, rescaled; and as they were before quantization, if they are gated or rotated
    and their row is out of range.
    """
    ROWS: tl.constexpr = CONFIG.ROWS
    BLOCKS: tl.constexpr = CONFIG.BLOCKS
    TOP: tl.constexpr = CONFIG.TOP
    ROTATED: tl.constexpr = CONFIG.ROTATED
    GATE: tl.constexpr = CONFIG.GATE
    block = first + tl.arange(0, ROWS * BLOCKS) % BLOCKS
    inside = block < sizes.K // 32
    _, _, exponent, _ = chunk
    relative = exponent - _per_block(rows.max_exponent, ROWS, BLOCKS) + TOP
    _store_words(values, _rescale_chunk(chunk, relative, inside), rows.index, first, sizes, CONFIG)
    if (ROTATED or GATE is not None) and tl.min(rows.in_range.to(tl.int32), 0) == 0:
        row = _per_block(rows.index, ROWS, BLOCKS)
        wanted = (row < sizes.M) & inside & (_per_block(rows.in_range.to(tl.int32), ROWS, BLOCKS) == 0)
        # NOTE: computed again. Such rows are rare, and to keep the pairs, or to store them by vectors, takes registers
        # of every row.
        pairs = _load_pairs(x, tl.minimum(block, sizes.K // 32 - 1), sizes.K, CONFIG)
        into = x_pre_quant.to(tl.pointer_type(tl.int32), bitcast=True) + row * (sizes.K // 2) + block * 16
        for i in tl.static_range(16):
            tl.store(into + i, pairs[i], mask=wanted)
