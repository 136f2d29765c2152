"""Few rows times a packed MXFP4 weight: a GEMM that decodes the weight in registers and splits K among programs.

The activation prologue is a launch of its own before the matmul, not the filling of a pipeline. It quantizes the rows
where that is asked for, and rescales them to FP8 or FP16, both exact relative to the row's scale. Columns are permuted
as the registers hold the weight. The launches overlap (`primitives.pdl`).

A row that does not fit FP8 or FP16 exactly is out of range (`mxquant.reference.rescale`). The prologue gives it a
row scale of NaN, and the program that meets it recomputes it from the input.

Shape suffixes: M input rows, N weight rows, K columns.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxquant.kernels.mxfp4_sm90.activation import plan_prologue
from mxquant.kernels.mxfp4_sm90.exact_fallback import any_out_of_range, exact_tile
from mxquant.kernels.mxfp4_sm90.load import PackedWeight, load_max_exponent, row_scale_of
from mxquant.kernels.mxfp4_sm90.mainloop import TOP_EXPONENT, Split, mainloop, split_range
from mxquant.kernels.primitives.pdl import gdc_launch_dependents, gdc_wait
from mxquant.kernels.runtime.launch import cached_launch, cdiv, next_power_of_2
from mxquant.kernels.runtime.plan import Buffer, Kind, Plan, Step, kind
from mxquant.reference.rescale import Prologue


class SplitKConfig(NamedTuple):
    """Tile sizes and occupancy of a split-K kernel.

    NOTE: each config was tested against float64. Not all that compile are right, or fast.
    """

    block_m: int
    tiles_n: int
    """Tiles of 64 weight rows a program."""
    block_k: int
    promote_k: int
    """Columns that tensor cores add up before a sum is promoted to fp32."""
    target_programs: int
    """Programs (CTAs) to launch: about what 132 multiprocessors run at once. With fewer tiles, K is split."""
    max_registers: int | None = None
    """Of a thread, where the compiler's choice leaves room for fewer programs."""


_FP8_CONFIGS = (
    SplitKConfig(16, 1, 256, 128, 550),
    SplitKConfig(32, 2, 256, 256, 396),
    SplitKConfig(64, 2, 256, 256, 264),
    SplitKConfig(128, 1, 256, 256, 264),
)
# Sums of FP16 products are fp32 sums. NOTE: so large a number also keeps Triton 3.6 from folding the sum into the dot,
# which it gets wrong.
_NEVER = 1 << 30
_FP16_CONFIGS = (
    SplitKConfig(16, 1, 256, _NEVER, 1000, max_registers=104),
    SplitKConfig(32, 2, 128, _NEVER, 396),
    SplitKConfig(64, 2, 128, _NEVER, 264),
    SplitKConfig(128, 1, 128, _NEVER, 264),
)


def split_k_gemm(
    x_MK: Tensor,
    w_packed: Tensor,
    w_scale: Tensor,
    bias_N: Tensor | None,
    n: int,
    prologue: Prologue,
    dtype: torch.dtype,
) -> Tensor:
    """The product [M, N] in `dtype` of rows with a packed weight of N rows.

    Args:
        x_MK: bf16 (or fp16 where it is quantized), last axis contiguous; M from 1 on.
        w_packed, w_scale: of `pack_weight`.
        bias_N: any float dtype, or None.
        prologue: what happens to `x_MK` first; it has no gate.
    """
    (m, k), (x_stride, _) = x_MK.shape, x_MK.stride()
    sizes, kinds = (m, n, k, x_stride, m, 0), (x_MK.dtype, None, None, kind(bias_N))
    plan = plan_gemm(mxquant_mxfp4_split_k_gemm, sizes, kinds, prologue, dtype, x_MK.device)
    return plan(x_MK, w_packed, w_scale) if bias_N is None else plan(x_MK, w_packed, w_scale, bias_N)


