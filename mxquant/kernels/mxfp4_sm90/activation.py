"""The activation prologue: rows rescaled, in one launch before a product, to row-wise FP8 or FP16.

Twin: `mxquant.reference.rescale`, which says when a row is in range and how columns are permuted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxquant.kernels.mxfp4_sm90.activation_fp8 import fp8_step
from mxquant.kernels.mxfp4_sm90.activation_fp16 import fp16_step
from mxquant.kernels.runtime.launch import cdiv
from mxquant.kernels.runtime.plan import Buffer, Step
from mxquant.reference.rescale import Prologue


def plan_prologue(
    m: int, k: int, x_stride: int, prologue: Prologue, *, permute: bool = True
) -> tuple[dict[str, Buffer], Step]:
    """The tensors that the prologue writes, by name, and the step that writes them from "x".

    They are "values" and "row_scale" of `rescale_activation`, and with a gate or a rotation "x_pre_quant". Where
    columns are permuted, row scales have room behind them, so that a kernel may load those of a tile of 128 rows from
    any row on.
    """
    height, width = (m + 127, cdiv(k, 128) * 128) if permute else (m, k)
    dtype = torch.float16 if prologue.scale_mode is None else torch.float8_e5m2
    buffers = {"values": Buffer((m, width), dtype), "row_scale": Buffer((height, 1), torch.float32)}
    x_pre_quant = "x"
    if prologue.rotated or prologue.gate is not None:
        x_pre_quant, buffers["x_pre_quant"] = "x_pre_quant", Buffer((m, k), torch.bfloat16)
    tensors, sizes = ("x", "values", "row_scale", x_pre_quant), (m, k, width, x_stride)
    if prologue.scale_mode is None:
        return buffers, fp16_step(tensors, sizes, prologue)
    return buffers, fp8_step(tensors, sizes, prologue, permute)


def rescale_activation(x: Tensor, prologue: Prologue, *, permute: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Rescale rows to FP8 or FP16, as `prologue` asks.

    Args:
        x: bf16 (or fp16 where it is quantized) [M, K], K a multiple of 32, or bf16 [M, 2K] with a gate; last axis
            contiguous.
        permute: permute the columns as the packed weight has them, with zeros up to a multiple of 128. Always for FP16.

    Returns:
        values, float8_e5m2 or float16 [M, K or wider], arbitrary in rows out of range; row scales, fp32 [M, 1], NaN for
        rows out of range; x_pre_quant [M, K], from which rows out of range are recomputed: `x`, or bf16, gated and
        rotated, of which only rows out of range are written.
    """
    m, k = x.shape[0], x.shape[1] if prologue.gate is None else x.shape[1] // 2
    buffers, step = plan_prologue(m, k, x.stride(0), prologue, permute=permute)
    tensors = {name: buffer.empty(x.device) for name, buffer in buffers.items()}
    step.launch({"x": x, **tensors})
    return tensors["values"], tensors["row_scale"][:m], tensors.get("x_pre_quant", x)
