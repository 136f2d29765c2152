"""Which backend multiplies with an MXTensor, and the class and layout that it needs as the weight of a layer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch

from mxquant.backends.base import ANY_LAYOUT, CANONICAL, FORWARD, Backend, Problem
from mxquant.backends.registry import get_backend, preferences, select_backend
from mxquant.reference.gated_activation import GatedActivation
from mxquant.scheme import Scheme
from mxquant.tensor.metadata import Metadata
from mxquant.tensor.mxtensor import EmulatedMXTensor, MXTensor, block_format


def describe(weight: MXTensor, dtype: torch.dtype | None = None, *, device: torch.device | None = None) -> Problem:
    """The problem of the forward with `weight`, a matrix or a stack of experts.

    Args:
        dtype: of the other operand; None: the weight's own.
        device: where the matmul would run, with the weight packed for the backend there; None: the weight's device.
    """
    metadata, shape, here = weight.metadata, weight.shape, weight.qdata.device
    if device is not None and device != here:
        metadata = dataclasses.replace(metadata, layout=ANY_LAYOUT)
    experts = int(shape[0]) if len(shape) == 3 else 0
    return problem_of(metadata, shape, device or here, dtype or metadata.dtype, FORWARD, experts)


def problem_of(
    metadata: Metadata, shape: Sequence[int], device: torch.device, dtype: torch.dtype, contraction: str, experts: int
) -> Problem:
    """The problem of a weight of that metadata and logical shape. Equal problems are one object."""
    # Sizes may be symbolic while a graph is traced. The choice of a backend specializes on them.
    n, k = int(shape[-2 if metadata.axis == -1 else -1]), int(shape[metadata.axis])
    scheme = metadata.scheme if contraction == FORWARD else _weight_alone(metadata.scheme.weight)
    # By position, as keywords would double the time of this function.
    return _one_problem(
        scheme,
        n,
        k,
        metadata.block_offset,
        dtype,
        device,
        _compute_capability(device),
        contraction,
        metadata.layout,
        experts,
    )


# Every matmul describes its problem. Constructing one takes longer than finding it.
_one_problem = functools.lru_cache(maxsize=4096)(Problem)
_weight_alone = functools.cache(Scheme)


@functools.lru_cache(maxsize=4096)
def with_gate(problem: Problem, gate: GatedActivation) -> Problem:
    return dataclasses.replace(problem, gate=gate)


@functools.cache
def _compute_capability(device: torch.device) -> tuple[int, int] | None:
    """Of a CUDA device that is here, else None. NOTE: cached; asking takes longer than the rest of a description."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)


def requested_backend(weight: MXTensor) -> str:
    """The backend that a matmul with `weight` asks for: emulation for an EmulatedMXTensor, else `weight.backend`."""
    return "emulation" if isinstance(weight, EmulatedMXTensor) else weight.backend


def choose_backend(weight: MXTensor, problem: Problem) -> tuple[Backend, MXTensor]:
    """The backend that computes `problem`, and the weight in its layout.

    Raises:
        ValueError: the backend that the weight asks for cannot compute it, or cannot hold its values.
    """
    backend = select_backend(problem, requested_backend(weight))
    prepared = in_layout_of(backend, weight)
    if prepared is None:
        raise ValueError(
            f'backend {backend.name!r} cannot hold the values of {weight!r}; use backend="auto" for one that can'
        )
    return backend, prepared


def as_weight(tensor: MXTensor, backend: str = "auto") -> MXTensor:
    """`tensor` as the weight of a layer: of the class and in the layout of the backend that multiplies with it.

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
    """`as_weight` after a change of device.

    A requested backend that does not take the weight there is kept. It raises with its reason at the first matmul.
    """
    if backend != "auto" and tensor.dim() >= 2 and get_backend(backend).reject(describe(tensor)) is not None:
        return _as_class(MXTensor, tensor, backend)
    return as_weight(tensor, backend)


def _as_class(cls: type[MXTensor], tensor: MXTensor, backend: str) -> MXTensor:
    return cls(tensor.operand, tensor.metadata, tensor.shape, backend)


def in_layout_of(backend: Backend, tensor: MXTensor) -> MXTensor | None:
    """The tensor in the layout of `backend`, itself if it is; None if the layout cannot hold its values."""
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
