"""MXFP4 x MXFP4 on FP8 tensor cores, with exact operands.

The weight is kept in tiles (`mxquant.kernels.tiles`), the activations are folded into E5M2 relative to one power of
two a row. Few rows are multiplied by a kernel that decodes the weight in registers; for many, the weight is expanded
to E4M3 in a workspace for `torch._scaled_mm`, with promoted accumulation: fast accumulation keeps 14 bits, and is
wrong on sums of one sign. Rows whose block exponents span more than E5M2 holds are recomputed exactly.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from mxquant.backends.base import Backend, Layout, Operand, Problem
from mxquant.backends.tiles import Tiles, reject_device, reject_shape

# Up to so many rows decoding in registers, once for every 128 of them, is faster than a workspace.
_FEW = 512


class FP8(Backend):
    """Exact W4A4 by FP8 matmul."""

    name: ClassVar[str] = "fp8"
    layout: ClassVar[Layout | None] = Tiles()

    def reject(self, problem: Problem) -> str | None:
        if reason := reject_device(problem):
            return reason
        if problem.weight != "mxfp4" or problem.activation != "mxfp4" or problem.contraction != "blocked":
            return "multiplies MXFP4 by MXFP4 only, along the blocked axis"
        return reject_shape(problem)

    def matmul(self, x: Tensor, weight: Operand, bias: Tensor | None, problem: Problem) -> Tensor:
        x = x if x.stride(-1) == 1 else x.contiguous()
        with torch.cuda.device_of(x):
            return (_multiply_few if x.shape[0] <= _FEW else _multiply_many)(x, weight, bias, problem)


def _scale_mode(problem: Problem) -> str:
    assert problem.activation_scale_mode is not None, "MXFP4 activations have a scale mode"
    return problem.activation_scale_mode


def _multiply_few(x: Tensor, weight: Operand, bias: Tensor | None, problem: Problem) -> Tensor:
    # Imported here, as below: they import triton, which is not everywhere.
    from mxquant.kernels.fold import fold_activation
    from mxquant.kernels.tiled_matmul import multiply_few

    mode = _scale_mode(problem)
    folded = fold_activation(x, mode, permute=True)
    return multiply_few(folded, x, weight.qdata, weight.scale, bias, problem.out_features, mode, problem.dtype)


def _multiply_many(x: Tensor, weight: Operand, bias: Tensor | None, problem: Problem) -> Tensor:
    from mxquant.kernels.fold import fold_activation
    from mxquant.kernels.tiled_expand import expand_e4m3, repair

    mode = _scale_mode(problem)
    values, factors, unfit = fold_activation(x, mode, permute=False)
    w_values, w_factors = expand_e4m3(weight.qdata, weight.scale, problem.in_features)
    y = torch._scaled_mm(
        values,
        w_values.t(),
        scale_a=factors,
        scale_b=w_factors.t(),
        bias=None if bias is None else bias.to(problem.dtype),
        out_dtype=problem.dtype,
        use_fast_accum=False,
    )
    repair(y, x, weight.qdata, weight.scale, bias, unfit, mode)
    return y
