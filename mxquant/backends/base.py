"""The protocol of a backend: a matmul of activations with a quantized weight, on plain tensors and a description of
the problem.

A backend never sees the tensor subclass. It answers for each problem whether it takes it or why not; it takes one
only where it computes exactly what the problem says: the same codes, the same activation quantization, nothing
clamped and nothing dropped.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from mxquant.formats.spec import Format

CANONICAL = "canonical"
ANY_LAYOUT = "any"
"""Stands for the layout of a weight that is yet to be prepared."""


class Operand(NamedTuple):
    """The plain tensors of a quantized weight, in the layout that the problem names."""

    qdata: Tensor
    scale: Tensor
    per_tensor_scale: Tensor | None = None
    activation_scale: Tensor | None = None
    """Static fp32 scale of the activations, where a checkpoint brings one."""

    def map(self, function: Callable[[Tensor], Tensor]) -> Operand:
        """`function` of each tensor that is there."""
        return Operand(*(None if tensor is None else function(tensor) for tensor in self))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Problem:
    """What is to be computed: `input [..., K] @ weight[N, K].T`, or `input [..., N] @ weight[N, K]` where contraction
    is "unblocked".

    The number of input rows is not part of it: a backend chooses by that inside, so that no compiled graph branches
    on it.
    """

    weight: str
    """Name of the weight's format."""
    activation: str | None
    """Name of the format that the input is quantized to first; None: not at all (always None for "unblocked")."""
    activation_scale_mode: str | None
    static_activation_scale: bool
    out_features: int
    """N, rows of the weight."""
    in_features: int
    """K, along which the weight is blocked."""
    block_offset: int
    """Codes that precede the weight's first element in its first block."""
    dtype: torch.dtype
    """Of input and output."""
    device: torch.device
    capability: tuple[int, int] | None
    """CUDA compute capability; None elsewhere."""
    contraction: str = "blocked"
    layout: str = CANONICAL


class Layout(abc.ABC):
    """A backend's own arrangement of a weight's bytes: of equal size, and invertible, so that nothing is held twice.

    Codes and scales stay in two tensors, and the leading axes of a stack of matrices stay in front, so that a matrix
    can be picked out. What is saved, sliced or sharded is always the canonical form. `quantize_`, `copy_` and
    `.to(device)` prepare a weight. One that is not prepared (a slice, a tensor put in place of a parameter) goes to a
    backend that reads canonical bytes; only where the backend was named it is packed, at every call.
    """

    name: ClassVar[str]

    @abc.abstractmethod
    def pack(self, qdata: Tensor, scale: Tensor, fmt: Format) -> tuple[Tensor, Tensor] | None:
        """Canonical uint8 tensors [..., N, bytes] and [..., N, blocks] to this layout's, of the same bytes in all.

        None if these values cannot be arranged so; the next backend is then asked.
        """

    @abc.abstractmethod
    def unpack(self, qdata: Tensor, scale: Tensor, fmt: Format, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """The inverse of `pack`, for a weight whose physical shape (blocked axis last) is `shape`."""


class Backend(abc.ABC):
    """One implementation of the matmul. Stateless: `register_backend` makes one instance."""

    name: ClassVar[str]
    native: ClassVar[bool] = True
    """False: emulation, which dequantizes and multiplies in high precision."""
    layout: ClassVar[Layout | None] = None
    """The layout its weights are kept in; None: it reads the canonical bytes."""

    @abc.abstractmethod
    def reject(self, problem: Problem) -> str | None:
        """None if this backend computes `problem` exactly as stated, else the reason why not, in a few words. Never
        raises.

        The problem's layout is not its concern: the registry sees to it that the weight is in its own.
        """

    @abc.abstractmethod
    def matmul(self, x: Tensor, weight: Operand, bias: Tensor | None, problem: Problem) -> Tensor:
        """The product, bias added, in `problem.dtype`.

        Args:
            x: [M, K], or [M, N] where the contraction is "unblocked"; M may be 0; any strides.
            weight: one 2-D weight, in this backend's layout.
            bias: [N] ([K] where "unblocked"), any floating dtype, or None.

        Returns:
            [M, N], or [M, K].
        """
