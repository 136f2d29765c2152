"""Matmuls with an MXTensor on one side: linear, mm, addmm, bmm and embedding. (`grouped` has grouped_mm.)

Each is brought to one form: the quantized weight W, physically [N, K] (or a stack of such) and blocked along K, with
x @ W.T ("blocked": activations are quantized) or x @ W ("unblocked", as for the gradient of the input). While a graph
is traced, that form is one opaque operator with the backend chosen at trace time; in eager it is a direct call.
Autograd sees the ordinary operators above, whose derivatives need nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mxquant.backends.base import Backend, Operand, Problem
from mxquant.backends.registry import get_backend, select
from mxquant.ops import hadamard, is_traced
from mxquant.tensor.choose import describe, in_layout_of, requested_backend
from mxquant.tensor.construct import dequantize
from mxquant.tensor.metadata import DTYPES, metadata_from_json
from mxquant.tensor.mxtensor import (
    MXTensor,
    block_format,
    implements,
    implements_function,
    logical_shape,
    physical_shape,
)
from mxquant.tensor.views import index_select, view

aten = torch.ops.aten


def product(x: Tensor, weight: MXTensor, contracted: int, bias: Tensor | None = None) -> Tensor:
    """`x` times `weight`, contracting x's last axis with the weight's axis `contracted` (-1 as F.linear, -2 as x @
    weight).

    Args:
        x: [..., width] for a 2-D weight; [B, M, width] for a stack of B.
        bias: as wide as the result, or None.
    """
    rank = weight.dim()
    if rank == 1:
        return product(x, view(weight, (1, weight.shape[0])), -1, bias).squeeze(-1)
    check_operands(x, weight, contracted, bias)
    if rank == 3 and (x.dim() != 3 or x.shape[0] != weight.shape[0]):
        width = weight.shape[contracted]
        raise ValueError(
            f"input of shape {tuple(x.shape)} does not fit the stack {weight!r}: its shape is [{weight.shape[0]}, M, "
            f"{width}]"
        )
    contraction = "blocked" if weight.metadata.axis == contracted else "unblocked"
    problem = describe(weight, x.dtype, contraction=contraction, grouped=False)
    backend, weight = choose_backend(weight, problem)
    if not is_traced(x, weight.qdata):
        return _run(x, weight, bias, problem, backend)
    text, shape = weight.metadata.to_json(), physical_shape(weight)
    result: Tensor = torch.ops.mxquant.matmul(x, *weight.operand, bias, text, shape, contraction, backend.name)
    return result


def choose_backend(weight: MXTensor, problem: Problem) -> tuple[Backend, MXTensor]:
    """The backend that computes `problem`, and the weight in its layout.

    Raises:
        ValueError: the backend that the weight asks for cannot compute it, or not hold its values.
    """
    backend = select(problem, requested_backend(weight))
    prepared = in_layout_of(backend, weight)
    if prepared is None:
        raise ValueError(
            f'backend {backend.name!r} cannot hold the values of {weight!r}; use backend="auto" for one that can'
        )
    return backend, prepared


def check_operands(x: Tensor, weight: MXTensor, contracted: int, bias: Tensor | None, *, gated: bool = False) -> None:
    """Refuse operands that no product can be made of; `gated`: the input holds gates and ups, twice as many.

    Raises:
        NotImplementedError: both sides are quantized, or the blocked axis is not one of the last two.
        ValueError: sizes or devices that do not fit, or activations to quantize in other blocks than the weight's.
        TypeError: `x` is not floating.
    """
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
    width = shape[contracted] * 2 if gated else shape[contracted]
    if x.dim() == 0 or x.shape[-1] != width:
        raise ValueError(
            f"input of shape {tuple(x.shape)} does not fit {weight!r}: its last axis must be {width}"
            + (", gates and ups" if gated else "")
        )
    if bias is not None:
        made = (*shape[:-2], shape[-1 if contracted == -2 else -2])
        if tuple(bias.shape) != made:
            raise ValueError(f"bias of shape {tuple(bias.shape)} does not fit {weight!r}: its shape must be {made}")
    if metadata.block_offset and metadata.scheme.activation is not None and metadata.axis == contracted:
        raise ValueError(
            f"{weight!r} starts {metadata.block_offset} elements inside a block, where quantized activations would "
            "have "
            f"other blocks than the weight; slice at multiples of {block_format(weight).block_size}, or use it "
            "weight-only: .with_activation(None)"
        )


def _run(x: Tensor, weight: MXTensor, bias: Tensor | None, problem: Problem, backend: Backend) -> Tensor:
    """The product on real tensors; `weight` is in the layout of the backend."""
    rotation = weight.metadata.scheme.rotation
    if rotation is None or (backend.rotates and problem.rotation is not None):
        return _multiply(x, weight, bias, problem, backend)
    return rotated_product(lambda x, bias: _multiply(x, weight, bias, problem, backend), x, bias, rotation, problem)


def rotated_product(
    multiply: Callable[[Tensor, Tensor | None], Tensor],
    x: Tensor,
    bias: Tensor | None,
    rotation: int,
    problem: Problem,
) -> Tensor:
    """`multiply` of an input and a bias, where the weight that it holds is rotated along its blocked axis.

    The input of a contraction along that axis is rotated first: in fp32, then rounded to its own dtype, which is what a
    backend takes and, where the config says so, quantizes. Across it, the result is rotated back.
    """
    if problem.contraction == "blocked":
        return multiply(hadamard(x, rotation, x.dtype), bias)
    y = multiply(x, None if bias is None else hadamard(bias, rotation, torch.promote_types(bias.dtype, torch.float32)))
    return hadamard(y, rotation, y.dtype)


def _multiply(x: Tensor, weight: MXTensor, bias: Tensor | None, problem: Problem, backend: Backend) -> Tensor:
    width = problem.out_features if problem.contraction == "blocked" else problem.in_features
    if weight.dim() == 2:
        if x.dim() == 2:
            return backend.matmul(x, one_scale(weight.operand), bias, problem)
        *lead, contracted = x.shape
        rows = x.reshape(math.prod(lead), contracted)
        return backend.matmul(rows, one_scale(weight.operand), bias, problem).view(*lead, width)
    y = x.new_empty(*x.shape[:-1], width)
    for index in range(weight.shape[0]):
        y[index] = backend.matmul(x[index], one_scale(weight.operand.matrix(index)), None, problem)
    return y


def one_scale(operand: Operand) -> Operand:
    """A matmul multiplies its sum with the per-tensor scale, so a 2-D weight has one.

    Raises:
        NotImplementedError: its rows have several (weights of different scales, joined).
    """
    scale = operand.per_tensor_scale
    if scale is None or scale.numel() == 1:
        return operand
    return operand._replace(per_tensor_scale=_same(scale.flatten(), 0).reshape(()))


def one_scale_each(operand: Operand) -> Operand:
    """`one_scale` for each matrix of a stack: 0-dim, or [E, 1, 1]."""
    scale = operand.per_tensor_scale
    if scale is None or scale.dim() == 0 or scale.shape[1] == 1:
        return operand
    return operand._replace(per_tensor_scale=_same(scale, 1))


def _same(scale: Tensor, axis: int) -> Tensor:
    """The first index of `axis`, where all have the same scales."""
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
    qdata: Tensor,
    scale: Tensor,
    per_tensor_scale: Tensor | None,
    activation_scale: Tensor | None,
    bias: Tensor | None,
    metadata: str,
    physical: Sequence[int],
    contraction: str,
    backend: str,
) -> Tensor:
    parsed, _ = metadata_from_json(metadata)
    operand = Operand(qdata, scale, per_tensor_scale, activation_scale)
    weight = MXTensor(operand, parsed, logical_shape(physical, parsed.axis))
    problem = describe(weight, x.dtype, contraction=contraction, grouped=False)
    return _run(x, weight, bias, problem, get_backend(backend))


@_matmul_op.register_fake
def _(
    x: Tensor,
    qdata: Tensor,
    scale: Tensor,
    per_tensor_scale: Tensor | None,
    activation_scale: Tensor | None,
    bias: Tensor | None,
    metadata: str,
    physical: Sequence[int],
    contraction: str,
    backend: str,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], physical[-2] if contraction == "blocked" else physical[-1])


@implements_function(F.linear)
def linear_eager(x: Any, weight: Any, bias: Any = None) -> Any:
    """F.linear without its way through autograd and views, where nothing needs a gradient or a cast."""
    if type(x) is not Tensor or not isinstance(weight, MXTensor) or weight.dim() != 2:
        return NotImplemented
    if x.is_meta or torch.is_autocast_enabled(x.device.type):
        return NotImplemented
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        return NotImplemented
    return product(x, weight, -1, bias)


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
    rows = index_select(weight, 0, indices.reshape(-1))
    return dequantize(rows, weight.metadata.dtype).view(*indices.shape, weight.shape[1])
