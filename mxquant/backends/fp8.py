"""MXFP4 x MXFP4 on FP8 tensor cores, with exact operands.

The weight is kept in tiles (`mxquant.kernels.mxfp4_sm90.layout`), the activations are folded into E5M2 relative to one
power of two a row. Few rows are multiplied by a kernel that decodes the weight in registers; for many, the weight is
expanded to E4M3 in a workspace for `torch._scaled_mm`, with promoted accumulation: fast accumulation keeps 14 bits,
and is wrong on sums of one sign. Rows whose block exponents span more than E5M2 holds are recomputed exactly.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from mxquant.backends.base import Groups, Layout, Operand, Problem
from mxquant.backends.hopper import Tiles, choose_from, multiply_groups, ready_for_kernels, reject_device, reject_shape
from mxquant.backends.kernel_choice import KernelChoice, TunableBackend

# Rows for each by default: see `choose_from`.
_SPECIALIZED, _FEW = range(33, 2049), 512


class FP8(TunableBackend):
    """Exact W4A4 by FP8 matmul."""

    name: ClassVar[str] = "fp8"
    layout: ClassVar[Layout | None] = Tiles()
    rotates: ClassVar[bool] = True
    gates: ClassVar[bool] = True

    def reject(self, problem: Problem) -> str | None:
        if reason := reject_device(problem):
            return reason
        if problem.weight != "mxfp4" or problem.activation != "mxfp4" or problem.contraction != "blocked":
            return "multiplies MXFP4 by MXFP4 only, along the blocked axis"
        return reject_shape(problem)

    def routes(self, problem: Problem, rows: int) -> tuple[KernelChoice, ...]:
        return choose_from(problem, rows, _SPECIALIZED, _FEW, _EXPAND)

    def grouped_matmul(
        self, x: Tensor, weights: Operand, bias: Tensor | None, groups: Groups, problem: Problem
    ) -> Tensor:
        return multiply_groups(x, weights, bias, groups, problem)


@ready_for_kernels
def _multiply_expanded(x: Tensor, weight: Operand, bias: Tensor | None, problem: Problem) -> Tensor:
    # Imported here: they import triton, which is not everywhere. `from` would take several times as long.
    import mxquant.kernels.mxfp4_sm90.activation_fp8 as fold
    import mxquant.kernels.mxfp4_sm90.dequantize as tiled

    mode = problem.activation_scale_mode
    values, factors, x = fold.fold_input(x, mode, permute=False, rotated=problem.rotation is not None)
    w_values, w_factors = tiled.expand_e4m3(weight.qdata, weight.scale, problem.in_features)
    y = torch._scaled_mm(
        values,
        w_values.t(),
        scale_a=factors,
        scale_b=w_factors.t(),
        bias=None if bias is None else bias.to(problem.dtype),
        out_dtype=problem.dtype,
        use_fast_accum=False,
    )
    tiled.repair(y, x, weight.qdata, weight.scale, bias, factors, mode)
    return y


_EXPAND = KernelChoice("expand", _multiply_expanded)
