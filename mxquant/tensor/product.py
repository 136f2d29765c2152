"""One product of activations with a quantized weight: checked, given to a backend, and run.

Every matmul is brought to one form. The weight W is physically [N, K], or a stack [E, N, K], and blocked along K. The
product is x @ W.T (forward: activations are quantized) or x @ W (dgrad, as for the gradient of the input). With
`Groups`, each row of x is multiplied with the matrix of its group; without, a stack multiplies a batch of matrices.

`product` checks the operands and chooses a backend. In eager it calls `_run`, which rotates the input and calls the
backend's `matmul` or `grouped_matmul`. While a graph is traced, a product is one opaque operator, `mxquant::matmul`,
with the backend chosen at trace time; that operator calls `_run`. Either way the backend gets plain tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mxquant.backends.base import DGRAD, FORWARD, Backend, Groups, Operand, Problem
from mxquant.backends.registry import get_backend
from mxquant.ops import gated_activation, hadamard, is_traced
from mxquant.reference.gated_activation import GatedActivation
from mxquant.tensor.choose import choose_backend, problem_of, with_gate
from mxquant.tensor.exporters import refuse_onnx, refuse_torchscript_trace
from mxquant.tensor.metadata import DTYPES, logical_shape, metadata_from_json, physical_shape
from mxquant.tensor.mxtensor import MXTensor, block_format
from mxquant.tensor.views import view


def gate_arguments(gate: GatedActivation | None) -> tuple[bool | None, float | None, float | None]:
    """A gate as operators take it: interleaved, limit, alpha."""
    return (None, None, None) if gate is None else (gate.interleaved, gate.limit, gate.alpha)


def gate_of(interleaved: bool | None, limit: float | None, alpha: float | None) -> GatedActivation | None:
    """The inverse of `gate_arguments`."""
    return None if interleaved is None else GatedActivation(interleaved, limit, alpha)


def product(
    x: Tensor,
    weight: MXTensor,
    contracted_axis: int,
    bias: Tensor | None = None,
    groups: Groups | None = None,
    gate: GatedActivation | None = None,
) -> Tensor:
    """`x` times `weight`, contracting the last axis of `x` with the weight's axis `contracted_axis`.

    Args:
        x: [..., width] for a matrix; [B, M, width] for a stack of B; with groups [S, width] or [T, width].
        weight: a matrix, or a stack of matrices.
        contracted_axis: -1 as in F.linear, -2 as in x @ weight.
        bias: [width of the result], with groups [E, width of the result], or None.
        groups: which rows of x are multiplied with which matrix of a stack.
        gate: with groups: applied to x first, which then has twice as many columns.

    Returns:
        the product in the dtype of `x`; with groups, rows beyond the last group are zero.

    Raises:
        NotImplementedError: both sides are quantized, the blocked axis is not one of the last two, or the product is
            traced for TorchScript or ONNX.
        ValueError: shapes or devices that do not fit, or a named backend that cannot compute this.
        TypeError: `x` is not floating.
    """
    metadata, shape = weight.metadata, weight.shape
    if len(shape) == 1:
        return product(x, view(weight, (1, shape[0])), -1, bias).squeeze(-1)
    if groups is not None or len(shape) == 3:
        _check_stack(x, weight, contracted_axis, groups)
    _check_operands(x, weight, contracted_axis, bias, gated=gate is not None)
    contraction = FORWARD if metadata.axis == contracted_axis else DGRAD
    experts = 0 if groups is None else int(shape[0])
    problem = problem_of(metadata, shape, x.device, x.dtype, contraction, experts)
    backend, weight = choose_backend(weight, problem)
    if gate is not None:
        if backend.gates and contraction == FORWARD and (problem.rotation is None or backend.rotates):
            problem = with_gate(problem, gate)
        else:
            x, gate = gated_activation(x, gate), None
    operand, rotation = weight.operand, metadata.scheme.rotation
    if not is_traced(x, operand.qdata):
        refuse_torchscript_trace()
        is_batch = groups is None and len(shape) == 3
        return _run(x, operand, bias, groups, problem, backend, rotation, is_batch)
    refuse_onnx()
    metadata_json, physical = weight.metadata.to_json(), physical_shape(shape, metadata.axis)
    tensors = [*operand, bias, *(groups or (None, None))]
    result: Tensor = torch.ops.mxquant.matmul(
        x, tensors, metadata_json, physical, contraction, backend.name, *gate_arguments(gate)
    )
    return result


def _check_operands(
    x: Tensor, weight: MXTensor, contracted_axis: int, bias: Tensor | None, *, gated: bool = False
) -> None:
    """Refuse operands that do not fit each other, with the errors of `product`."""
    if isinstance(x, MXTensor):
        raise NotImplementedError(
            f"both sides of a matmul are quantized: {x!r} and {weight!r}; call .dequantize() on one of them"
        )
    device, shape, metadata = weight.device, weight.shape, weight.metadata
    if x.device != device or (bias is not None and bias.device != device):
        name, tensor = ("input", x) if bias is None or x.device != device else ("bias", bias)
        raise ValueError(f"{name} is on {tensor.device}, {weight!r} on {device}; move them to one device")
    if x.dtype not in DTYPES:
        raise TypeError(
            f"a quantized weight multiplies bfloat16, float16, float32 or float64; got {x.dtype}. Convert the input "
            "first"
        )
    if metadata.axis not in (-1, -2):
        raise NotImplementedError(
            f"{weight!r} is blocked along axis {metadata.axis}, not one of the last two; call .dequantize() first"
        )
    width = shape[contracted_axis] * 2 if gated else shape[contracted_axis]
    if x.dim() == 0 or x.shape[-1] != width:
        raise ValueError(
            f"input of shape {tuple(x.shape)} does not fit {weight!r}: its last axis must be {width}"
            + (", gates and ups" if gated else "")
        )
    if bias is not None:
        expected_shape = (*shape[:-2], shape[-1 if contracted_axis == -2 else -2])
        if tuple(bias.shape) != expected_shape:
            raise ValueError(
                f"bias of shape {tuple(bias.shape)} does not fit {weight!r}: its shape must be {expected_shape}"
            )
    if metadata.block_offset and metadata.scheme.activation is not None and metadata.axis == contracted_axis:
        raise ValueError(
            f"{weight!r} starts {metadata.block_offset} elements inside a block, where quantized activations would "
            f"have other blocks than the weight; slice at multiples of {block_format(weight).block_size}, or use it "
            "weight-only: .with_activation(None)"
        )


def _check_stack(x: Tensor, weight: MXTensor, contracted_axis: int, groups: Groups | None) -> None:
    """Refuse a stack that does not have one matrix for each matrix of the input, or for each group."""
    shape = weight.shape
    if groups is not None:
        if len(shape) != 3 or x.dim() != 2 or groups.offsets.shape != shape[:1]:
            raise ValueError(
                f"a grouped matmul takes an input [S, K], a stack of E matrices and offsets [E]; got {tuple(x.shape)}, "
                f"{tuple(shape)} and {tuple(groups.offsets.shape)}"
            )
    elif x.dim() != 3 or x.shape[0] != shape[0]:
        raise ValueError(
            f"input of shape {tuple(x.shape)} does not fit the stack {weight!r}: its shape is [{shape[0]}, M, "
            f"{shape[contracted_axis]}]"
        )


def _run(
    x: Tensor,
    operand: Operand,
    bias: Tensor | None,
    groups: Groups | None,
    problem: Problem,
    backend: Backend,
    rotation: int | None,
    is_batch: bool,
) -> Tensor:
    """The product on real tensors; `operand` is in the layout of the backend.

    A weight rotated by `rotation` multiplies an input that is rotated likewise: in fp32, then rounded to its own dtype,
    and only then quantized. In dgrad the result is rotated back.
    """
    is_forward = problem.contraction == FORWARD
    if rotation is not None and is_forward and not backend.rotates:
        x = hadamard(x, rotation, x.dtype)
    if rotation is not None and not is_forward and bias is not None:
        bias = hadamard(bias, rotation, torch.promote_types(bias.dtype, torch.float32))
    if groups is not None:
        y = backend.grouped_matmul(x, _one_scale_each(operand), bias, groups, problem)
    elif is_batch:
        y = x.new_empty(*x.shape[:-1], problem.width)
        for index in range(y.shape[0]):
            matrix_bias = None if bias is None else bias[index]
            y[index] = backend.matmul(x[index], _one_scale(operand.matrix(index)), matrix_bias, problem)
    elif x.dim() == 2:
        y = backend.matmul(x, _one_scale(operand), bias, problem)
    else:
        *lead, width = x.shape
        y = backend.matmul(x.reshape(math.prod(lead), width), _one_scale(operand), bias, problem)
        y = y.view(*lead, problem.width)
    return y if rotation is None or is_forward else hadamard(y, rotation, y.dtype)


def _one_scale(operand: Operand) -> Operand:
    """The operand of a matrix with its per-tensor scale 0-dim: a backend multiplies the sum with it."""
    scale = operand.per_tensor_scale
    if scale is None or scale.numel() == 1:
        return operand
    return operand._replace(per_tensor_scale=_shared_scale(scale.flatten(), 0).reshape(()))


def _one_scale_each(operand: Operand) -> Operand:
    """`_one_scale` for each matrix of a stack: 0-dim, or [E, 1, 1]."""
    scale = operand.per_tensor_scale
    if scale is None or scale.dim() == 0 or scale.shape[1] == 1:
        return operand
    return operand._replace(per_tensor_scale=_shared_scale(scale, 1))


def _shared_scale(scale: Tensor, axis: int) -> Tensor:
    """The scale that all indices of `axis` share; NotImplementedError if they differ, as in joined weights."""
    first = scale.narrow(axis, 0, 1)
    if not bool((scale == first).all()):
        raise NotImplementedError(
            f"the rows of this NVFP4 weight have different per-tensor scales ({scale.shape[axis]} of them); "
            "multiply the weights that were joined one by one"
        )
    return first


@torch.library.custom_op("mxquant::matmul", mutates_args=())
def _matmul_op(
    x: Tensor,
    tensors: Sequence[Tensor | None],
    metadata: str,
    physical: Sequence[int],
    contraction: str,
    backend: str,
    interleaved: bool | None,
    limit: float | None,
    alpha: float | None,
) -> Tensor:
    """The product of `x` with the weight of that metadata and physical shape.

    Args:
        tensors: those of the operand, the bias, and the offsets and rows of groups.
    """
    parsed, _ = metadata_from_json(metadata)
    operand, bias, groups = _unpacked(tensors)
    rotation = parsed.scheme.rotation
    if operand.activation_scale is not None:
        parsed = parsed.with_scheme(static_activation_scale=True)
    experts = 0 if groups is None else physical[0]
    problem = problem_of(parsed, logical_shape(physical, parsed.axis), x.device, x.dtype, contraction, experts)
    if (gate := gate_of(interleaved, limit, alpha)) is not None:
        problem = with_gate(problem, gate)
    is_batch = groups is None and len(physical) == 3
    return _run(x, operand, bias, groups, problem, get_backend(backend), rotation, is_batch)


@_matmul_op.register_fake
def _(
    x: Tensor, tensors: Sequence[Tensor | None], metadata: str, physical: Sequence[int], contraction: str, *rest: Any
) -> Tensor:
    _, _, groups = _unpacked(tensors)
    width = physical[-2] if contraction == FORWARD else physical[-1]
    return x.new_empty(*x.shape[:-1], width) if groups is None else x.new_empty(groups.count(x), width)


def _unpacked(tensors: Sequence[Tensor | None]) -> tuple[Operand, Tensor | None, Groups | None]:
    *operand, bias, offsets, rows = tensors
    return Operand(*operand), bias, None if offsets is None else Groups(offsets, rows)  # type: ignore[arg-type]
