"""Many rows times a tiled MXFP4 weight: decoding and tensor cores at the same time.

In `tiled_matmul` a program decodes, then multiplies, then decodes again. Here its warps have roles (`tiled_gluon`):
while some decode, others keep the tensor cores busy. A program for each multiprocessor works through the tiles of the
result, round by round. Those of the last round may be split along the columns, and the parts added up in order.

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

from mxquant.kernels.mxfp4_sm90.activation_fp8 import fold_input
from mxquant.kernels.mxfp4_sm90.dequantize import repair
from mxquant.kernels.mxfp4_sm90.gluon_kernel import product_kernel
from mxquant.kernels.mxfp4_sm90.tile_scheduler import TILES, place_of
from mxquant.kernels.primitives.pdl import gdc_wait
from mxquant.kernels.runtime.launch import cached_launch, cdiv, multiprocessors

# The kernel takes whole pairs of blocks, as `grouped_specialized` uses it; of one matrix, only this was run on a GPU.
_COLUMNS = 256


def takes_columns(k: int) -> bool:
    """Whether `multiply_many` takes K columns."""
    return k % _COLUMNS == 0


def keeps_busy(m: int, n: int, k: int, device: torch.device) -> bool:
    """Whether `multiply_many` takes K columns, and has a tile of the result for three in four multiprocessors.

    With fewer, it's slower on an H200 than what splits K among more programs.
    """
    return takes_columns(k) and 4 * cdiv(m, _rows_of(m)) * cdiv(n, 64 * TILES.value) >= 3 * multiprocessors(device)


def multiply_many(
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
    """As `tiled_matmul.multiply_few`, for K a multiple of 256."""
    (m, k), device = x_MK.shape, x_MK.device
    values, x_scale, x_MK = fold_input(x_MK, scale_mode, permute=True, rotated=rotated)
    fp16 = scale_mode is None
    rows = _rows_of(m)
    tiles = cdiv(m, rows) * cdiv(n, 64 * TILES.value)
    programs = multiprocessors(device)
    whole, parts = schedule(tiles, programs, k, fp16)
    split = tiles - whole
    y = torch.empty(m, n, dtype=dtype, device=device)
    partial = torch.empty(split * parts, TILES.value, rows, 64, device=device) if split else x_scale
    product_kernel[(min(programs, whole + split * parts),)](
        *descriptors(words, values, rows), bytes_, x_scale, y if bias_N is None else bias_N, _descriptor(y, rows, 64),
        partial, bytes_, m, n, k, whole, parts, **constants(values, k, rows, bias_N, grouped=False),
    )  # fmt: skip
    if split:
        _add_parts_kernel[(split, TILES.value)](partial, y, m, n, whole, PARTS=parts, BM=rows, launch_pdl=True)
    repair(y, x_MK, words, bytes_, bias_N, x_scale, scale_mode)
    return y


@functools.lru_cache(maxsize=4096)
def schedule(tiles: int, programs: int, k: int, fp16: bool) -> tuple[int, int]:
    """How many tiles are computed whole, and the parts of its columns that each of the others is split into.

    Tiles are computed in rounds of one a program; those of the last round may be too few for all. A part that is stored
    and added up again costs about 0.065 us, 256 columns of a tile 1.7 us in FP8 and 2.7 us in FP16 (on an H200).
    """
    whole = tiles // programs * programs
    part_cost = 0.065 / ((2.7 if fp16 else 1.7) * k / 256)

    def cost(parts: int) -> float:
        rest = (tiles - whole) * parts
        return cdiv(rest, programs) / parts + (part_cost * rest if parts > 1 else 0.0)

    parts = min(range(1, min(8, k // 256) + 1), key=cost)
    return (whole, parts) if parts > 1 else (tiles, 1)


def descriptors(words: Tensor, values: Tensor, rows: int) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Of the tiles of a weight or of a stack of them, and of folded rows, of which so many are copied at a time."""
    fp16 = values.dtype == torch.float16
    # A word of four or two units, as the decoder takes them.
    units = words.view(torch.uint16 if fp16 else torch.uint8).view(-1, 64 if fp16 else 128)
    return _descriptor(units, _columns_of(values) // 4, units.shape[1]), _descriptor(values, rows, 128)


def constants(values: Tensor, k: int, rows: int, bias: Tensor | None, *, grouped: bool) -> dict[str, Any]:
    """What `product_kernel` is compiled for, and how it is launched."""
    return {
        "GROUPED": grouped, "EACH": 2 if rows == 128 else 1, "BM": rows, "BK": _columns_of(values),
        "STAGES": 4 if values.dtype == torch.float16 else 3, "REST": k // 32 % 8, "HAS_BIAS": bias is not None,
        "num_warps": 4, "launch_pdl": True,
    }  # fmt: skip


def _columns_of(values: Tensor) -> int:
    """Columns of a step."""
    return 128 if values.dtype == torch.float16 else 256


def _rows_of(m: int) -> int:
    """Rows of a tile of the result."""
    return 32 if m <= 32 else 64 if m <= 64 else 128


def _descriptor(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """For copies of `rows` by `columns`; what lies outside the matrix reads as zeros."""
    layout = NVMMASharedLayout(128, 8 * matrix.element_size(), 2)
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns], layout)


@cached_launch
@triton.jit
def _add_parts_kernel(
    partial: tl.tensor,
    y: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    whole: tl.tensor,
    PARTS: tl.constexpr,
    BM: tl.constexpr,
) -> None:
    """The tiles that were split: the sum of their parts, in order, 64 weight rows a program."""
    m_tile, n_tile = place_of(whole + tl.program_id(0), M, N, BM)
    n = tl.arange(0, 64)
    m = tl.arange(0, BM)
    within = n[None, :] * BM + m[:, None]
    partial += (tl.program_id(0).to(tl.int64) * (PARTS * TILES) + tl.program_id(1)) * (BM * 64)
    gdc_wait()
    total = tl.load(partial + within)
    for part in tl.static_range(1, PARTS):
        total += tl.load(partial + part * (TILES * BM * 64) + within)
    n += (n_tile * TILES + tl.program_id(1)) * 64
    m += m_tile * BM
    at = m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(y + at, total.to(y.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])
