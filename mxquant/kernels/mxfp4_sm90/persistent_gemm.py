"""Many rows times a packed MXFP4 weight: a persistent, warp-specialized GEMM (`gluon_kernel`).

A split-K program decodes, then multiplies, then decodes again. Here some warps decode while others keep the tensor
cores busy. A program for each multiprocessor works through the tiles of the result, wave by wave. Tiles of the last
wave may split K; their partial sums are reduced in order.

Shape suffixes: M input rows, N weight rows, K columns.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mxquant.kernels.mxfp4_sm90.activation import rescale_activation
from mxquant.kernels.mxfp4_sm90.exact_fallback import fixup
from mxquant.kernels.mxfp4_sm90.gluon_kernel import mxquant_mxfp4_persistent_gemm
from mxquant.kernels.mxfp4_sm90.tile_scheduler import TILES, tile_coordinates
from mxquant.kernels.primitives.pdl import gdc_wait
from mxquant.kernels.runtime.launch import cached_launch, cdiv, multiprocessors
from mxquant.reference.rescale import Prologue


def supports_k(k: int) -> bool:
    """Whether `persistent_gemm` takes K columns.

    NOTE: the kernel itself takes multiples of 64 (two MX blocks), as grouped products use it. For one matrix, only
    multiples of 256 were run on a GPU.
    """
    return k % 256 == 0


def fills_device(m: int, n: int, k: int, device: torch.device) -> bool:
    """Whether `persistent_gemm` takes K columns, and has a tile of the result for three in four multiprocessors. With
    fewer, it is slower on an H200 than the split-K kernel.
    """
    return supports_k(k) and 4 * cdiv(m, _block_m(m)) * cdiv(n, 64 * TILES.value) >= 3 * multiprocessors(device)


def persistent_gemm(
    x_MK: Tensor,
    w_packed: Tensor,
    w_scale: Tensor,
    bias_N: Tensor | None,
    n: int,
    prologue: Prologue,
    dtype: torch.dtype,
) -> Tensor:
    """As `split_k_gemm`, for K a multiple of 256."""
    (m, k), device = x_MK.shape, x_MK.device
    values, x_scale, x_MK = rescale_activation(x_MK, prologue, permute=True)
    block_m = _block_m(m)
    tiles = cdiv(m, block_m) * cdiv(n, 64 * TILES.value)
    programs = multiprocessors(device)
    whole_tiles, splits = schedule_tiles(tiles, programs, k, fp16=prologue.scale_mode is None)
    split_tiles = tiles - whole_tiles
    y = torch.empty(m, n, dtype=dtype, device=device)
    # NOTE: in place of partial sums, a bias or a table of groups that do not exist, any tensor is passed and not read.
    partial = torch.empty(split_tiles * splits, TILES.value, block_m, 64, device=device) if split_tiles else x_scale
    mxquant_mxfp4_persistent_gemm[(min(programs, whole_tiles + split_tiles * splits),)](
        *tma_descriptors(w_packed, values, block_m), w_scale, x_scale, y if bias_N is None else bias_N,
        _descriptor(y, block_m, 64), partial, w_scale, m, n, k, whole_tiles, splits,
        **kernel_constants(values, k, block_m, bias_N, grouped=False),
    )  # fmt: skip
    if split_tiles:
        mxquant_persistent_split_k_reduce[(split_tiles, TILES.value)](
            partial, y, m, n, whole_tiles, SPLITS=splits, BM=block_m, launch_pdl=True
        )
    fixup(y, x_MK, w_packed, w_scale, bias_N, x_scale, prologue.scale_mode)
    return y


@functools.lru_cache(maxsize=4096)
def schedule_tiles(tiles: int, programs: int, k: int, fp16: bool) -> tuple[int, int]:
    """How many tiles are computed whole, and in how many splits of K each of the others.

    Tiles are computed in waves of one a program. The last wave may have too few for all programs. To store a partial
    tile and to reduce it costs about 0.065 us; 256 columns of a tile cost 1.7 us in FP8 and 2.7 us in FP16 (on an
    H200).
    """
    whole_tiles = tiles // programs * programs
    split_cost = 0.065 / ((2.7 if fp16 else 1.7) * k / 256)

    def cost(splits: int) -> float:
        work_tiles = (tiles - whole_tiles) * splits
        return cdiv(work_tiles, programs) / splits + (split_cost * work_tiles if splits > 1 else 0.0)

    splits = min(range(1, min(8, k // 256) + 1), key=cost)
    return (whole_tiles, splits) if splits > 1 else (tiles, 1)


def tma_descriptors(w_packed: Tensor, values: Tensor, block_m: int) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Descriptors of a packed weight or a stack of them, and of rescaled rows."""
    fp16 = values.dtype == torch.float16
    # The decoder takes a word as four bytes or as two halves.
    units = w_packed.view(torch.uint16 if fp16 else torch.uint8).view(-1, 64 if fp16 else 128)
    return _descriptor(units, _block_k(values) // 4, units.shape[1]), _descriptor(values, block_m, 128)


def kernel_constants(values: Tensor, k: int, block_m: int, bias: Tensor | None, *, grouped: bool) -> dict[str, Any]:
    """What `mxquant_mxfp4_persistent_gemm` is compiled for, and how it is launched."""
    return {
        "GROUPED": grouped, "TILES_EACH": 2 if block_m == 128 else 1, "BM": block_m, "BK": _block_k(values),
        "STAGES": 4 if values.dtype == torch.float16 else 3, "K_TAIL": k // 32 % 8, "HAS_BIAS": bias is not None,
        "num_warps": 4, "launch_pdl": True,
    }  # fmt: skip


def _block_k(values: Tensor) -> int:
    return 128 if values.dtype == torch.float16 else 256


def _block_m(m: int) -> int:
    return 32 if m <= 32 else 64 if m <= 64 else 128


def _descriptor(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """For TMA copies of `rows` by `columns`; what lies outside the matrix reads as zeros."""
    layout = NVMMASharedLayout(128, 8 * matrix.element_size(), 2)
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns], layout)


@cached_launch
@triton.jit
def mxquant_persistent_split_k_reduce(
    partial: tl.tensor,
    y: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    whole_tiles: tl.tensor,
    SPLITS: tl.constexpr,
    BM: tl.constexpr,
) -> None:
    """Add up the splits of a tile, in order, 64 weight rows a program."""
    m_tile, n_tile = tile_coordinates(whole_tiles + tl.program_id(0), M, N, BM)
    n = tl.arange(0, 64)
    m = tl.arange(0, BM)
    within = n[None, :] * BM + m[:, None]
    partial += (tl.program_id(0).to(tl.int64) * (SPLITS * TILES) + tl.program_id(1)) * (BM * 64)
    gdc_wait()
    total = tl.load(partial + within)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(partial + split * (TILES * BM * 64) + within)
    n += (n_tile * TILES + tl.program_id(1)) * 64
    m += m_tile * BM
    at = m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(y + at, total.to(y.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])
