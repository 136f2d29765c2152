"""Operators that reshape, slice, index or join MXTensors.

Physically the blocked axis is last and holds whole blocks. A slice along it is a view: one that starts inside a block
keeps the block and records its `block_offset`. The other axes are leading axes of the inner tensors, and an operator on
them is the same operator on the inner tensors. `_lead` maps a logical axis to its physical position.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from mxquant.backends.base import Operand
from mxquant.tensor.dispatch import implements
from mxquant.tensor.mxtensor import MXTensor, block_format, brief

aten = torch.ops.aten
_PICKING = "picking indices along the blocked axis"


def _refuse(tensor: MXTensor, what: str) -> NoReturn:
    raise NotImplementedError(
        f"{what} of {tensor!r} cannot be done on packed codes (blocked axis {tensor.axis}); call .dequantize() first "
        "for an ordinary tensor"
    )


def _axis_index(dim: int, rank: int) -> int:
    if not -rank <= dim < rank:
        raise IndexError(f"axis {dim} is out of range for a tensor of rank {rank}; use {-rank} to {rank - 1}")
    return dim % rank


def _lead(tensor: MXTensor, dim: int) -> int | None:
    """The physical position of a logical axis, or None for the blocked one."""
    dim, blocked = _axis_index(dim, tensor.dim()), tensor.axis % tensor.dim()
    return None if dim == blocked else dim - (dim > blocked)


def map_lead(tensor: MXTensor, function: Callable[[Tensor], Tensor], *axes: int) -> Operand:
    """`function`, which acts on leading axes only, applied to every inner tensor that has them.

    Args:
        axes: the physical axes that it acts on: a scale keeps size 1 along the others. None given: all.
    """
    lead = tensor.qdata.shape[:-1]

    def map_scale(scale: Tensor | None) -> Tensor | None:
        if scale is None or scale.dim() == 0:
            return scale
        sizes = [lead[i] if not axes or i in axes else size for i, size in enumerate(scale.shape[:-1])]
        mapped = function(scale.expand(*sizes, 1))
        return mapped.reshape(()) if mapped.numel() == 1 else mapped

    static = map_scale(tensor.activation_scale)
    return Operand(function(tensor.qdata), function(tensor.scale), map_scale(tensor.per_tensor_scale), static)


def _with_axis(tensor: MXTensor, operand: Operand, shape: Sequence[int], axis: int) -> MXTensor:
    return tensor.rewrap(operand, dataclasses.replace(tensor.metadata, axis=axis), shape)


@implements(aten.permute.default)
def permute(tensor: MXTensor, dims: Sequence[int]) -> MXTensor:
    rank = tensor.dim()
    order = [_axis_index(dim, rank) for dim in dims]
    blocked = tensor.axis % rank
    lead = [dim - (dim > blocked) for dim in order if dim != blocked]
    if lead == list(range(rank - 1)):
        # Only the blocked axis moves, as in a transpose of a matrix. The bytes stay as they are, in any layout.
        operand = tensor.operand
    else:
        tensor = tensor.canonical()
        operand = map_lead(tensor, lambda t: t.permute(*lead, rank - 1))
    return _with_axis(tensor, operand, [tensor.shape[dim] for dim in order], order.index(blocked) - rank)


@implements(aten.transpose.int)
def transpose(tensor: MXTensor, dim0: int, dim1: int) -> MXTensor:
    order = list(range(tensor.dim()))
    dim0, dim1 = _axis_index(dim0, tensor.dim()), _axis_index(dim1, tensor.dim())
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return permute(tensor, order)


@implements(aten.t.default, aten.numpy_T.default)
def t(tensor: MXTensor) -> MXTensor:
    return permute(tensor, list(reversed(range(tensor.dim()))))


@implements(aten.slice.Tensor)
def slice_(tensor: MXTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> MXTensor:
    tensor = tensor.canonical()
    lead = _lead(tensor, dim)
    start, end, _ = slice(start, end).indices(tensor.shape[dim])
    end = max(start, end)
    shape = list(tensor.shape)
    shape[dim] = -(-(end - start) // step)
    if lead is not None:
        return tensor.rewrap(
            map_lead(tensor, lambda inner: aten.slice.Tensor(inner, lead, start, end, step), lead), shape=shape
        )
    if step != 1:
        _refuse(tensor, f"a slice with step {step} along the blocked axis")
    return _slice_blocked(tensor, start, end, shape)


def _slice_blocked(tensor: MXTensor, start: int, end: int, shape: Sequence[int]) -> MXTensor:
    fmt = block_format(tensor)
    assert fmt.block_size is not None
    offset = tensor.metadata.block_offset
    # Metadata holds plain integers: a symbolic start specializes the graph.
    first_block, block_offset = divmod(int(offset + start), fmt.block_size)
    codes = slice(fmt.packed_size(first_block * fmt.block_size), fmt.packed_size(offset + end))
    blocks = slice(first_block, max(first_block, fmt.num_blocks(offset + end)))
    operand = tensor.operand._replace(qdata=tensor.qdata[..., codes], scale=tensor.scale[..., blocks])
    return tensor.rewrap(operand, dataclasses.replace(tensor.metadata, block_offset=block_offset), shape)


@implements(aten.split_with_sizes.default)
def split_with_sizes(tensor: MXTensor, sizes: Sequence[int], dim: int = 0) -> list[MXTensor]:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [slice_(tensor, dim, start, start + size) for start, size in zip(starts, sizes, strict=True)]


@implements(aten.split.Tensor)
def split(tensor: MXTensor, size: int, dim: int = 0) -> list[MXTensor]:
    return [slice_(tensor, dim, start, start + size) for start in range(0, tensor.shape[dim], size)]


@implements(aten.select.int)
def select(tensor: MXTensor, dim: int, index: int) -> MXTensor:
    tensor, lead = _indexable(tensor, dim, "selecting one index of the blocked axis")
    return _drop_axis(tensor, map_lead(tensor, lambda inner: inner.select(lead, index), lead), dim)


def _indexable(tensor: MXTensor, dim: int, action: str) -> tuple[MXTensor, int]:
    """The tensor in a layout that can be indexed along `dim`, and that axis's physical position.

    A stack that is indexed by matrix is left in its layout. `action` is refused of the blocked axis.
    """
    lead = _lead(tensor, dim)
    if lead is None:
        _refuse(tensor, action)
    is_stack = tensor.dim() == 3 and tensor.axis != -3 and dim in (0, -3)
    return tensor if is_stack else tensor.canonical(), lead


def _drop_axis(tensor: MXTensor, operand: Operand, dim: int) -> MXTensor:
    dim = dim % tensor.dim()
    shape = [size for i, size in enumerate(tensor.shape) if i != dim]
    return _with_axis(tensor, operand, shape, tensor.axis + (dim > tensor.axis % tensor.dim()))


@implements(aten.unbind.int)
def unbind(tensor: MXTensor, dim: int = 0) -> list[MXTensor]:
    return [select(tensor, dim, index) for index in range(tensor.shape[dim])]


@implements(aten.unsqueeze.default)
def unsqueeze(tensor: MXTensor, dim: int) -> MXTensor:
    dim = _axis_index(dim, tensor.dim() + 1)
    shape = list(tensor.shape)
    shape.insert(dim, 1)
    blocked = tensor.axis % tensor.dim()
    return _reshape(tensor, shape, blocked + (dim <= blocked))


@implements(aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default)
def squeeze(tensor: MXTensor, dim: int | Sequence[int] | None = None) -> MXTensor:
    dims = range(tensor.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    blocked = tensor.axis % tensor.dim()
    dropped = {index for index in (_axis_index(d, tensor.dim()) for d in dims) if tensor.shape[index] == 1}
    if blocked in dropped:
        _refuse(tensor, "squeezing the blocked axis")
    shape = [size for i, size in enumerate(tensor.shape) if i not in dropped]
    return _reshape(tensor, shape, blocked - sum(i < blocked for i in dropped))


@implements(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten._reshape_alias.default)
def view(tensor: MXTensor, shape: Sequence[int], stride: Sequence[int] | None = None) -> MXTensor:
    """Reshape the axes before and after the blocked axis."""
    shape = _infer_size(shape, tensor.numel())
    if tuple(shape) == tuple(tensor.shape):
        return tensor.rewrap(tensor.operand)
    blocked = tensor.axis % tensor.dim()
    length, before = tensor.shape[blocked], math.prod(tensor.shape[:blocked])
    for position, size in enumerate(shape):
        if size == length and math.prod(shape[:position]) == before:
            return _reshape(tensor, shape, position)
    _refuse(tensor, f"a view as {tuple(shape)}, which splits or merges the blocked axis,")


def _reshape(tensor: MXTensor, shape: Sequence[int], blocked: int) -> MXTensor:
    """The tensor of logical shape `shape`, the blocked axis at index `blocked`."""
    tensor = tensor.canonical()
    lead = [*shape[:blocked], *shape[blocked + 1 :]]
    operand = map_lead(tensor, lambda inner: inner.reshape(*lead, inner.shape[-1]))
    return _with_axis(tensor, operand, shape, blocked - len(shape))


def _infer_size(shape: Sequence[int], numel: int) -> list[int]:
    known = math.prod(size for size in shape if size != -1)
    return [numel // max(known, 1) if size == -1 else size for size in shape]


@implements(aten.expand.default)
def expand(tensor: MXTensor, size: Sequence[int], *, implicit: bool = False) -> MXTensor:
    tensor = tensor.canonical()
    new = len(size) - tensor.dim()
    shape = [tensor.shape[i - new] if n == -1 else n for i, n in enumerate(size)]
    blocked = new + tensor.axis % tensor.dim()
    if shape[blocked] != tensor.shape[tensor.axis]:
        _refuse(tensor, f"expanding the blocked axis to {shape[blocked]}")
    lead = [n for i, n in enumerate(shape) if i != blocked]
    return tensor.rewrap(map_lead(tensor, lambda inner: inner.expand(*lead, inner.shape[-1])), shape=shape)


@implements(aten.index_select.default)
def index_select(tensor: MXTensor, dim: int, index: Tensor) -> MXTensor:
    tensor, lead = _indexable(tensor, dim, _PICKING)
    shape = list(tensor.shape)
    shape[dim] = index.numel()
    return tensor.rewrap(map_lead(tensor, lambda inner: inner.index_select(lead, index), lead), shape=shape)


@implements(aten.index.Tensor)
def index(tensor: MXTensor, indices: Sequence[Tensor | None]) -> MXTensor:
    """`tensor[ids]` with one index tensor or mask, for an axis that is not blocked."""
    given = [(dim, ids) for dim, ids in enumerate(indices) if ids is not None]
    if len(given) != 1:
        _refuse(tensor, f"indexing with {len(given)} index tensors")
    dim, ids = given[0]
    if ids.dim() != 1:
        tensor = tensor.canonical()
        if ids.dtype == torch.bool:
            _refuse(tensor, _PICKING)
    tensor, lead = _indexable(tensor, dim, _PICKING)
    picked: list[Any] = [slice(None)] * lead + [ids]
    operand = map_lead(tensor, lambda inner: inner[tuple(picked)], lead)
    added = operand.qdata.dim() - tensor.qdata.dim()
    rows = operand.qdata.shape[lead : lead + 1 + added]
    shape = [*tensor.shape[:dim], *rows, *tensor.shape[dim + 1 :]]
    return _with_axis(tensor, operand, shape, tensor.axis - (added if dim > tensor.axis % tensor.dim() else 0))


@implements(aten.cat.default)
def cat(tensors: Sequence[Any], dim: int = 0) -> MXTensor:
    first = next(t for t in tensors if isinstance(t, MXTensor)).canonical()
    parts = [_alike(first, t) for t in tensors]
    lead = _lead(first, dim)
    shape = list(first.shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    if lead is None:
        return _cat_blocked(parts, shape)
    if any(part.metadata.block_offset != first.metadata.block_offset for part in parts):
        _refuse(first, "joining slices that start at different places in their blocks")
    operand = Operand(
        torch.cat([part.qdata for part in parts], lead),
        torch.cat([part.scale for part in parts], lead),
        _cat_scales([part.per_tensor_scale for part in parts], parts, lead),
        _cat_activation_scales(parts, lead),
    )
    return first.rewrap(operand, shape=shape)


def _alike(first: MXTensor, other: Any) -> MXTensor:
    same = ("scheme", "axis", "dtype")
    if not isinstance(other, MXTensor) or any(
        getattr(first.metadata, name) != getattr(other.metadata, name) for name in same
    ):
        raise ValueError(
            "only tensors of one scheme (format, rotation, activations), blocked axis and dtype can be joined; "
            f"got {first!r} and {brief(other)}; call .dequantize() first to join them as ordinary tensors"
        )
    return other.canonical()


def _cat_scales(scales: Sequence[Tensor | None], parts: Sequence[MXTensor], lead: int) -> Tensor | None:
    """One scale if all parts have the same, else one for each index of the axis along which they are joined."""
    given = [scale for scale in scales if scale is not None]
    if not given:
        return None
    if all(scale.dim() == 0 and torch.equal(scale, given[0]) for scale in given):
        return given[0]
    if all(math.prod(scale.shape) == (scale.shape[lead] if scale.dim() else 1) for scale in given):
        # They differ along this axis only.
        rank = parts[0].qdata.dim()
        sizes = [[part.qdata.shape[lead] if i == lead else 1 for i in range(rank)] for part in parts]
        flat = [scale if scale.dim() else scale.view([1] * rank) for scale in given]
        return torch.cat([scale.expand(size) for scale, size in zip(flat, sizes, strict=True)], lead)
    spread = [scale.expand(*part.qdata.shape[:-1], 1) for scale, part in zip(given, parts, strict=True)]
    return torch.cat(spread, lead)


def _cat_activation_scales(parts: Sequence[MXTensor], lead: int) -> Tensor | None:
    """The static scales of the joined tensor: matrices of a stack may have different ones, parts of a matrix not."""
    joined = _cat_scales([part.activation_scale for part in parts], parts, lead)
    if joined is not None and joined.dim() and not (lead == 0 and parts[0].dim() == 3):
        scales = [part.activation_scale for part in parts]
        if any(s is None or scales[0] is None or not torch.equal(s, scales[0]) for s in scales):
            raise ValueError(
                "only parts of one static activation scale can be joined to one matrix; call .dequantize() first to "
                "join them as ordinary tensors, or .with_activation() to give them another"
            )
        return scales[0]
    return joined


def _cat_blocked(parts: Sequence[MXTensor], shape: Sequence[int]) -> MXTensor:
    fmt, first = block_format(parts[0]), parts[0]
    assert fmt.block_size is not None
    for part, following in itertools.pairwise(parts):
        if (part.metadata.block_offset + part.shape[part.axis]) % fmt.block_size or following.metadata.block_offset:
            _refuse(part, f"joining along the blocked axis off a block border (a multiple of {fmt.block_size})")
    scales = [part.per_tensor_scale for part in parts]
    if first.per_tensor_scale is not None and any(
        s is None or not torch.equal(s, first.per_tensor_scale) for s in scales
    ):
        _refuse(first, "joining NVFP4 tensors of different per-tensor scales along the blocked axis")
    qdata = torch.cat([part.qdata for part in parts], -1)
    scale = torch.cat([part.scale for part in parts], -1)
    return first.rewrap(first.operand._replace(qdata=qdata, scale=scale), shape=shape)


@implements(aten.stack.default)
def stack(tensors: Sequence[Any], dim: int = 0) -> MXTensor:
    return cat([unsqueeze(t, dim) if isinstance(t, MXTensor) else t for t in tensors], dim)


@implements(aten.as_strided.default)
def as_strided(
    tensor: MXTensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> MXTensor:
    """The tensor itself: packed codes have no other strides."""
    if tuple(size) != tuple(tensor.shape) or tuple(stride) != tensor.stride() or storage_offset:
        _refuse(tensor, f"as_strided with shape {tuple(size)}, strides {tuple(stride)}, offset {storage_offset}")
    return tensor.rewrap(tensor.operand)
