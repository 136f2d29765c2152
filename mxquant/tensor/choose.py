"""From an MXTensor to the weight of a layer: which class, which backend and which layout serve it on its device."""

from __future__ import annotations

import dataclasses
import functools

import torch

from mxquant.backends.base import ANY_LAYOUT, CANONICAL, Backend, Problem
from mxquant.backends.registry import get_backend, preferences
from mxquant.reference.gated_activation import GatedActivation
from mxquant.scheme import Scheme
from mxquant.tensor.mxtensor import EmulatedMXTensor, MXTensor, block_format


def describe(
    weight: MXTensor,
    dtype: torch.dtype | None = None,
    *,
    contraction: str = "blocked",
    device: torch.device | None = None,
    grouped: bool | None = None,
    gate: GatedActivation | None = None,
) -> Problem:
    """The problem that a matmul with `weight` poses: 2-D, or a stack of such.

    Args:
        dtype: of the other operand; None: the weight's own.
        contraction: "blocked" along the weight's blocked axis, "unblocked" along the other.
        device: to ask about another device than the weight's, where it would be prepared anew.
        grouped: of a stack, whether groups of rows are multiplied each with its own matrix, as in experts, or one
            matrix at a time; None: whatever a stack is there for.
        gate: what the other operand goes through first, where the backend applies it.
    """
    metadata, shape, here = weight.metadata, weight.shape, weight.qdata.device
    blocked = contraction == "blocked"
    # While a graph is traced the sizes may be symbolic: a choice of backend specializes on them.
    n, k = int(shape[-2 if metadata.axis == -1 else -1]), int(shape[metadata.axis])
    asked = here if device is None else device
    # By position, in the order of the fields: names take as long as all the rest.
    return _one_problem(
        metadata.scheme if blocked else _unquantized_input(metadata.scheme.weight),
        n,
        k,
        int(metadata.block_offset),
        metadata.dtype if dtype is None else dtype,
        asked,
        _capability(asked),
        contraction,
        metadata.layout if asked == here else ANY_LAYOUT,
        int(shape[0]) if len(shape) == 3 and grouped is not False else 0,
        gate,
    )


# Equal problems are one object, made once: it takes most of the time of a description, at every matmul.
_one_problem = functools.lru_cache(maxsize=4096)(Problem)
# A matmul across the blocks: of the weight's scheme, it needs the format alone.
_unquantized_input = functools.cache(Scheme)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int] | None:
    """Of a CUDA device that is here, else None. Asking costs more than the rest of a description."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)


def requested_backend(weight: MXTensor) -> str:
    """The backend that its matmuls ask for: emulation for an EmulatedMXTensor, else what was requested."""
    return "emulation" if isinstance(weight, EmulatedMXTensor) else weight.backend


def as_weight(tensor: MXTensor, backend: str = "auto") -> MXTensor:
    """`tensor` as the weight of a layer: of the class and in the layout of the backend that serves it on its device.

    Raises:
        ValueError: `backend` is unknown, or rejects the problem (with its reason).
    """
    tensor = tensor.canonical()
    if tensor.dim() < 2:
        return tensor
    problem = dataclasses.replace(describe(tensor), layout=ANY_LAYOUT)
    for chosen in preferences(problem, backend):
        prepared = in_layout_of(chosen, tensor)
        if prepared is not None:
            return _as_class(MXTensor if chosen.native else EmulatedMXTensor, prepared, backend)
    raise ValueError(
        f"backend {backend!r} cannot hold the values of {tensor!r}: its layout does not fit them. "
        'Use backend="auto" for one that can'
    )


def as_moved_weight(tensor: MXTensor, backend: str) -> MXTensor:
    """`as_weight` after a change of device: a requested backend that cannot serve there is kept, and says why when
    used.
    """
    if backend != "auto" and tensor.dim() >= 2 and get_backend(backend).reject(describe(tensor)) is not None:
        return _as_class(MXTensor, tensor, backend)
    return as_weight(tensor, backend)


def _as_class(cls: type[MXTensor], tensor: MXTensor, backend: str) -> MXTensor:
    return cls(tensor.operand, tensor.metadata, tensor.shape, backend)


def in_layout_of(backend: Backend, tensor: MXTensor) -> MXTensor | None:
    """The tensor in the layout that `backend` reads: itself where it is so already; None if its values do not fit.

    Raises:
        ValueError: the layout does not keep the number of bytes.
    """
    layout = backend.layout
    if tensor.metadata.layout == (CANONICAL if layout is None else layout.name):
        return tensor
    tensor = tensor.canonical()
    if layout is None:
        return tensor
    packed = layout.pack(tensor.qdata, tensor.scale, block_format(tensor))
    if packed is None:
        return None
    before, after = tensor.qdata.nbytes + tensor.scale.nbytes, packed[0].nbytes + packed[1].nbytes
    if before != after:
        raise ValueError(
            f"layout {layout.name!r} of backend {backend.name!r} turned {before} bytes into {after}; a layout keeps "
            "their number. Expanded copies are workspace of a call"
        )
    metadata = dataclasses.replace(tensor.metadata, layout=layout.name)
    return tensor.rewrap(tensor.operand._replace(qdata=packed[0], scale=packed[1]), metadata)
