"""`Producer`, the base class of every checkpoint format, and what its subclasses share."""

from __future__ import annotations

import fnmatch
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NoReturn

import torch
from torch import Tensor

from mxquant.checkpoints.files import Checkpoint, Documents
from mxquant.checkpoints.patterns import matches_start
from mxquant.checkpoints.weight_spec import WeightSpec
from mxquant.formats import get_format
from mxquant.scheme import Scheme
from mxquant.tensor import MXTensor


@dataclass(frozen=True)
class Rows:
    """`source[first:last]` of a tensor in the files, which a model has as a tensor of its own."""

    source: str
    first: int = 0
    last: int | None = None


@dataclass(frozen=True)
class ModelLayout:
    """A checkpoint under the names of transformers' class, where the files have others."""

    config: dict[str, Any]
    """config.json as transformers has it."""
    quantized: list[WeightSpec]
    ordinary: dict[str, Rows]


@dataclass(frozen=True)
class Reading:
    """What a producer finds in the headers and configs of its files."""

    quantized: list[WeightSpec]
    aliases: dict[str, str] = field(default_factory=dict)
    """Tied names, each with the name of the tensor that is stored."""
    model_layout: Callable[[Iterable[WeightSpec]], ModelLayout] | None = None
    """Renames the (checked) weights for a transformers model; None: the files have the model's names."""


