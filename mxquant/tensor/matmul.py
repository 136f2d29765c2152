"""The operators of PyTorch that multiply with an MXTensor: linear, mm, addmm, bmm, mv, dot and embedding.

Autograd sees the ordinary operators; their derivatives are products, too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mxquant.tensor.dispatch import FUNCTIONS, implements
from mxquant.tensor.exporters import refuse_onnx
from mxquant.tensor.mxtensor import MXTensor
from mxquant.tensor.product import product
from mxquant.tensor.views import index_select

aten = torch.ops.aten


@implements(F.linear, table=FUNCTIONS)
def linear_eager(x: Any, weight: Any, bias: Any = None) -> Any:
    """F.linear without its way through autograd and views, where nothing needs a gradient or a cast."""
    return product(x, weight, -1, bias) if _is_plain_call(x, weight, bias) else NotImplemented


@implements(torch.addmm, table=FUNCTIONS)
def addmm_eager(bias: Any, x: Any, weight: Any, **options: Any) -> Any:
    """`torch.addmm` likewise, as transformers' Conv1D calls it."""
    if options or type(bias) not in (Tensor, torch.nn.Parameter) or bias.dim() != 1:
        return NotImplemented
    return product(x, weight, -2, bias) if _is_plain_call(x, weight, bias) else NotImplemented


def _is_plain_call(x: Any, weight: Any, bias: Any) -> bool:
    """Whether x multiplies a quantized matrix on a real device, without autocast and without a gradient."""
    if type(x) is not Tensor or not isinstance(weight, MXTensor) or weight.dim() != 2:
        return False
    if x.is_meta or torch.is_autocast_enabled(x.device.type):
        return False
    wants_gradient = x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    return not (torch.is_grad_enabled() and wants_gradient)


@implements(aten.linear.default)
def linear(x: Tensor, weight: MXTensor, bias: Tensor | None = None) -> Tensor:
    return product(x, weight, -1, bias)


@implements(aten.mm.default, aten.bmm.default)
def mm(a: Tensor, b: Tensor) -> Tensor:
    if isinstance(b, MXTensor):
        return product(a, b, -2)
    assert isinstance(a, MXTensor)
    return product(b.transpose(-2, -1), a, -1).transpose(-2, -1)


@implements(aten.mv.default, aten.dot.default)
def mv(a: Tensor, b: Tensor) -> Tensor:
    return product(a, b, -1) if isinstance(b, MXTensor) else product(b, a, -1)  # type: ignore[arg-type]


@implements(aten.addmm.default)
def addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if isinstance(bias, MXTensor):
        raise NotImplementedError(f"addmm adds {bias!r} to a product; call .dequantize() on it first")
    if beta == 1 and alpha == 1 and bias.dim() == 1 and isinstance(b, MXTensor):
        return product(a, b, -2, bias)
    # As in torch, beta = 0 leaves the first term out, whatever it holds.
    return alpha * mm(a, b) if beta == 0 else beta * bias + alpha * mm(a, b)


@implements(aten.embedding.default)
def embedding(
    weight: MXTensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Tensor:
    """The rows of a quantized table, dequantized: only those looked up."""
    refuse_onnx()
    rows = index_select(weight, 0, indices.reshape(-1))
    return rows.dequantize().view(*indices.shape, weight.shape[1])
