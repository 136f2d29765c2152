"""A few rows times a tiled MXFP4 weight, decoded in registers (`tiled_decode`).

Activations come from `fold`: E5M2 for MXFP4 activations, FP16 for bf16 ones, both exact relative to one power of two a
row, with the columns permuted as the registers hold the weight. Rows that do not fold are recomputed block by block.

Launches overlap (`overlap`).

Shape suffixes: M input rows, N weight rows, K columns.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxquant.kernels.mxfp4_sm90.activation_fp8 import any_unfit, folding, row_factor
from mxquant.kernels.mxfp4_sm90.load import exact_tile, highest_exponent, store_tile
from mxquant.kernels.mxfp4_sm90.mainloop import TOP, columns_of, tile_product
from mxquant.kernels.primitives.pdl import gdc_launch_dependents, gdc_wait
from mxquant.kernels.runtime.launch import cached_launch, cdiv
from mxquant.kernels.runtime.plan import Buffer, Kind, Plan, Step, kind


class Shape(NamedTuple):
    """A configuration. Each was tested against float64: not all that compile are right, or fast."""

    rows_M: int
    tiles_N: int
    """Tiles of 64 weight rows."""
    columns_K: int
    promote: int
    programs: int
    """Programs that run at once, on 132 multiprocessors; K is split where the tiles are fewer."""
    registers: int | None = None
    """Most registers a thread may take, where the compiler's choice leaves room for fewer programs."""


_FP8_SHAPES = (
    Shape(16, 1, 256, 128, 550),
    Shape(32, 2, 256, 256, 396),
    Shape(64, 2, 256, 256, 264),
    Shape(128, 1, 256, 256, 264),
)
# Sums of FP16 products are fp32's. Named so, the sum is not folded into the dot, which Triton 3.6 gets wrong.
_NEVER = 1 << 30
_FP16_SHAPES = (
    Shape(16, 1, 256, _NEVER, 1000, registers=104),
    Shape(32, 2, 128, _NEVER, 396),
    Shape(64, 2, 128, _NEVER, 264),
    Shape(128, 1, 128, _NEVER, 264),
)


def multiply_few(
    x_MK: Tensor,
    words: Tensor,
    bytes_: Tensor,
    bias_N: Tensor | None,
    n: int,
    scale_mode: str | None,
    dtype: torch.dtype,
    *,
    rotated: bool = False,
) -> Tensor:
    """The product [M, N] in `dtype` of some rows with a tiled weight of N rows.

    Args:
        x_MK: bf16 (or fp16 where it is quantized), last axis contiguous; M from 1 on.
        words, bytes_: of `pack_tiles`.
        bias_N: any float dtype, or None.
        scale_mode: of MXFP4 activations; None: they are not quantized.
        rotated: rotate bf16 activations before they are quantized.
    """
    (m, k), (x_stride, _) = x_MK.shape, x_MK.stride()
    plan = _plan(m, k, n, x_stride, x_MK.dtype, kind(bias_N), scale_mode, rotated, dtype, x_MK.device)
    return plan(x_MK, words, bytes_) if bias_N is None else plan(x_MK, words, bytes_, bias_N)


