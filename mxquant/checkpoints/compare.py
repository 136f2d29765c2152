"""Compare two checkpoints tensor by tensor."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from mxquant.checkpoints.load import Content, read_content
from mxquant.tensor import MXTensor
from mxquant.tensor.sqnr import sqnr_db

_logger = logging.getLogger("mxquant")
_CHUNK_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class TensorDifference:
    """One tensor that both checkpoints have."""

    name: str
    kinds: tuple[str, str]
    """Its format or dtype in each."""
    shape: tuple[int, ...]
    differing_bytes: int | None
    """Of codes and scales, or of values; None if they are not stored alike."""
    nbytes: int
    """In the first checkpoint."""
    sqnr_db: float
    """SQNR of the second against the first; inf if all values are equal."""


@dataclass(frozen=True)
class Comparison:
    tensors: list[TensorDifference] = field(default_factory=list)
    only_first: list[str] = field(default_factory=list)
    only_second: list[str] = field(default_factory=list)
    other_shapes: list[str] = field(default_factory=list)


class Tensors(Protocol):
    """Named tensors that are read one at a time."""

    @property
    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def nbytes(self, name: str) -> int: ...

    def read_alone(self, name: str) -> Tensor: ...


def compare(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str],
    by_model: Callable[[Content], Tensors | None],
) -> Comparison:
    """Compare each tensor that both checkpoints have.

    Args:
        by_model: gives a checkpoint's tensors under the names of its model, or None if the model is unknown. It is
            called if the files do not have the same names, as when experts are split in one of them. If it raises
            ValueError or NotImplementedError, that is logged, and the files' names are compared.

    Raises:
        FileNotFoundError, NotImplementedError: as `load_state`.
        ValueError: as `load_state`, or no name is in both checkpoints.
    """
    a, b = _named_alike(read_content(first), read_content(second), by_model)
    ours, theirs = set(a.names), set(b.names)
    common = [name for name in a.names if name in theirs]
    if not common:
        raise ValueError(f"{first} and {second} have no tensor of one name; compare checkpoints of one model")
    result = Comparison(only_first=sorted(ours - theirs), only_second=sorted(theirs - ours))
    for name in common:
        if a.shape(name) != b.shape(name):
            result.other_shapes.append(name)
        else:
            result.tensors.append(_difference(name, a, b))
    return result


def _named_alike(a: Content, b: Content, by_model: Callable[[Content], Tensors | None]) -> tuple[Tensors, Tensors]:
    if set(a.names) == set(b.names):
        return a, b
    try:
        x, y = by_model(a), by_model(b)
    except (ValueError, NotImplementedError) as error:
        _logger.warning("compared by the names in the files, because one of them does not fit its model: %s", error)
        return a, b
    return (a, b) if x is None or y is None else (x, y)


def _difference(name: str, a: Tensors, b: Tensors) -> TensorDifference:
    x, y = a.read_alone(name), b.read_alone(name)
    return TensorDifference(
        name, (_kind(x), _kind(y)), tuple(x.shape), _differing_bytes(x, y), a.nbytes(name), sqnr_db(x, y)
    )


def _kind(tensor: Tensor) -> str:
    """The format of a quantized tensor, the dtype of another one."""
    return tensor.format if isinstance(tensor, MXTensor) else str(tensor.dtype).removeprefix("torch.")


def _differing_bytes(x: Tensor, y: Tensor) -> int | None:
    if isinstance(x, MXTensor) and isinstance(y, MXTensor):
        if (x.format, x.axis, x.metadata.block_offset) != (y.format, y.axis, y.metadata.block_offset):
            return None
        pairs = [(p, q) for p, q in zip(x.operand[:3], y.operand[:3], strict=True) if p is not None and q is not None]
    elif isinstance(x, MXTensor) or isinstance(y, MXTensor) or x.dtype != y.dtype:
        return None
    else:
        pairs = [(x, y)]
    return sum(_count(p, q) for p, q in pairs)


def _count(p: Tensor, q: Tensor) -> int:
    if p.shape != q.shape:
        p, q = torch.broadcast_tensors(p, q)
    a, b = (t.contiguous().reshape(-1).view(torch.uint8) for t in (p, q))
    return sum(
        int((a[i : i + _CHUNK_ELEMENTS] != b[i : i + _CHUNK_ELEMENTS]).sum())
        for i in range(0, a.numel(), _CHUNK_ELEMENTS)
    )