@functools.lru_cache(maxsize=4096)
def plan_gemm(
    kernel: Any,
    sizes: tuple[int, int, int, int, int, int],
    kinds: tuple[torch.dtype, Kind | None, Kind | None, Kind | None],
    prologue: Prologue,
    dtype: torch.dtype,
    device: torch.device,
) -> Plan:
    """The plan of a split-K kernel: the prologue, the kernel, and the reduction where K is split.

    Args:
        sizes: rows of the input, N, K, how far rows of the input lie apart, rows of the result, and groups; 0 groups
            for a product of one matrix.
        kinds: dtype of the input; kinds of offsets, gather indices and bias, None for those that are not given. NOTE:
            kernels are compiled for all of these.
        dtype: of the result.
    """
    m, n, k, x_stride, rows, groups = sizes
    _, offsets, gather, bias = kinds
    config = choose_config(cdiv(rows, min(rows, groups)) if groups else m, prologue)
    row_tiles = cdiv(m, config.block_m)
    group_tensors: tuple[str, ...] = ()
    group_constants: dict[str, Any] = {}
    if groups:
        config = config._replace(max_registers=128 if config.block_m == 16 else None)
        # Every group has at most one tile of rows that is not full. The rows beyond the last one are a group as well.
        row_tiles = rows // config.block_m + min(rows, groups + 1)
        group_tensors = "offsets", "rows" if gather else "offsets"
        group_constants = {"GROUPS": next_power_of_2(groups + 1), "GATHER": gather is not None}
    tiles_n, splits = choose_split_k(n, k, row_tiles, config)
    buffers, prologue_step = plan_prologue(m, k, x_stride, prologue)
    x, stride = ("x_pre_quant", k) if "x_pre_quant" in buffers else ("x", x_stride)
    partials, reduction = split_k_reduction(splits, rows, n)
    # NOTE: "y" stands in for a bias that is not given, "offsets" for gather indices: the kernel does not read them.
    gemm = Step(
        kernel,
        (n // (64 * tiles_n), splits, row_tiles),
        ("w_packed", "w_scale", "values", "row_scale", x, *group_tensors, "bias" if bias else "y",
         "partial" if reduction else "y", rows, n, k, stride, *([groups] if groups else [])),
        {**group_constants, "BM": config.block_m, "TILES": tiles_n, "K_TAIL": k // 32 % 8, "BK": config.block_k,
         "PROMOTE": config.promote_k, "HAS_BIAS": bias is not None, "MODE": prologue.scale_mode, "num_warps": 4,
         "num_stages": 3, "maxnreg": config.max_registers, "launch_pdl": True},
    )  # fmt: skip
    optional = {"offsets": offsets, "rows": gather, "bias": bias}
    tensors = "x", "w_packed", "w_scale", *(name for name, given in optional.items() if given)
    result = "y", Buffer((rows, n), dtype)
    return Plan(tensors, result, buffers | partials, [prologue_step, gemm, *reduction], device)


def choose_config(rows: int, prologue: Prologue) -> SplitKConfig:
    """The config for so many rows of one matrix."""
    configs = _FP16_CONFIGS if prologue.scale_mode is None else _FP8_CONFIGS
    return next((config for config in configs if rows <= config.block_m), configs[-1])


def choose_split_k(n: int, k: int, row_tiles: int, config: SplitKConfig) -> tuple[int, int]:
    """Tiles of weight rows a program, and splits of K, of at least 256 columns each.

    Partial sums go through memory. Rather than in more than four, a program computes fewer tiles.
    """
    for tiles_n in (config.tiles_n, 1):
        splits = min(k // 256, max(1, config.target_programs // (n // (64 * tiles_n) * row_tiles or 1)))
        if n % (64 * tiles_n) == 0 and splits <= 4:
            break
    return tiles_n, splits


def split_k_reduction(splits: int, m: int, n: int) -> tuple[dict[str, Buffer], list[Step]]:
    """The fp32 sums "partial" [splits, M, N] that a kernel writes in place of "y", and the step that adds them up in
    order; nothing for one split.
    """
    if splits == 1:
        return {}, []
    constants = {"SPLITS": splits, "BLOCK": 1024, "launch_pdl": True}
    step = Step(mxquant_split_k_reduce, (cdiv(m * n, 1024),), ("partial", "y", m * n), constants)
    return {"partial": Buffer((splits, m, n), torch.float32)}, [step]


@triton.jit
def store_output(
    y: tl.tensor, total: tl.tensor, bias: tl.tensor, row_mask: tl.tensor, split: Split, HAS_BIAS: tl.constexpr
) -> None:
    """The epilogue: store the input rows of `row_mask` [BM] of a product [BN, BM] at `y`. Split 0 adds the bias at
    `bias` [BN].

    NOTE: a tile with rows out of range is stored in two parts. Rows in range come first, so that their sums need not
    stay in registers while the others are recomputed.
    """
    if HAS_BIAS and split.split_id == 0:
        total += tl.load(bias).to(tl.float32)[:, None]
    tl.store(y, total.to(y.dtype.element_ty), mask=row_mask[None, :])


@cached_launch
@triton.jit
def mxquant_mxfp4_split_k_gemm(
    w_packed: tl.tensor,
    w_scale: tl.tensor,
    x: tl.tensor,
    x_scale: tl.tensor,
    x_pre_quant: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    x_stride: tl.tensor,
    BM: tl.constexpr,
    K_TAIL: tl.constexpr,
    TILES: tl.constexpr,
    BK: tl.constexpr,
    PROMOTE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    MODE: tl.constexpr,
) -> None:
    """One tile of the result, 64 * TILES weight rows by BM input rows, over one split of K.

    Args: K_TAIL, BK, PROMOTE as of `mainloop`, MODE as of `exact_tile`.
    """
    BN: tl.constexpr = 64 * TILES
    weight = PackedWeight(w_packed, w_scale, K)
    tile = tl.program_id(0).to(tl.int64) * TILES
    split = Split(tl.program_id(1), tl.num_programs(1))
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    inside = m < M
    gdc_launch_dependents()
    gdc_wait()  # for the prologue
    x_row = x + m.to(tl.int64) * ((K + 127) // 128 * 128)
    total = mainloop(weight, x_row, inside, tile, split, K_TAIL, TILES, BK, PROMOTE)
    n = tile * 64 + tl.arange(0, BN)
    w_row_scale = row_scale_of(load_max_exponent(w_scale, n, K), TOP_EXPONENT)
    x_row_scale = tl.load(x_scale + m, mask=inside, other=0.0)
    total = total * w_row_scale[:, None] * x_row_scale[None, :]
    y_at = y + split.split_id.to(tl.int64) * M * N + m[None, :].to(tl.int64) * N + n[:, None]
    store_output(y_at, total, bias + n, inside & (x_row_scale == x_row_scale), split, HAS_BIAS)
    if any_out_of_range(x_row_scale):
        first, steps = split_range(split, K)
        end_block = tl.where(split.split_id == split.num_splits - 1, K // 32, (first + steps) * 8)
        out_of_range = x_row_scale != x_row_scale
        total = exact_tile(x_pre_quant, x_stride, weight, n, m, out_of_range, first * 8, end_block, MODE)
        store_output(y_at, total, bias + n, out_of_range, split, HAS_BIAS)


@cached_launch
@triton.jit
def mxquant_split_k_reduce(
    partial: tl.tensor, y: tl.tensor, size: tl.tensor, SPLITS: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Add up the splits of BLOCK elements of the result, in order."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gdc_wait()
    total = tl.load(partial + at, mask=at < size, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(partial + split * size + at, mask=at < size, other=0.0)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=at < size)
