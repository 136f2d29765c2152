"""How two checkpoints differ, tensor by tensor, read a few rows at a time."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from mxquant.checkpoints.load import Content, read_content
from mxquant.tensor import MXTensor

_logger = logging.getLogger("mxquant")
_CHUNK_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class TensorDifference:
    """One tensor of both checkpoints."""

    name: str
    kinds: tuple[str, str]
    """The format or dtype in each."""
    shape: tuple[int, ...]
    differing_bytes: int | None
    """Of codes and scales, or of values; None where they are not stored alike."""
    nbytes: int
    """In the first."""
    sqnr_db: float
    """20 log10(|a| / |a - b|); inf where all values are equal."""


@dataclass(frozen=True)
class Comparison:
    """Two checkpoints."""

    tensors: list[TensorDifference] = field(default_factory=list)
    only_first: list[str] = field(default_factory=list)
    only_second: list[str] = field(default_factory=list)
    other_shapes: list[str] = field(default_factory=list)


class Tensors(Protocol):
    """What is compared: named tensors, each read when asked for."""

    @property
    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def nbytes(self, name: str) -> int: ...

    def read_alone(self, name: str) -> Tensor: ...


def compare(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str],
    by_model: Callable[[Content], Tensors | None] = lambda content: None,
) -> Iterator[TensorDifference | Comparison]:
    """Each tensor that both have, and at last the whole comparison.

    Args:
        by_model: the tensors of a checkpoint by the names that its model has, or None where the model is not known. It
            is asked where the files name or split them otherwise, as mixtures' experts; where it raises ValueError or
            NotImplementedError, the log says so, and names are those of the files.

    Raises:
        FileNotFoundError, ValueError, NotImplementedError: as `load_state`; ValueError if they have no name in common.
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
            continue
        difference = _difference(name, a, b)
        result.tensors.append(difference)
        yield difference
    yield result


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
        name, (kind(x), kind(y)), tuple(x.shape), _differing_bytes(x, y), a.nbytes(name), sqnr_db(x, y)
    )


def kind(tensor: Tensor) -> str:
    """The format of a quantized tensor, or the dtype."""
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
    flat = (t.contiguous().reshape(-1).view(torch.uint8) for t in (p, q))
    a, b = flat
    return sum(
        int((a[i : i + _CHUNK_ELEMENTS] != b[i : i + _CHUNK_ELEMENTS]).sum())
        for i in range(0, a.numel(), _CHUNK_ELEMENTS)
    )


def sqnr_db(x: Tensor, y: Tensor) -> float:
    """Signal to quantization noise of `y` as a stand-in for `x`, some rows at a time."""
    if x.dim() == 0:
        x, y = x.reshape(1), y.reshape(1)
    rows = max(1, _CHUNK_ELEMENTS // max(1, math.prod(x.shape[1:])))
    signal = noise = 0.0
    for start in range(0, x.shape[0], rows):
        wanted, given = _values(x[start : start + rows]), _values(y[start : start + rows])
        signal += torch.linalg.vector_norm(wanted).item() ** 2
        noise += torch.linalg.vector_norm(wanted - given).item() ** 2
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


def _values(part: Tensor) -> Tensor:
    values = part.dequantize(torch.float32) if isinstance(part, MXTensor) else part
    return values.double()
