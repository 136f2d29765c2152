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
from mxquant.formats.spec import Format
from mxquant.kernels import has_triton
from mxquant.kernels.tiles import COLUMNS, ROWS, pack_tiles, unpack_tiles


class Tiles(Layout):
    """`mxquant.kernels.tiles`, for MXFP4."""

    name: ClassVar[str] = "mxfp4_tiles"

    def pack(self, qdata: Tensor, scale: Tensor, fmt: Format) -> tuple[Tensor, Tensor] | None:
        return pack_tiles(qdata, scale)

    def unpack(self, qdata: Tensor, scale: Tensor, fmt: Format, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        return unpack_tiles(qdata, scale, *shape[-2:])


class FP8(Backend):
    """Exact W4A4 by FP8 matmul."""

    name: ClassVar[str] = "fp8"
    layout: ClassVar[Layout | None] = Tiles()

    def reject(self, problem: Problem) -> str | None:
        if problem.capability is None:
            return f"needs an NVIDIA GPU, this is {problem.device.type}"
        # ROCm counts its architectures as capabilities, too: gfx90a is its 9.0.
        if torch.version.hip is not None:
            return "needs an NVIDIA GPU, this is one of AMD's"
        if problem.capability != (9, 0):
            return "needs compute capability 9.0 (Hopper), this is {}.{}".format(*problem.capability)
        if not has_triton():
            return "needs the package triton, which is not installed"
        if problem.weight != "mxfp4" or problem.activation != "mxfp4" or problem.contraction != "blocked":
            return "multiplies MXFP4 by MXFP4 only, along the blocked axis"
        if problem.dtype != torch.bfloat16:
            return f"gives bfloat16 only, not the accuracy of {str(problem.dtype).removeprefix('torch.')}"
        if problem.out_features % ROWS or problem.in_features % COLUMNS or problem.block_offset:
            return f"needs out_features a multiple of {ROWS}, in_features of {COLUMNS}, and whole blocks"
        return None

    def matmul(self, x: Tensor, weight: Operand, bias: Tensor | None, problem: Problem) -> Tensor:
        # Imported here: it imports triton, which is not everywhere.
        from mxquant.kernels.w4a4 import MOST_ROWS

        if x.shape[0] == 0:
            return x.new_empty(0, problem.out_features)
        # The kernels walk along rows of x and along the bias; how far apart rows are is theirs to know.
        x = x if x.stride(-1) == 1 else x.contiguous()
        bias = None if bias is None else bias.contiguous()
        with torch.cuda.device_of(x):
            return (_multiply_few if x.shape[0] <= MOST_ROWS else _multiply_many)(x, weight, bias, problem)


def _scale_mode(problem: Problem) -> str:
    assert problem.activation_scale_mode is not None, "MXFP4 activations have a scale mode"
    return problem.activation_scale_mode


def _multiply_few(x: Tensor, weight: Operand, bias: Tensor | None, problem: Problem) -> Tensor:
    from mxquant.kernels.fold import fold_activation
    from mxquant.kernels.w4a4 import multiply_few

    mode = _scale_mode(problem)
    folded = fold_activation(x, mode, permute=True)
    return multiply_few(folded, x, weight.qdata, weight.scale, bias, problem.out_features, mode, problem.dtype)


def _multiply_many(x: Tensor, weight: Operand, bias: Tensor | None, problem: Problem) -> Tensor:
    from mxquant.kernels.fold import fold_activation
    from mxquant.kernels.w4a4 import expand, repair

    mode = _scale_mode(problem)
    values, factors, unfit = fold_activation(x, mode, permute=False)
    w_values, w_factors = expand(weight.qdata, weight.scale, problem.out_features, problem.in_features)
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
