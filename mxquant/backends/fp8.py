"""MXFP4 x MXFP4 on FP8 tensor cores, with exact operands.

The weight is kept in the packed layout (`mxquant.kernels.mxfp4_sm90.layout`). The activations are rescaled to E5M2,
each row by one power of two. Few rows are multiplied by kernels that decode the weight in registers. For many, the
weight is dequantized to E4M3 in a workspace for `torch._scaled_mm`, with promoted accumulation: fast accumulation keeps
14 bits, and is wrong on sums of one sign. Rows whose block exponents span more than E5M2 holds are recomputed exactly.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from mxquant.backends.base import FORWARD, Groups, Layout, Operand, Problem
from mxquant.backends.hopper import (
    PackedLayout,
    kernel_ready,
    multiply_groups,
    order_choices,
    prologue_of,
    reject_problem,
)
from mxquant.backends.kernel_choice import KernelChoice, TunableBackend

# Rows for which each kernel is the default, see `order_choices`.
_WARP_SPECIALIZED_ROWS, _SPLIT_K_ROWS = range(33, 2049), 512


class FP8(TunableBackend):
    """Exact W4A4 by FP8 matmul."""

    name: ClassVar[str] = "fp8"
    layout: ClassVar[Layout | None] = PackedLayout()
    rotates: ClassVar[bool] = True
    gates: ClassVar[bool] = True

    def reject(self, problem: Problem) -> str | None:
        takes = problem.weight == problem.activation == "mxfp4" and problem.contraction == FORWARD
        return reject_problem(problem, takes, "multiplies MXFP4 by MXFP4 only, along the blocked axis")

    def kernel_choices(self, problem: Problem, rows: int) -> tuple[KernelChoice, ...]:
        return order_choices(problem, rows, _WARP_SPECIALIZED_ROWS, _SPLIT_K_ROWS, _DEQUANTIZE)

    def grouped_matmul(
        self, x: Tensor, weights: Operand, bias: Tensor | None, groups: Groups, problem: Problem
    ) -> Tensor:
        return multiply_groups(x, weights, bias, groups, problem)


@kernel_ready
def _multiply_e4m3(x: Tensor, weight: Operand, bias: Tensor | None, problem: Problem) -> Tensor:
    # NOTE: imported here, since they import triton, which is not everywhere. `from` would take several times as long.
    import mxquant.kernels.mxfp4_sm90.activation as activation
    import mxquant.kernels.mxfp4_sm90.dequantize as dequantize
    import mxquant.kernels.mxfp4_sm90.exact_fallback as exact_fallback

    values, row_scale, x = activation.rescale_activation(x, prologue_of(problem), permute=False)
    w_values, w_row_scale = dequantize.dequantize_to_e4m3(weight.qdata, weight.scale, problem.in_features)
    y = torch._scaled_mm(
        values,
        w_values.t(),
        scale_a=row_scale,
        scale_b=w_row_scale.t(),
        bias=None if bias is None else bias.to(problem.dtype),
        out_dtype=problem.dtype,
        use_fast_accum=False,
    )
    exact_fallback.fixup(y, x, weight.qdata, weight.scale, bias, row_scale, problem.activation_scale_mode)
    return y


_DEQUANTIZE = KernelChoice("dequantize", _multiply_e4m3)
