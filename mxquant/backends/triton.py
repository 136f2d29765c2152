"""Any pair of formats that the kernels list, on a GPU: dequantize the weight to bf16 in each call, then multiply.

Operands are exact in bf16, and products are summed in fp32. Quantizing the input and dequantizing the weight are one
Triton kernel each. For many rows this costs a few percent over a bf16 weight; for few rows writing the workspace bounds
it.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from mxquant.backends.base import FORWARD, Backend, Operand, Problem, no_device
from mxquant.formats.spec import get_format
from mxquant.kernels import has_triton


class Triton(Backend):
    """Dequantize to bf16, then cuBLAS or rocBLAS."""

    name: ClassVar[str] = "triton"

    def reject(self, problem: Problem) -> str | None:
        if problem.device.type != "cuda" or problem.capability is None:
            return no_device(problem, "a CUDA or ROCm GPU")
        if torch.version.hip is None and problem.capability < (8, 0):
            return "needs compute capability 8.0 (bf16), this is {}.{}".format(*problem.capability)
        if not has_triton():
            return "needs the package triton, which is not installed"
        # Imported late: these modules import triton, which is optional.
        import mxquant.kernels.quantize.dequantize as dequantize
        import mxquant.kernels.quantize.fake_quantize as fake_quantize

        if reason := dequantize.reject(get_format(problem.weight)):
            return reason
        if problem.activation is not None:
            activation = get_format(problem.activation, activation=True)
            if reason := fake_quantize.reject(activation, problem.activation_scale_mode, problem.dtype):
                return reason
        if problem.dtype == torch.bfloat16 or (problem.dtype == torch.float16 and problem.activation is not None):
            return None
        kind = str(problem.dtype).removeprefix("torch.")
        return f"multiplies in bfloat16, which {kind} inputs that are not quantized do not fit exactly"

    def matmul(self, x: Tensor, weight: Operand, bias: Tensor | None, problem: Problem) -> Tensor:
        import mxquant.kernels.quantize.dequantize as dequantize
        import mxquant.kernels.quantize.fake_quantize as fake_quantize

        fmt = get_format(problem.weight)
        factors = [] if weight.per_tensor_scale is None else [weight.per_tensor_scale]
        if problem.activation is not None:
            activation = get_format(problem.activation, activation=True)
            static = weight.activation_scale
            x, outer = fake_quantize.fake_quantize(x, activation, problem.activation_scale_mode, static, torch.bfloat16)
            factors += [] if outer is None else [outer]
        length, offset = problem.in_features, problem.block_offset
        w = dequantize.dequantize(weight.qdata, weight.scale, fmt, length, block_offset=offset, dtype=torch.bfloat16)
        w = w if problem.contraction == FORWARD else w.t()
        if not factors and bias is None and problem.dtype == torch.bfloat16:
            return torch.mm(x, w.t())
        # The bias is added in fp32, too: F.linear would round the product to bf16 first.
        y = torch.mm(x, w.t(), out_dtype=torch.float32)
        for factor in factors:
            y.mul_(factor)
        return (y if bias is None else y.add_(bias)).to(problem.dtype)
