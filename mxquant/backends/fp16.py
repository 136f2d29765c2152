"""MXFP4 weights and bf16 activations on FP16 tensor cores, with exact operands; and the product across the blocks.

The weight is kept in tiles (`mxquant.kernels.tiles`), as for the `fp8` backend. For few rows the activations are
folded into FP16 relative to one power of two a row, and the weight is decoded in registers: E2M1 times a power of two
near the row's largest is exact in FP16. Rows of activations of too wide a range are recomputed exactly from what they
were. For many rows the weight is expanded to bf16, some rows at a time, for an ordinary matmul.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from mxquant.backends.base import Backend, Groups, Layout, Operand, Problem
from mxquant.backends.tiles import (
    Tiles,
    aligned,
    keeps_busy,
    multiply_few,
    multiply_groups,
    multiply_specialized,
    reject_device,
    reject_shape,
    walkable,
)
from mxquant.kernels.tiles import ROWS

# So many rows are fastest with decoding and multiplying at the same time, where there is work for the whole device.
_SPECIALIZED = range(17, 2049)
# Elsewhere, up to so many rows decoding in registers is faster than a workspace.
_FEW = 512
# Elements to expand at a time: 128 MiB.
_WORKSPACE = 1 << 26


class FP16(Backend):
    """Exact W4A16 by FP16 or bf16 matmul."""

    name: ClassVar[str] = "fp16"
    layout: ClassVar[Layout | None] = Tiles()
    gates: ClassVar[bool] = True

    def reject(self, problem: Problem) -> str | None:
        if reason := reject_device(problem):
            return reason
        if problem.weight != "mxfp4" or problem.activation is not None:
            return "multiplies MXFP4 weights by bfloat16 only"
        return reject_shape(problem)

    def matmul(self, x: Tensor, weight: Operand, bias: Tensor | None, problem: Problem) -> Tensor:
        blocked, rows = problem.contraction == "blocked", x.shape[0]
        if blocked and rows in _SPECIALIZED and keeps_busy(rows, problem):
            return multiply_specialized(x, weight, bias, problem)
        if blocked and 0 < rows <= _FEW:
            return multiply_few(x, weight, bias, problem)
        with torch.cuda.device_of(x):
            return (_multiply_many if blocked else _multiply_unblocked)(*walkable(x, bias), aligned(weight), problem)

    def grouped_matmul(
        self, x: Tensor, weights: Operand, bias: Tensor | None, groups: Groups, problem: Problem
    ) -> Tensor:
        if problem.contraction == "unblocked":
            return super().grouped_matmul(x, weights, bias, groups, problem)
        return multiply_groups(x, weights, bias, groups, problem)


def _multiply_many(x: Tensor, bias: Tensor | None, weight: Operand, problem: Problem) -> Tensor:
    # Imported here: it imports triton, which is not everywhere. `from` would take several times as long.
    import mxquant.kernels.tiled_expand as tiled

    n, k = problem.out_features, problem.in_features
    y = torch.empty(x.shape[0], n, dtype=torch.bfloat16, device=x.device)
    step = max(1, _WORKSPACE // (k * ROWS))
    for tile in range(0, n // ROWS, step):
        tiles, rows = slice(tile, tile + step), slice(tile * ROWS, (tile + step) * ROWS)
        w = tiled.expand_bfloat16(weight.qdata[tiles], weight.scale[tiles], k)
        if bias is None:
            torch.mm(x, w.t(), out=y[:, rows])
        else:  # added in fp32: F.linear rounds the product to bf16 first
            torch.add(torch.mm(x, w.t(), out_dtype=torch.float32), bias[rows], out=y[:, rows])
    return y


def _multiply_unblocked(x: Tensor, bias: Tensor | None, weight: Operand, problem: Problem) -> Tensor:
    import mxquant.kernels.tiled_expand as tiled

    w = tiled.expand_bfloat16(weight.qdata, weight.scale, problem.in_features)
    if bias is None:
        return torch.mm(x, w)
    return torch.mm(x, w, out_dtype=torch.float32).add_(bias).to(torch.bfloat16)
