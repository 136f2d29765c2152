"""Grouped matmuls: rows sorted by expert, each multiplied with the matrix of its expert.

`torch._grouped_mm` reaches them through the dispatcher; `grouped_product` adds rows to gather, a bias and a gate. In a
graph that is an operator of its own, which takes the quantized tensor as a whole: Dynamo does not trace into it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxquant.backends.base import Groups
from mxquant.reference.gated_activation import GatedActivation
from mxquant.tensor.dispatch import NAMED_OPERATORS, implements
from mxquant.tensor.mxtensor import MXTensor
from mxquant.tensor.product import gate_arguments, gate_of, product

aten = torch.ops.aten


def grouped_product(
    x: Tensor,
    weights: MXTensor,
    contracted: int,
    groups: Groups,
    bias: Tensor | None = None,
    gate: GatedActivation | None = None,
) -> Tensor:
    """Each row of `x` times the matrix of its group, contracting the weights' axis `contracted` (-1 or -2).

    Not differentiable: `torch._grouped_mm` is, and has the same values.

    Args:
        x: [S, width] sorted by group; or [T, width] in any order with `groups.rows`, each row then quantized once.
        weights: a stack of E matrices.
        bias: [E, as wide as the result], or None.
        gate: applied to `x` first, which then has twice as many columns; by the backend, if it sets `gates`.

    Returns:
        [S, ...] in the dtype of `x`; zero beyond the last group.

    Raises:
        ValueError, TypeError, NotImplementedError: operands that do not fit, or a backend that cannot compute it.
    """
    if torch.compiler.is_compiling():
        result: Tensor = torch.ops.mxquant.grouped_product(x, weights, contracted, *groups, bias, *gate_arguments(gate))
        return result
    # Else each attribute of the weights would go through their __torch_function__.
    with torch._C.DisableTorchFunctionSubclass():
        return product(x, weights, contracted, bias, groups, gate)


@implements(aten._grouped_mm.default)
def grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """`torch._grouped_mm` of activations [S, K] with quantized weights [E, K, N]: rows up to offs[e] by weight e.

    Rows beyond the last offset are zero.
    """
    if not isinstance(b, MXTensor) or b.dim() != 3 or a.dim() != 2 or offs is None or bias is not None:
        raise NotImplementedError(
            "grouped_mm with quantized weights takes activations [S, K], a weight [E, K, N], offs [E] and no bias; "
            "call .dequantize() on the weight for other forms"
        )
    y = product(a, b, -2, groups=Groups(offs))
    return y if out_dtype is None else y.to(out_dtype)


@implements("transformers.grouped_mm_fallback.default", table=NAMED_OPERATORS)
def _grouped_mm_fallback(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """transformers' "grouped_mm" calls this operator when it is compiled or exported with other dtypes than bf16."""
    return grouped_mm(input, weight, offs)


def _grouped_product(
    x: Tensor,
    weights: Tensor,
    contracted: int,
    offsets: Tensor,
    rows: Tensor | None,
    bias: Tensor | None,
    interleaved: bool | None,
    limit: float | None,
    alpha: float | None,
) -> Tensor:
    if not isinstance(weights, MXTensor):
        raise NotImplementedError(f"grouped_product takes quantized weights; got {type(weights).__name__}")
    return product(x, weights, contracted, bias, Groups(offsets, rows), gate_of(interleaved, limit, alpha))


torch.library.custom_op("mxquant::grouped_product", _grouped_product, mutates_args=())
implements(torch.ops.mxquant.grouped_product.default)(_grouped_product)
