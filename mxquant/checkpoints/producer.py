"""What each file format of a producer answers for: to recognize it, to read it, and to write it."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

from torch import Tensor

from mxquant.checkpoints.files import Checkpoint
from mxquant.checkpoints.weight_spec import WeightSpec
from mxquant.formats import get_format
from mxquant.tensor import MXTensor


@dataclass(frozen=True)
class Rows:
    """A tensor that is one of the files under another name, or some of its rows."""

    source: str
    first: int = 0
    last: int | None = None
    """The row after its last one; None: to the end."""


@dataclass(frozen=True)
class ModelLayout:
    """How transformers' class of a model has what a checkpoint holds under other names."""

    config: dict[str, Any]
    """config.json as transformers has it."""
    stored: list[WeightSpec]
    ordinary: dict[str, Rows]


@dataclass(frozen=True)
class Reading:
    """What a producer finds in its files."""

    stored: list[WeightSpec]
    ignored: dict[str, str] = field(default_factory=dict)
    """Tensors that are no part of the weights, with the reason: scales of a KV cache."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Tied names: each with the name that it stands for."""
    layout: Callable[[], ModelLayout] | None = None
    """For files whose names and config are not those of transformers' class; asked for when a model is built."""


class Producer(Protocol):
    """One producer's files."""

    name: str
    by_modules: bool
    """Whether its tools name weights by the modules of transformers' class, experts one by one as gate_proj, up_proj
    and down_proj, and not as the checkpoints of a model's family do.
    """

    def recognizes(self, checkpoint: Checkpoint) -> bool:
        """Whether the files say that they are this producer's."""

    def read(self, checkpoint: Checkpoint) -> Reading:
        """The quantized weights.

        Raises:
            ValueError: the config is damaged.
            NotImplementedError: it asks for what mxquant does not compute.
        """

    def activation_scale_mode(self, activation: str) -> str | None:
        """The scale mode that the producer's files imply for activations of a format."""

    def encode(self, name: str, weight: MXTensor, known: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors that the files hold for a weight, views of its own where they can be.

        Args:
            known: scales that the weights came from, by their names in the files; see `Provenance.scales`.

        Raises:
            NotImplementedError: the files cannot hold it; the message says what would be lost.
        """

    def config(self, weights: Mapping[str, MXTensor], ordinary: Iterable[str]) -> dict[str, dict[str, Any]]:
        """The JSON objects to write, by file: "config.json" stands for its `quantization_config` alone.

        Args:
            ordinary: the modules whose weights are matrices and not quantized.
        """


def modules_of_bytes(checkpoint: Checkpoint) -> list[str]:
    """The modules whose weights are bytes, packed codes or FP8, in the order of the files."""
    return [
        name.removesuffix(".weight")
        for name, info in checkpoint.tensors.items()
        if name.endswith(".weight") and (info.dtype == "U8" or info.dtype.startswith("F8"))
    ]


def kv_cache_scales(checkpoint: Checkpoint, suffixes: tuple[str, ...]) -> dict[str, str]:
    """The tensors that are no part of the weights by their names, as `Reading.ignored`."""
    return {name: "scale of a KV cache" for name in checkpoint.tensors if name.endswith(suffixes)}


def matches(pattern: str, name: str) -> bool:
    """Whether an entry of a list of modules means the module `name`: "re:" and a regular expression from the start of
    the name, a glob, or the name itself.

    Raises:
        ValueError: no regular expression.
    """
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], name) is not None
        except re.error as error:
            raise ValueError(f"{pattern!r} in the checkpoint's config is no regular expression: {error}") from None
    return fnmatch.fnmatchcase(name, pattern)


def module_of(name: str) -> str:
    """The module of a weight's name."""
    return name.removesuffix(".weight")


def refuse(producer: str, name: str, weight: MXTensor, lost: str, remedy: str) -> NoReturn:
    raise NotImplementedError(f"{producer} files cannot hold {name} {weight!r}: {lost} would be lost; {remedy}")


def check_matrix(producer: str, name: str, weight: MXTensor, formats: Iterable[str]) -> None:
    """Refuse a weight that is no matrix of whole blocks in one of `formats`."""
    fmt = get_format(weight.format)
    accepted = ", ".join(formats)
    if weight.format not in formats:
        refuse(producer, name, weight, "its codes", f"quantize it to one of {accepted}, or save as 'mxquant'")
    check_not_rotated(producer, name, weight)
    if not name.endswith(".weight"):
        refuse(producer, name, weight, "a stack of experts", "save as 'mxquant', which holds stacks as they are")
    if weight.dim() != 2:
        refuse(producer, name, weight, f"its shape of {weight.dim()} axes", "save as 'mxquant'")
    assert fmt.block_size is not None
    if weight.axis != -1:
        refuse(producer, name, weight, "its blocks along another axis than the last", "save as 'mxquant'")
    if weight.shape[-1] % fmt.block_size or weight.metadata.block_offset:
        refuse(
            producer, name, weight, f"a partial block of {fmt.block_size}", "leave it unquantized, or save as 'mxquant'"
        )


def check_not_rotated(producer: str, name: str, weight: MXTensor) -> None:
    """Refuse codes of a rotated weight, which stand for other values to whoever does not know of it."""
    if (rotation := weight.metadata.scheme.rotation) is not None:
        lost = f"its rotation in blocks of {rotation}, of activations in front of the matmul too,"
        refuse(producer, name, weight, lost, "quantize with rotation=None, or save as 'mxquant'")


def one_scale(producer: str, name: str, weight: MXTensor, scale: Tensor | None) -> Tensor | None:
    """A per-tensor or static scale as one 0-dim number.

    Raises:
        NotImplementedError: parts of the weight have different ones.
    """
    if scale is None:
        return None
    first = scale.flatten()[0]
    if bool((scale != first).any()):
        refuse(producer, name, weight, "different per-tensor scales of its rows", "save as 'mxquant'")
    return first.clone()


def check_mode(producer: str, name: str, weight: MXTensor, implied: str | None) -> None:
    """Refuse a scale mode of activations that the files have no field for and do not imply."""
    mode = weight.metadata.scheme.activation_scale_mode
    if mode != implied:
        refuse(
            producer,
            name,
            weight,
            f"activation_scale_mode {mode!r} (its readers take {implied!r})",
            f"quantize with activation_scale_mode={implied!r}, or weight-only, or save as 'mxquant'",
        )
