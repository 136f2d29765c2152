"""MXFP4 weights and bf16 activations on FP16 tensor cores, with exact operands; and the product across the blocks.

The weight is kept in tiles (`mxquant.kernels.mxfp4_sm90.layout`), as for the `fp8` backend. For few rows the
activations are folded into FP16 relative to one power of two a row, and the weight is decoded in registers: E2M1 times
a power of two near the row's largest is exact in FP16. Rows of activations of too wide a range are recomputed exactly
from what they were. For many rows the weight is expanded to bf16, some rows at a time, for an ordinary matmul.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from mxquant.backends.base import Groups, Layout, Operand, Problem
from mxquant.backends.hopper import Tiles, choose_from, multiply_groups, ready_for_kernels, reject_device, reject_shape
from mxquant.backends.kernel_choice import KernelChoice, TunableBackend
from mxquant.kernels.mxfp4_sm90.layout import ROWS

# Rows for each by default: see `choose_from`.
_SPECIALIZED, _FEW = range(17, 2049), 512
# Elements to expand at a time: 128 MiB.
_WORKSPACE = 1 << 26


class FP16(TunableBackend):
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

    def routes(self, problem: Problem, rows: int) -> tuple[KernelChoice, ...]:
        if problem.contraction == "unblocked":
            return (_UNBLOCKED,)
        return choose_from(problem, rows, _SPECIALIZED, _FEW, _EXPAND)

    def grouped_matmul(
        self, x: Tensor, weights: Operand, bias: Tensor | None, groups: Groups, problem: Problem
    ) -> Tensor:
        if problem.contraction == "unblocked":
            return super().grouped_matmul(x, weights, bias, groups, problem)
        return multiply_groups(x, weights, bias, groups, problem)


@ready_for_kernels
def _multiply_expanded(x: Tensor, weight: Operand, bias: Tensor | None, problem: Problem) -> Tensor:
    # Imported here: it imports triton, which is not everywhere. `from` would take several times as long.
    import mxquant.kernels.mxfp4_sm90.dequantize as tiled

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


@ready_for_kernels
def _multiply_unblocked(x: Tensor, weight: Operand, bias: Tensor | None, problem: Problem) -> Tensor:
    import mxquant.kernels.mxfp4_sm90.dequantize as tiled

    w = tiled.expand_bfloat16(weight.qdata, weight.scale, problem.in_features)
    if bias is None:
        return torch.mm(x, w)
    return torch.mm(x, w, out_dtype=torch.float32).add_(bias).to(torch.bfloat16)


_EXPAND, _UNBLOCKED = KernelChoice("expand", _multiply_expanded), KernelChoice("expand", _multiply_unblocked)