class Producer(ABC):
    """One producer's checkpoint format.

    All that is particular to it (its name, its file names, its tensors' suffixes) is declared here and occurs in no
    other file. A subclass is registered by its line in `known_producers`.
    """

    name: ClassVar[str]
    sidecars: ClassVar[tuple[str, ...]] = ()
    """JSON files of its own beside config.json. They are read with the headers, and belong to the weights."""
    suffixes: ClassVar[tuple[str, ...]] = ()
    """Name endings of the tensors that make up a quantized weight. Such a tensor without a weight is an error."""
    kv_cache_suffixes: ClassVar[tuple[str, ...]] = ()
    """Name endings of a KV cache's scales, which are ignored."""
    can_write: ClassVar[bool] = True
    """Whether `encode` and `config` are implemented."""
    stores_aliases: ClassVar[bool] = False
    """Whether the files name tied tensors, so that each is stored once."""
    stores_dtype: ClassVar[bool] = False
    """Whether the files name the dtype of each weight. Others leave it to config.json."""
    weight_names: ClassVar[Literal["parameter", "family", "module"]] = "family"
    """How a model's weights are named when they are written.

    "parameter": as the model's parameters, merged experts included. "family": as in checkpoints of the model's family,
    with experts one by one. "module": by transformers' modules, with experts one by one as gate_proj, up_proj and
    down_proj.
    """

    @abstractmethod
    def recognizes(self, checkpoint: Checkpoint) -> bool:
        """Whether configs or headers say that the checkpoint is this producer's."""

    @abstractmethod
    def read(self, checkpoint: Checkpoint) -> Reading:
        """Find the quantized weights. No tensor is read.

        Raises:
            ValueError: the config is damaged.
            NotImplementedError: the config asks for what mxquant does not compute.
        """

    def activation_scale_mode(self, activation: str) -> str | None:
        """The scale mode that readers of the files use for activations in a format; None: none is implied."""
        return None

    def prepare(self, weight: MXTensor) -> MXTensor:
        """Adjust a freshly quantized weight, which nobody relies on yet, so that the files hold it exactly."""
        return weight

    def encode(self, name: str, weight: MXTensor, stored_scales: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The file's tensors for one weight, as views of the weight's own where possible.

        Args:
            stored_scales: scales of the checkpoint that the weight came from, by their names in the files. One that
                still stands for the weight's scale is written again.

        Raises:
            NotImplementedError: the files cannot hold the weight; the message says what would be lost.
        """
        raise NotImplementedError(f"{self.name} checkpoints are read, not written; save as 'mxquant'")

    def config(self, weights: Mapping[str, MXTensor], ordinary: Iterable[str]) -> Documents:
        """The JSON files that describe `weights`; of config.json, its `quantization_config` alone.

        Args:
            ordinary: modules whose weights are unquantized matrices.
        """
        raise NotImplementedError(f"{self.name} checkpoints are read, not written; save as 'mxquant'")

    def header(self, weights: Mapping[str, MXTensor], aliases: Mapping[str, str]) -> dict[str, str]:
        """String metadata for the header of the file that holds `weights` and the targets of `aliases`."""
        return {}

    def refuse(self, name: str, weight: MXTensor, lost: str, remedy: str | None = None) -> NoReturn:
        """Raise NotImplementedError: the files cannot hold `weight` without losing what `lost` says."""
        remedy = "save as 'mxquant'" if remedy is None else f"{remedy}, or save as 'mxquant'"
        raise NotImplementedError(f"{self.name} files cannot hold {name} {weight!r}: {lost} would be lost; {remedy}")

    def check_matrix(self, name: str, weight: MXTensor, formats: Iterable[str]) -> None:
        """Refuse a weight that is not a matrix of whole blocks in one of `formats`."""
        fmt = get_format(weight.format)
        if weight.format not in formats:
            self.refuse(name, weight, "its codes", f"quantize it to one of {', '.join(formats)}")
        self.check_not_rotated(name, weight)
        if not name.endswith(".weight"):
            self.refuse(name, weight, "a stack of experts")
        if weight.dim() != 2:
            self.refuse(name, weight, f"its shape of {weight.dim()} axes")
        assert fmt.block_size is not None
        if weight.axis != -1:
            self.refuse(name, weight, "its blocks along another axis than the last")
        if weight.shape[-1] % fmt.block_size or weight.metadata.block_offset:
            self.refuse(name, weight, f"a partial block of {fmt.block_size}", "leave it unquantized")

    def check_not_rotated(self, name: str, weight: MXTensor) -> None:
        """Refuse a rotated weight, whose codes stand for other values to a reader that does not rotate activations."""
        if (rotation := weight.metadata.scheme.rotation) is not None:
            lost = f"its rotation in blocks of {rotation}, of activations in front of the matmul too,"
            self.refuse(name, weight, lost, "quantize with rotation=None")

    def check_activation_scale_mode(self, name: str, weight: MXTensor) -> None:
        """Refuse an activation scale mode other than the one that the files imply and have no field for."""
        mode, activation = weight.metadata.scheme.activation_scale_mode, weight.activation
        implied = None if activation is None else self.activation_scale_mode(activation)
        if mode != implied:
            lost = f"activation_scale_mode {mode!r} (its readers take {implied!r})"
            self.refuse(name, weight, lost, f"quantize with activation_scale_mode={implied!r}, or weight-only")

    def one_scale(self, name: str, weight: MXTensor, scale: Tensor | None) -> Tensor | None:
        """A per-tensor or static scale as a 0-dim tensor. Different scales of parts of the weight are refused."""
        if scale is None:
            return None
        first = scale.flatten()[0]
        if bool((scale != first).any()):
            self.refuse(name, weight, "different per-tensor scales of its rows")
        return first.clone()

    def encode_linear(self, name: str, weight: MXTensor, activation_scale: str | None) -> dict[str, Tensor]:
        """The tensors of `linear_spec`."""
        module, canonical = module_of(name), weight.canonical()
        qdata, scale = codes_and_scales(canonical)
        tensors = {name: qdata, f"{module}.weight_scale": scale}
        multiplier = self.one_scale(name, weight, canonical.per_tensor_scale)
        if multiplier is not None:
            tensors[f"{module}.weight_scale_2"] = multiplier
        static = self.one_scale(name, weight, canonical.activation_scale)
        if static is not None:
            tensors[f"{module}.{activation_scale}"] = static
        return tensors


def modules_of_bytes(checkpoint: Checkpoint) -> list[str]:
    """Modules whose `weight` holds packed codes or FP8, in the order of the files."""
    return [
        name.removesuffix(".weight")
        for name, info in checkpoint.tensors.items()
        if name.endswith(".weight") and (info.dtype == "U8" or info.dtype.startswith("F8"))
    ]


def codes_and_scales(weight: MXTensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of a canonical weight: E4M3 where they are FP8, else uint8."""
    qdata = weight.qdata.view(torch.float8_e4m3fn) if weight.format == "mxfp8_e4m3" else weight.qdata
    return qdata, weight.scale.view(torch.float8_e4m3fn) if weight.format == "nvfp4" else weight.scale


def linear_spec(module: str, scheme: Scheme, activation_scale: str | None) -> WeightSpec:
    """A linear layer's `weight`, `weight_scale`, for NVFP4 `weight_scale_2`, and `activation_scale` if it is static."""
    return WeightSpec(
        name=f"{module}.weight",
        scheme=scheme,
        qdata=f"{module}.weight",
        scale=f"{module}.weight_scale",
        per_tensor_scale=f"{module}.weight_scale_2" if scheme.weight == "nvfp4" else None,
        activation_scale=f"{module}.{activation_scale}" if scheme.static_activation_scale else None,
    )


def matches(pattern: str, name: str) -> bool:
    """Whether an entry of a config's module list names the module `name`.

    An entry is the name itself, a glob, or "re:" and a regular expression that is matched from the start.

    Raises:
        ValueError: an invalid regular expression, or one that would take too long.
    """
    if pattern.startswith("re:"):
        return matches_start(pattern[3:], name)
    return fnmatch.fnmatchcase(name, pattern)


def module_of(name: str) -> str:
    """The name of the module that a weight belongs to."""
    return name.removesuffix(".weight")
