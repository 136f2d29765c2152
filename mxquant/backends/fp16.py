"""MXFP4 weights and bf16 activations on FP16 tensor cores, with exact operands; and the gradient of the input.

The weight is kept in the packed layout (`mxquant.kernels.mxfp4_sm90.layout`), as for the `fp8` backend. For few rows
the activations are rescaled to FP16, each row by one power of two, and kernels decode the weight in registers: E2M1
times a power of two near the row's largest is exact in FP16. Rows of too wide a range are recomputed exactly. For many
rows the weight is dequantized to bf16, some of its rows at a time, for an ordinary matmul.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from mxquant.backends.base import DGRAD, Groups, Layout, Operand, Problem
from mxquant.backends.hopper import (
    PackedLayout,
    kernel_ready,
    multiply_groups,
    order_choices,
    reject_problem,
)
from mxquant.backends.kernel_choice import KernelChoice, TunableBackend
from mxquant.kernels.mxfp4_sm90.layout import TILE_N

# Rows for which each kernel is the default, see `order_choices`.
_WARP_SPECIALIZED_ROWS, _SPLIT_K_ROWS = range(17, 2049), 512
# Elements to dequantize at a time: 128 MiB.
_WORKSPACE = 1 << 26


class FP16(TunableBackend):
    """Exact W4A16 by FP16 or bf16 matmul."""

    name: ClassVar[str] = "fp16"
    layout: ClassVar[Layout | None] = PackedLayout()
    gates: ClassVar[bool] = True

    def reject(self, problem: Problem) -> str | None:
        takes = problem.weight == "mxfp4" and problem.activation is None
        return reject_problem(problem, takes, "multiplies MXFP4 weights by bfloat16 only")

    def kernel_choices(self, problem: Problem, rows: int) -> tuple[KernelChoice, ...]:
        if problem.contraction == DGRAD:
            return (_DEQUANTIZE_DGRAD,)
        return order_choices(problem, rows, _WARP_SPECIALIZED_ROWS, _SPLIT_K_ROWS, _DEQUANTIZE)

    def grouped_matmul(
        self, x: Tensor, weights: Operand, bias: Tensor | None, groups: Groups, problem: Problem
    ) -> Tensor:
        if problem.contraction == DGRAD:
            return super().grouped_matmul(x, weights, bias, groups, problem)
        return multiply_groups(x, weights, bias, groups, problem)


@kernel_ready
def _multiply_bf16(x: Tensor, weight: Operand, bias: Tensor | None, problem: Problem) -> Tensor:
    # NOTE: imported here, since it imports triton, which is not everywhere. `from` would take several times as long.
    import mxquant.kernels.mxfp4_sm90.dequantize as dequantize

    n, k = problem.out_features, problem.in_features
    y = torch.empty(x.shape[0], n, dtype=torch.bfloat16, device=x.device)
    step = max(1, _WORKSPACE // (k * TILE_N))
    for tile in range(0, n // TILE_N, step):
        tiles, rows = slice(tile, tile + step), slice(tile * TILE_N, (tile + step) * TILE_N)
        w = dequantize.dequantize_to_bf16(weight.qdata[tiles], weight.scale[tiles], k)
        if bias is None:
            torch.mm(x, w.t(), out=y[:, rows])
        else:  # NOTE: added in fp32, since F.linear rounds the product to bf16 first
            torch.add(torch.mm(x, w.t(), out_dtype=torch.float32), bias[rows], out=y[:, rows])
    return y


@kernel_ready
def _dgrad_bf16(x: Tensor, weight: Operand, bias: Tensor | None, problem: Problem) -> Tensor:
    import mxquant.kernels.mxfp4_sm90.dequantize as dequantize

    w = dequantize.dequantize_to_bf16(weight.qdata, weight.scale, problem.in_features)
    if bias is None:
        return torch.mm(x, w)
    return torch.mm(x, w, out_dtype=torch.float32).add_(bias).to(torch.bfloat16)


_DEQUANTIZE = KernelChoice("dequantize", _multiply_bf16)
_DEQUANTIZE_DGRAD = KernelChoice("dequantize", _dgrad_bf16)
