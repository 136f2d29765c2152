"""Tiled MXFP4 weights expanded to a workspace, for an ordinary matmul with many rows, and what must follow it.

- `expand_e4m3`: for `torch._scaled_mm`, with MXFP4 activations folded into E5M2. `repair` follows: rows of activations
  that E5M2 could not hold are recomputed block by block, with exact sums.
- `expand_bfloat16`: the dequantized weight, for activations that are not quantized.

Shape suffixes: M input rows, N weight rows, K columns.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxquant.formats.element import element_values
from mxquant.formats.spec import ELEMENT_FORMATS
from mxquant.kernels.fold import row_factor
from mxquant.kernels.tiled import code_values, decode_bytes, exact_tile, highest_exponent, scale_address
from mxquant.kernels.triton_numerics import e8m0_to_float

# What the row's largest block exponent becomes in E4M3: 6 x 2^6 <= 448.
_TOP = 6


@functools.cache
def _e4m3_table(device: torch.device) -> Tensor:
    """Row e, int32 [32, 2]: the E4M3 bytes of the eight magnitudes times 2^(e - 27 + 6), exact for e from 13 to 27."""
    values = torch.tensor(element_values(ELEMENT_FORMATS["e2m1"])[:8], dtype=torch.float64)
    exponents = torch.arange(32, dtype=torch.float64).clamp(max=27) - 27 + _TOP
    scaled = (values * torch.exp2(exponents).unsqueeze(1)).float().to(torch.float8_e4m3fn)
    return scaled.view(torch.int32).to(device)


def expand_e4m3(words: Tensor, bytes_: Tensor, n: int, k: int) -> tuple[Tensor, Tensor]:
    """The tiled weight as float8_e4m3fn [N, K], columns in order, and fp32 row scales [N, 1]."""
    values = torch.empty(n, k, dtype=torch.float8_e4m3fn, device=words.device)
    row_scale = torch.empty(n, 1, dtype=torch.float32, device=words.device)
    _expand_e4m3_kernel[(n // 64, k // 256)](
        words, bytes_, _e4m3_table(words.device), values.view(torch.uint8), row_scale, k, TOP=_TOP, num_warps=4
    )
    return values, row_scale


@triton.jit
def _expand_e4m3_kernel(
    words: tl.tensor,
    scale_bytes: tl.tensor,
    table: tl.tensor,
    values: tl.tensor,
    row_scale: tl.tensor,
    K: tl.tensor,
    TOP: tl.constexpr,
) -> None:
    """64 rows, 256 columns: of each chunk of 128 columns and half, 128 blocks of 16 bytes, one a thread."""
    tile = tl.program_id(0).to(tl.int64)
    pair = tl.program_id(1)
    piece = tl.arange(0, 4)  # chunk, half
    thread = tl.arange(0, 128)
    byte = tl.load(scale_bytes + (tile * (K // 256) + pair) * 512 + thread[None, :] * 4 + piece[:, None])
    at = (byte.to(tl.int32) & 0x1F) * 2
    low = tl.broadcast_to(tl.load(table + at)[:, :, None], (4, 128, 16))
    high = tl.broadcast_to(tl.load(table + at + 1)[:, :, None], (4, 128, 16))
    word_ptr = words + tile * (K // 128 * 4096) + pair * 8192
    packed = tl.load(word_ptr + piece[:, None] * 2048 + tl.arange(0, 2048)[None, :])
    half0, half1 = decode_bytes(tl.reshape(packed, (4, 128, 16)), low, high)
    w = tl.reshape(tl.join(half0, half1), (2, 2, 4, 8, 4, 4, 4, 2))  # chunk half warp g t j b h
    w = tl.reshape(tl.permute(w, (2, 1, 3, 0, 4, 5, 7, 6)), (64, 256))
    n = tile * 64 + tl.arange(0, 64)
    column = pair * 256 + tl.arange(0, 256)
    tl.store(values + n[:, None] * K + column[None, :], w)
    if pair == 0:
        tl.store(row_scale + n, row_factor(highest_exponent(scale_bytes, n, K), TOP))


def expand_bfloat16(words: Tensor, bytes_: Tensor, k: int) -> Tensor:
    """The values of tiles of K columns, bf16 [N, K], columns in order."""
    n = words.shape[0] * 64
    values = torch.empty(n, k, dtype=torch.bfloat16, device=words.device)
    _expand_bfloat16_kernel[(n // 64, k // 128)](words.view(torch.int32), bytes_, values, k, num_warps=4)
    return values


@triton.jit
def _expand_bfloat16_kernel(words32: tl.tensor, scale_bytes: tl.tensor, values: tl.tensor, K: tl.tensor) -> None:
    """64 rows, 128 columns: 16 consecutive words of each row, four a block."""
    tile = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    row = tl.arange(0, 64)
    word = tl.arange(0, 16)
    n = tile * 64 + row
    thread = (row // 16 * 32 + row % 8 * 4)[:, None] + (word // 4)[None, :]
    address = ((tile * (K // 128) + chunk) * 2 + (row // 8 % 2)[:, None]) * 512 + thread * 4 + (word % 4)[None, :]
    packed = tl.load(words32 + address)
    byte = tl.load(scale_bytes + scale_address(n[:, None], chunk * 4 + (word // 4)[None, :], K)).to(tl.int32)
    exponent = tl.maximum((byte & 0x1F) - 27 + highest_exponent(scale_bytes, n, K)[:, None], 0)
    codes = code_values(packed[:, :, None], tl.arange(0, 8)[None, None, :])
    out = tl.reshape((codes * e8m0_to_float(exponent)[:, :, None]).to(tl.bfloat16), (64, 128))
    column = chunk * 128 + tl.arange(0, 128)
    tl.store(values + n[:, None] * K + column[None, :], out)


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
    _repair_kernel[(n // 64, triton.cdiv(m, _REPAIR_ROWS))](
        y_MN, x_MK, words.view(torch.int32), bytes_, y_MN if bias_N is None else bias_N, unfit_M, m, n, k,
        x_MK.stride(0), ROWS=_REPAIR_ROWS, MODE=scale_mode, HAS_BIAS=bias_N is not None,
    )  # fmt: skip


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
                total = exact_tile(x, words32, scale_bytes, n, m, inside, 0, K // 32, K, x_stride, MODE, 64, 32)
                if HAS_BIAS:
                    total += tl.load(bias + n).to(tl.float32)[:, None]
                at = m[None, :].to(tl.int64) * N + n[:, None]
                tl.store(y + at, total.to(y.dtype.element_ty), mask=inside[None, :])