@functools.lru_cache(maxsize=4096)
def _plan(
    m: int,
    k: int,
    n: int,
    x_stride: int,
    x_dtype: torch.dtype,  # as `bias`, also what kernels are compiled for
    bias: Kind | None,
    scale_mode: str | None,
    rotated: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> Plan:
    shape = shape_for(m, scale_mode is not None)
    row_tiles = cdiv(m, shape.rows_M)
    tiles, split = arrange(n, k, row_tiles, shape)
    between, fold = folding(m, k, x_stride, scale_mode, rotated=rotated)
    x, stride = ("before", k) if rotated else ("x", x_stride)
    sums, add = adding(split, m, n)
    multiply = Step(
        _multiply_few_kernel,
        (n // (64 * tiles), split, row_tiles),
        ("words", "bytes", "values", "row_scale", x, "y" if bias is None else "bias", "partial" if add else "y", m, n,
         k, stride),
        {"BM": shape.rows_M, "TILES": tiles, "REST": k // 32 % 8, "BK": shape.columns_K, "PROMOTE": shape.promote,
         "HAS_BIAS": bias is not None, "MODE": scale_mode, "num_warps": 4, "num_stages": 3,
         "maxnreg": shape.registers, "launch_pdl": True},
    )  # fmt: skip
    given = "x", "words", "bytes", *(() if bias is None else ("bias",))
    return Plan(given, ("y", Buffer((m, n), dtype)), between | sums, [fold, multiply, *add], device)


def shape_for(rows: int, fp8: bool) -> Shape:
    """The configuration for so many rows of one matrix."""
    shapes = _FP8_SHAPES if fp8 else _FP16_SHAPES
    return next((shape for shape in shapes if rows <= shape.rows_M), shapes[-1])


@functools.lru_cache(maxsize=4096)
def arrange(n: int, k: int, row_tiles: int, shape: Shape) -> tuple[int, int]:
    """Tiles of weight rows a program, and parts that K is split into, of at least 256 columns.

    Parts are added up in a fixed order, through memory: beyond four, rather fewer tiles a program.
    """
    for tiles in (shape.tiles_N, 1):
        parts = min(k // 256, max(1, shape.programs // (n // (64 * tiles) * row_tiles or 1)))
        if n % (64 * tiles) == 0 and parts <= 4:
            break
    return tiles, parts


def adding(parts: int, m: int, n: int) -> tuple[dict[str, Buffer], list[Step]]:
    """The sums [parts, M, N], fp32, that a kernel makes instead of "y", and the step that adds them into it; none for
    one part.
    """
    if parts == 1:
        return {}, []
    constants = {"SPLIT": parts, "BLOCK": 1024, "launch_pdl": True}
    step = Step(_add_parts_kernel, (cdiv(m * n, 1024),), ("partial", "y", m * n), constants)
    return {"partial": Buffer((parts, m, n), torch.float32)}, [step]


@cached_launch
@triton.jit
def _multiply_few_kernel(
    words: tl.tensor,
    scale_bytes: tl.tensor,
    x: tl.tensor,
    x_scale: tl.tensor,
    x_before: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    x_stride: tl.tensor,
    BM: tl.constexpr,
    REST: tl.constexpr,
    TILES: tl.constexpr,
    BK: tl.constexpr,
    PROMOTE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    MODE: tl.constexpr,
) -> None:
    BN: tl.constexpr = 64 * TILES
    tile = tl.program_id(0).to(tl.int64) * TILES
    part, parts = tl.program_id(1), tl.num_programs(1)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    inside = m < M
    gdc_launch_dependents()
    gdc_wait()  # for the folded activations
    x_row = x + m.to(tl.int64) * ((K + 127) // 128 * 128)
    total = tile_product(words, scale_bytes, x_row, inside, tile, part, parts, K, REST, TILES, BK, PROMOTE)
    n = tile * 64 + tl.arange(0, BN)
    w_factor = row_factor(highest_exponent(scale_bytes, n, K), TOP)
    x_factor = tl.load(x_scale + m, mask=inside, other=0.0)
    total = total * w_factor[:, None] * x_factor[None, :]
    y_at = y + part.to(tl.int64) * M * N + m[None, :].to(tl.int64) * N + n[:, None]
    store_tile(y_at, total, bias + n, inside & (x_factor == x_factor), part, HAS_BIAS)
    if any_unfit(x_factor):
        begin, steps = columns_of(part, parts, K)
        end = tl.where(part == parts - 1, K // 32, (begin + steps) * 8)
        unfit = x_factor != x_factor
        total = exact_tile(x_before, words, scale_bytes, n, m, unfit, begin * 8, end, K, x_stride, MODE, BN, BM)
        store_tile(y_at, total, bias + n, unfit, part, HAS_BIAS)


@cached_launch
@triton.jit
def _add_parts_kernel(
    partial: tl.tensor, y: tl.tensor, size: tl.tensor, SPLIT: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gdc_wait()
    total = tl.load(partial + at, mask=at < size, other=0.0)
    for part in tl.static_range(1, SPLIT):
        total += tl.load(partial + part * size + at, mask=at < size, other=0.0)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=at < size)
