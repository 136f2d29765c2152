"""Quantize to packed codes and block scales, and back: the reference that every kernel equals bit by bit.

Plain tensors, the blocked axis last. The work goes in chunks of rows: temporaries stay small beside the input and, on a
CPU, in the cache.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from mxquant.formats.convert import chunk_elements, to_fp32
from mxquant.formats.element import MAGNITUDE_MASK, decode, encode
from mxquant.formats.pack import pack_codes, unpack_codes
from mxquant.formats.scale import (
    NAN_BYTE,
    e4m3_from_amax,
    e4m3_to_float,
    e8m0_from_amax,
    e8m0_reciprocal,
    nvfp4_per_tensor_scale,
    scale_to_float,
)
from mxquant.formats.search import search_e4m3, search_e8m0
from mxquant.formats.spec import Format, resolve_scale_mode


def quantize_blocks(
    x: Tensor,
    fmt: Format,
    scale_mode: str | None = None,
    *,
    per_tensor_scale: Tensor | None = None,
    canonical_zero: bool = False,
) -> tuple[Tensor, Tensor]:
    """Quantize `x` along its last axis.

    Args:
        x: [..., K] in bf16, fp16, fp32, or fp64 within fp32's range; any K, the last block may be partial.
        scale_mode: one of `fmt.scale_modes` or `fmt.searched_scale_modes`; None: the format's default.
        per_tensor_scale: NVFP4 only, fp32: 0-dim, or broadcastable to [..., 1]. None: computed from the whole of `x`.
        canonical_zero: write +0 for every zero.

    Returns:
        codes, uint8 [..., fmt.packed_size(K)]; scales, uint8 [..., fmt.num_blocks(K)]. A block that holds NaN or Inf
        has scale byte 255 and codes 0.
    """
    mode = resolve_scale_mode(fmt, scale_mode)
    length = x.shape[-1]
    rows = x.reshape(math.prod(x.shape[:-1]), length)
    if fmt.per_tensor:
        if per_tensor_scale is None:
            per_tensor_scale = nvfp4_per_tensor_scale(x, mode)
        per_tensor_scale = per_tensor_scale.to(torch.float32)
        if per_tensor_scale.numel() > 1:
            per_tensor_scale = per_tensor_scale.expand(*x.shape[:-1], 1).reshape(rows.shape[0], 1)
    qdata = torch.empty(rows.shape[0], fmt.packed_size(length), dtype=torch.uint8, device=x.device)
    scale = torch.empty(rows.shape[0], fmt.num_blocks(length), dtype=torch.uint8, device=x.device)
    step = max(1, chunk_elements(rows) // max(1, length))
    for start in range(0, rows.shape[0], step):
        chunk = slice(start, start + step)
        per_row = per_tensor_scale
        if per_row is not None and per_row.numel() > 1:
            per_row = per_row[chunk]
        byte, scaled = scale_blocks(to_blocks(to_fp32(rows[chunk]), fmt), fmt, mode, per_row)
        codes = encode(scaled, fmt.element, canonical_zero=canonical_zero)
        codes.masked_fill_((byte == NAN_BYTE).unsqueeze(-1), 0)
        qdata[chunk] = pack_codes(codes.flatten(-2), fmt.element.bits)[:, : qdata.shape[1]]
        scale[chunk] = byte
    return qdata.view(*x.shape[:-1], qdata.shape[1]), scale.view(*x.shape[:-1], scale.shape[1])


def to_blocks(rows: Tensor, fmt: Format) -> Tensor:
    """[rows, K] to [rows, blocks, block_size]. Zeros fill the last block, and do not change its scale."""
    assert fmt.block_size is not None
    missing = -rows.shape[-1] % fmt.block_size
    return (F.pad(rows, (0, missing)) if missing else rows).unflatten(-1, (-1, fmt.block_size))


def scale_blocks(
    blocks: Tensor, fmt: Format, mode: str | None, per_tensor_scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The scale bytes [rows, blocks] of fp32 `blocks` [rows, blocks, block_size], and the blocks in units of them.
    NVFP4's `per_tensor_scale` is fp32, of one element or [rows, 1].
    """
    if fmt.per_tensor:
        assert per_tensor_scale is not None
        if mode == "four_over_six":
            byte = search_e4m3(blocks, fmt.element, per_tensor_scale)
        else:
            byte = e4m3_from_amax(blocks.abs().amax(-1), per_tensor_scale)
        # NOTE: divided by the rounded product of both scales, as ModelOpt does. A reciprocal would move values at ties.
        return byte, blocks / (e4m3_to_float(byte) * per_tensor_scale).unsqueeze(-1)
    assert mode is not None
    if mode == "mse":
        byte = search_e8m0(blocks, fmt.element)
    else:
        amax_bits = (blocks.contiguous().view(torch.int32) & MAGNITUDE_MASK).amax(-1)
        byte = e8m0_from_amax(amax_bits, fmt.element, mode)
    return byte, blocks * e8m0_reciprocal(byte).unsqueeze(-1)


def dequantize_blocks(
    qdata: Tensor,
    scale: Tensor,
    fmt: Format,
    length: int,
    *,
    block_offset: int = 0,
    per_tensor_scale: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Values of packed codes: code x block scale (x per-tensor scale), in fp32 (fp64 for an fp64 `dtype`), rounded
    once to `dtype`.

    Args:
        qdata: uint8 [..., fmt.packed_size(block_offset + length)].
        scale: uint8 [..., fmt.num_blocks(block_offset + length)].
        block_offset: codes to skip at the start of the first block.
        per_tensor_scale: NVFP4 only, fp32 multiplier, broadcastable to [..., 1].

    Returns:
        [..., length] in `dtype`; NaN throughout a block whose scale byte is 255.
    """
    arithmetic = torch.float64 if dtype == torch.float64 else torch.float32
    block_scale = scale_to_float(scale, fmt.scale_format, arithmetic)
    if per_tensor_scale is not None:
        block_scale = block_scale * per_tensor_scale.to(arithmetic)
    codes = unpack_codes(qdata, fmt.element.bits, block_offset + length)
    values = to_blocks(decode(codes, fmt.element, arithmetic), fmt) * block_scale.unsqueeze(-1)
    return values.flatten(-2)[..., block_offset : block_offset + length].to(dtype)
