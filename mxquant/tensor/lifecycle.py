"""Operators that copy, convert, allocate or compare MXTensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mxquant.backends.base import CANONICAL, Operand
from mxquant.backends.registry import backend_of_layout
from mxquant.formats.pack import unpack_codes
from mxquant.formats.spec import get_format
from mxquant.scheme import Scheme
from mxquant.tensor.choose import as_moved_weight, in_layout_of
from mxquant.tensor.dispatch import implements
from mxquant.tensor.metadata import Metadata, check_dtype, physical_shape
from mxquant.tensor.mxtensor import MXTensor, block_format

aten = torch.ops.aten


def _keep_attributes(old: MXTensor, new: MXTensor) -> MXTensor:
    """`new` with the attributes that other code put on `old`: `module.to()` and `nn.Parameter(...)` replace tensors."""
    new.__dict__.update(old.foreign_attributes())
    return new


@implements(aten.detach.default, aten.alias.default, aten.lift_fresh.default)
def detach(tensor: MXTensor) -> MXTensor:
    return _keep_attributes(tensor, tensor.rewrap(tensor.operand.map(torch.Tensor.detach)))


@implements(aten.clone.default)
def clone(tensor: MXTensor, *, memory_format: Any = None) -> MXTensor:
    return tensor.rewrap(tensor.operand.map(torch.clone))


@implements(aten.contiguous.default)
def contiguous(tensor: MXTensor, *, memory_format: Any = None) -> MXTensor:
    return tensor.rewrap(tensor.operand.map(torch.Tensor.contiguous))


@implements(aten._to_copy.default)
def to_copy(
    tensor: MXTensor,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: Any = None,
) -> MXTensor:
    """A new dtype is that of the decoded values. A new device moves the bytes and chooses class and backend again."""
    metadata = tensor.metadata if dtype is None else dataclasses.replace(tensor.metadata, dtype=check_dtype(dtype))
    if device is None or torch.device(device) == tensor.device:
        return _keep_attributes(tensor, tensor.rewrap(tensor.operand.map(torch.clone), metadata))
    canonical = tensor.canonical()
    metadata = dataclasses.replace(metadata, layout=CANONICAL)
    operand = canonical.operand.map(lambda inner: inner.to(device, non_blocking=non_blocking))
    return _keep_attributes(tensor, as_moved_weight(MXTensor(operand, metadata, tensor.shape), tensor.backend))


@implements(aten.copy_.default)
def copy_(destination: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy bytes between quantized tensors of the same scheme. Nothing is quantized or dequantized."""
    if not isinstance(destination, MXTensor):
        raise TypeError(
            f"cannot copy {source!r} into an ordinary {destination.dtype} tensor: that would dequantize it silently. "
            "Copy source.dequantize(), or quantize the destination first"
        )
    if not isinstance(source, MXTensor):
        raise TypeError(
            f"cannot copy an ordinary {source.dtype} tensor into {destination!r}: that would quantize it silently. "
            "Load the weights before quantize_, or copy "
            f'mxquant.quantize(source, "{destination.format}", axis={destination.axis})'
        )
    same = ("scheme", "axis", "block_offset")
    if tuple(source.shape) != tuple(destination.shape) or any(
        getattr(source.metadata, name) != getattr(destination.metadata, name) for name in same
    ):
        raise ValueError(
            f"cannot copy {source!r} into {destination!r}: shape, blocked axis, place in a block and scheme must be "
            f"the same, here {source.metadata.scheme} and {destination.metadata.scheme}; see .with_activation()"
        )
    if source.metadata.layout != destination.metadata.layout:
        moved = source.rewrap(source.operand.map(lambda inner: inner.to(destination.device)))
        prepared = in_layout_of(backend_of_layout(destination.metadata.layout), moved)
        if prepared is None:
            raise ValueError(
                f"cannot copy {source!r} into {destination!r}: its values do not fit layout "
                f"{destination.metadata.layout!r}; load with assign=True"
            )
        source = prepared
    for target, given in zip(destination.operand, source.operand, strict=True):
        if target is not None and given is not None:
            target.copy_(given, non_blocking)
    return destination


