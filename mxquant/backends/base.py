"""The protocol of a backend, an implementation of the matmul: `Backend`, and what it is given.

A backend gets plain tensors (`Operand`, `Groups`) and a description (`Problem`), never the tensor subclass. For each
problem it says that it takes it, or why not. It takes only what it computes exactly as stated: the same codes, the same
quantization of activations, nothing clamped, nothing dropped.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from mxquant.formats.spec import Format
from mxquant.reference.gated_activation import GatedActivation
from mxquant.scheme import HasScheme, Scheme

FORWARD = "blocked"
DGRAD = "unblocked"
"""Values of `Problem.contraction`. Forward contracts along the weight's blocked axis, as a linear layer does; dgrad
contracts across the blocks, as the gradient of the layer's input does.
"""
CANONICAL = "canonical"
ANY_LAYOUT = "any"
"""The layout of a weight that is not prepared yet."""


class Operand(NamedTuple):
    """The plain tensors of a quantized weight, in the layout that the problem names."""

    qdata: Tensor
    scale: Tensor
    per_tensor_scale: Tensor | None = None
    activation_scale: Tensor | None = None
    """Static fp32 scale of the activations: 0-dim, or [E, 1, 1] for a stack of E."""

    def map(self, function: Callable[[Tensor], Tensor]) -> Operand:
        """`function` applied to each tensor that is not None."""
        return Operand(*(None if tensor is None else function(tensor) for tensor in self))  # type: ignore[arg-type]

    def matrix(self, index: int) -> Operand:
        """Matrix `index` of a stack [E, N, ...]. A scale that the stack has per matrix is 0-dim."""
        matrices = self.qdata.shape[0]

        def scale_of(scale: Tensor | None) -> Tensor | None:
            if scale is None or scale.dim() == 0:
                return scale
            chosen = scale.expand(matrices, *scale.shape[1:])[index]
            return chosen.reshape(()) if chosen.numel() == 1 else chosen

        static = scale_of(self.activation_scale)
        return Operand(self.qdata[index], self.scale[index], scale_of(self.per_tensor_scale), static)


class Groups(NamedTuple):
    """Which rows are multiplied with which matrix of a stack. Rows are sorted by matrix."""

    offsets: Tensor
    """int32 [E]: where the rows of each matrix end. Rows beyond the last have no matrix; their results are zero."""
    rows: Tensor | None = None
    """int64 [S]: for each sorted row its index in the input; None: the input itself is sorted."""

    def count(self, x: Tensor) -> int:
        """Rows of the result, for input `x`."""
        return x.shape[0] if self.rows is None else self.rows.shape[0]

    def on_host(self) -> Iterator[tuple[int, slice]]:
        """Each matrix that has rows, with the slice of its sorted rows. Synchronizes with the GPU."""
        start = 0
        for index, end in enumerate(self.offsets.tolist()):
            if end > start:
                yield index, slice(start, end)
                start = end

    def pick(self, x: Tensor, places: slice) -> Tensor:
        """The input rows of a slice of sorted rows."""
        return x[places] if self.rows is None else x[self.rows[places]]


@dataclass(frozen=True)
class Problem(HasScheme):
    """What is to be computed: `input [..., K] @ weight[N, K].T` (forward), or `input [..., N] @ weight[N, K]` (dgrad).

    NOTE: the number of input rows and their grouping are not part of it. A backend chooses by them inside, so that no
    compiled graph branches on them.
    """

    scheme: Scheme
    """In dgrad it has the weight's format alone: the input is neither quantized nor rotated.

    Backends that set `rotates` rotate the input by `scheme.rotation`; others are given a rotated input.
    """
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
    contraction: str = FORWARD
    layout: str = CANONICAL
    experts: int = 0
    """Matrices in the stack of a grouped matmul; 0 for the matmul of one matrix."""
    gate: GatedActivation | None = None
    """Applied first to the input of a grouped matmul, [..., 2K], and rounded to `dtype`. Only backends that set `gates`
    are given one; others are given a gated input.
    """

    @property
    def width(self) -> int:
        """Columns of the result: N in forward, K in dgrad."""
        return self.out_features if self.contraction == FORWARD else self.in_features

    @property
    def weight(self) -> str:
        return self.scheme.weight

    @property
    def static_activation_scale(self) -> bool:
        """Whether `Operand.activation_scale` is there."""
        return self.scheme.static_activation_scale


def no_device(problem: Problem, needed: str) -> str:
    """The reason of a backend that needs a GPU, `needed`, against a problem without a compute capability."""
    if problem.device.type == "cuda":
        return "no CUDA device is here, so it cannot be asked"
    return f"needs {needed}, this is {problem.device.type}"


class Layout(abc.ABC):
    """A backend's own arrangement of a weight's bytes.

    It is invertible and keeps the number of bytes, so that nothing is held twice. Codes and scales stay two tensors.
    The leading axes of a stack stay in front, so that a matrix can be indexed. Saving, slicing and sharding convert to
    the canonical layout.

    `quantize_`, `copy_` and `.to(device)` pack a weight. A weight that is not packed (a slice, a tensor assigned to a
    parameter) goes to a backend that reads canonical bytes. If the backend was named, it is packed at every call.
    """

    name: ClassVar[str]

    @abc.abstractmethod
    def pack(self, qdata: Tensor, scale: Tensor, fmt: Format) -> tuple[Tensor, Tensor] | None:
        """From canonical uint8 tensors [..., N, bytes] and [..., N, blocks] to this layout's, of the same total bytes.

        Returns:
            the two tensors; None if the layout cannot hold these values: the next backend is then asked.
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
    rotates: ClassVar[bool] = False
    """Whether it applies `problem.rotation` to the input itself: in fp32, rounded to the input's dtype, as
    `mxquant.reference.hadamard`. Saves a launch where its kernel quantizes the input anyway.
    """
    gates: ClassVar[bool] = False
    """Whether its `grouped_matmul`, in forward, applies `problem.gate` to the input, with the bits of
    `mxquant.ops.gated_activation`. `reject` is asked about problems without a gate.
    """

    @abc.abstractmethod
    def reject(self, problem: Problem) -> str | None:
        """None if this backend computes `problem` exactly as stated, else the reason why not, in a few words.

        Never raises. Need not look at the problem's layout: the registry does.
        """

    @abc.abstractmethod
    def matmul(self, x: Tensor, weight: Operand, bias: Tensor | None, problem: Problem) -> Tensor:
        """The product, bias added, in `problem.dtype`.

        Args:
            x: [M, K], in dgrad [M, N]; M may be 0; any strides.
            weight: one matrix, in this backend's layout.
            bias: [N], in dgrad [K], of any floating dtype; or None.

        Returns:
            [M, N], in dgrad [M, K].
        """

    def grouped_matmul(
        self, x: Tensor, weights: Operand, bias: Tensor | None, groups: Groups, problem: Problem
    ) -> Tensor:
        """Each group of rows times its own matrix, for a problem whose `experts` is not 0.

        This implementation calls `matmul` for each expert that has rows, and reads the offsets on the host. A backend
        with a grouped kernel overrides it. A backend that does not serve experts says so in `reject`.

        Args:
            x: [S, K] sorted by expert, or [T, K] in any order with `groups.rows`; N instead of K in dgrad, 2K with a
                gate.
            weights: a stack of E matrices in this backend's layout.
            bias: [E, N], in dgrad [E, K], of any floating dtype; or None.

        Returns:
            [S, N], in dgrad [S, K], in `problem.dtype`; zero beyond the last group.
        """
        y = x.new_zeros(groups.count(x), problem.width, dtype=problem.dtype)
        for expert, rows in groups.on_host():
            bias_N = None if bias is None else bias[expert]
            y[rows] = self.matmul(groups.pick(x, rows), weights.matrix(expert), bias_N, problem)
        return y
