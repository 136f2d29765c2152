"""Grouped matmuls: rows sorted by expert, each times the weight of its expert.

The quantized weight is a stack, physically [E, N, K] and blocked along K. As in `matmul`, while a graph is traced the
product is one opaque operator with the backend chosen at trace time; in eager it is a direct call. A second operator,
`grouped_product`, takes the quantized tensor as a whole: to Dynamo, which traces the code of this package where it is
not called through an operator, it is what `torch._grouped_mm` is, with rows to gather and a bias.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mxquant.backends.base import Backend, Groups, Operand, Problem
from mxquant.backends.registry import get_backend
from mxquant.ops import gated_activation, is_traced
from mxquant.reference.gated_activation import GatedActivation
from mxquant.tensor.choose import describe
from mxquant.tensor.matmul import check_operands, choose_backend, one_scale_each, rotated_product
from mxquant.tensor.metadata import metadata_from_json
from mxquant.tensor.mxtensor import MXTensor, implements, logical_shape, physical_shape

aten = torch.ops.aten

_GateArguments = tuple[bool | None, float | None, float | None]


def _arguments_of(gate: GatedActivation | None) -> _GateArguments:
    """A gate, as operators take one."""
    return (None, None, None) if gate is None else (gate.interleaved, gate.limit, gate.alpha)


def _gate_of(interleaved: bool | None, limit: float | None, alpha: float | None) -> GatedActivation | None:
    return None if interleaved is None else GatedActivation(interleaved, limit, alpha)


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
        gate: what `x` goes through first, gates and ups in twice as many columns: on the way into the product, where
            the backend does that.

    Returns:
        [S, ...] in the dtype of `x`; zero beyond the last group.

    Raises:
        ValueError, TypeError, NotImplementedError: operands that do not fit, or a backend that cannot compute it.
    """
    if torch.compiler.is_compiling():
        result: Tensor = torch.ops.mxquant.grouped_product(x, weights, contracted, *groups, bias, *_arguments_of(gate))
        return result
    return _product(x, weights, contracted, groups, bias, gate)


def _product(
    x: Tensor,
    weights: MXTensor,
    contracted: int,
    groups: Groups,
    bias: Tensor | None,
    gate: GatedActivation | None = None,
) -> Tensor:
    if weights.dim() != 3 or x.dim() != 2 or groups.offsets.shape != weights.shape[:1]:
        raise ValueError(
            f"a grouped matmul takes an input [S, K], a stack of E matrices and offsets [E]; got {tuple(x.shape)}, "
            f"{tuple(weights.shape)} and {tuple(groups.offsets.shape)}"
        )
    check_operands(x, weights, contracted, bias, gated=gate is not None)
    contraction = "blocked" if weights.axis == contracted else "unblocked"
    problem = describe(weights, x.dtype, contraction=contraction)
    backend, weights = choose_backend(weights, problem)
    if gate is not None:
        if backend.gates and contraction == "blocked" and (problem.rotation is None or backend.rotates):
            problem = describe(weights, x.dtype, gate=gate)
        else:
            x, gate = gated_activation(x, gate), None
    if not is_traced(x, weights.qdata):
        return _run(x, weights, bias, groups, problem, backend)
    text, shape = weights.metadata.to_json(), physical_shape(weights)
    result: Tensor = torch.ops.mxquant.grouped_matmul(
        x, *weights.operand, bias, *groups, text, shape, contraction, backend.name, *_arguments_of(gate)
    )
    return result


def _run(
    x: Tensor, weights: MXTensor, bias: Tensor | None, groups: Groups, problem: Problem, backend: Backend
) -> Tensor:
    operand, rotation = one_scale_each(weights.operand), weights.metadata.scheme.rotation
    if rotation is None or (backend.rotates and problem.rotation is not None):
        return backend.grouped_matmul(x, operand, bias, groups, problem)
    # Every row once, however many experts it goes to.
    return rotated_product(
        lambda x, bias: backend.grouped_matmul(x, operand, bias, groups, problem), x, bias, rotation, problem
    )


@torch.library.custom_op("mxquant::grouped_matmul", mutates_args=())
def _grouped_matmul_op(
    x: Tensor,
    qdata: Tensor,
    scale: Tensor,
    per_tensor_scale: Tensor | None,
    activation_scale: Tensor | None,
    bias: Tensor | None,
    offsets: Tensor,
    rows: Tensor | None,
    metadata: str,
    physical: Sequence[int],
    contraction: str,
    backend: str,
    interleaved: bool | None,
    limit: float | None,
    alpha: float | None,
) -> Tensor:
    parsed, _ = metadata_from_json(metadata)
    operand = Operand(qdata, scale, per_tensor_scale, activation_scale)
    weights = MXTensor(operand, parsed, logical_shape(physical, parsed.axis))
    problem = describe(weights, x.dtype, contraction=contraction, gate=_gate_of(interleaved, limit, alpha))
    return _run(x, weights, bias, Groups(offsets, rows), problem, get_backend(backend))


@_grouped_matmul_op.register_fake
def _(
    x: Tensor,
    qdata: Tensor,
    scale: Tensor,
    per_tensor_scale: Tensor | None,
    activation_scale: Tensor | None,
    bias: Tensor | None,
    offsets: Tensor,
    rows: Tensor | None,
    metadata: str,
    physical: Sequence[int],
    contraction: str,
    backend: str,
    interleaved: bool | None,
    limit: float | None,
    alpha: float | None,
) -> Tensor:
    width = physical[-2] if contraction == "blocked" else physical[-1]
    return x.new_empty(Groups(offsets, rows).count(x), width)


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
    y = _product(a, b, -2, Groups(offs), None)
    return y if out_dtype is None else y.to(out_dtype)


@torch.library.custom_op("mxquant::grouped_product", mutates_args=())
def _grouped_product_op(
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
    raise NotImplementedError(f"grouped_product takes quantized weights; got {type(weights).__name__}")


@implements(torch.ops.mxquant.grouped_product.default)
def _(
    x: Tensor,
    weights: MXTensor,
    contracted: int,
    offsets: Tensor,
    rows: Tensor | None,
    bias: Tensor | None,
    interleaved: bool | None,
    limit: float | None,
    alpha: float | None,
) -> Tensor:
    gate = _gate_of(interleaved, limit, alpha)
    return _product(x, weights, contracted, Groups(offsets, rows), bias, gate)