@implements(aten.new_zeros.default, aten.zeros_like.default)
def zeros_like(tensor: MXTensor, size: Sequence[int] | None = None, **options: Any) -> MXTensor:
    """Quantized zeros in the same format, blocked along the same axis counted from the end."""
    return _allocate_like(tensor, size, torch.Tensor.new_zeros, **options)


@implements(aten.new_empty.default, aten.empty_like.default)
def empty_like(tensor: MXTensor, size: Sequence[int] | None = None, **options: Any) -> MXTensor:
    return _allocate_like(tensor, size, torch.Tensor.new_empty, **options)


def _allocate_like(
    tensor: MXTensor,
    size: Sequence[int] | None,
    make: Callable[..., Tensor],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **options: Any,
) -> MXTensor:
    """Ignores `layout`, `pin_memory` and `memory_format` in `options`: the inner tensors are contiguous bytes."""
    tensor = tensor.canonical()
    fmt = block_format(tensor)
    size = tensor.shape if size is None else size
    # A tensor of the same shape will hold the same bytes. Another begins at a block border.
    offset = tensor.metadata.block_offset if tuple(size) == tuple(tensor.shape) else 0
    dtype = tensor.metadata.dtype if dtype is None else check_dtype(dtype)
    if len(size) < -tensor.axis:
        raise ValueError(f"a tensor like {tensor!r} has at least {-tensor.axis} axes; got shape {tuple(size)}")
    *lead, length = physical_shape(size, tensor.axis)
    end = offset + length
    per_tensor, static = tensor.per_tensor_scale, tensor.activation_scale
    spread = () if per_tensor is None or per_tensor.dim() == 0 else (*lead, 1)
    experts = () if static is None or static.dim() == 0 else (lead[0], *static.shape[1:])
    operand = Operand(
        make(tensor.qdata, (*lead, fmt.packed_size(end)), device=device),
        make(tensor.scale, (*lead, fmt.num_blocks(end)), device=device),
        None if per_tensor is None else make(per_tensor, spread, device=device),
        None if static is None else make(static, experts, device=device),
    )
    metadata = dataclasses.replace(tensor.metadata, dtype=dtype, block_offset=offset)
    return _keep_attributes(tensor, as_moved_weight(MXTensor(operand, metadata, size), tensor.backend))


@implements(aten.equal.default)
def equal(a: Any, b: Any) -> bool:
    """Whether two quantized tensors have the same format, shape, codes and scales. Padding is ignored."""
    for one, other in ((a, b), (b, a)):
        if not isinstance(one, MXTensor):
            raise TypeError(f"cannot compare {other!r} with an ordinary tensor; compare its .dequantize()")
    if tuple(a.shape) != tuple(b.shape) or _of_values(a) != _of_values(b):
        return False
    a, b = a.canonical(), b.canonical()
    scales = (a.per_tensor_scale, b.per_tensor_scale)
    return (
        torch.equal(_codes(a), _codes(b))
        and torch.equal(a.scale, b.scale)
        and (scales[0] is None or bool((scales[0] == scales[1]).all()))
    )


def _of_values(tensor: MXTensor) -> Metadata:
    """The metadata that the values depend on: without layout and activations."""
    scheme = Scheme(tensor.format, rotation=tensor.metadata.scheme.rotation)
    return dataclasses.replace(tensor.metadata, scheme=scheme, layout=CANONICAL)


def _codes(tensor: MXTensor) -> Tensor:
    offset = tensor.metadata.block_offset
    fmt = get_format(tensor.format)
    return unpack_codes(tensor.qdata, fmt.element.bits, offset + tensor.shape[tensor.axis])[..., offset:]


@implements(aten.is_pinned.default)
def is_pinned(tensor: MXTensor, device: torch.device | None = None) -> bool:
    return all(inner.is_pinned() for inner in tensor.operand if inner is not None)


@implements(aten._pin_memory.default)
def pin_memory(tensor: MXTensor, device: torch.device | None = None) -> MXTensor:
    return _keep_attributes(tensor, tensor.rewrap(tensor.operand.map(torch.Tensor.pin_memory)))


@implements(aten._has_compatible_shallow_copy_type.default)
def has_compatible_shallow_copy_type(a: Tensor, b: Tensor) -> bool:
    """False: `param.data = other` cannot exchange inner tensors. `module.to()` then swaps the tensors instead."""
    return False
