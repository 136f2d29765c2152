"""Reading checkpoints: `read_content` checks the headers, `load_state` reads the tensors."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mxquant.checkpoints.files import CONFIG, Checkpoint, Reader, TensorInfo, open_checkpoint
from mxquant.checkpoints.known_producers import recognize, sidecar_files, weight_suffixes
from mxquant.checkpoints.producer import ModelLayout, Producer, Reading, Rows
from mxquant.checkpoints.weight_spec import WeightSpec, build, checked
from mxquant.tensor.metadata import logical_shape

_logger = logging.getLogger("mxquant")
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
_ONLY_QUANTIZED = ("F4", "F8_E8M0")
"""Dtypes that codes and scales alone have, as safetensors spells them."""


@dataclass(frozen=True)
class Content:
    """The tensors of a checkpoint, checked against the headers. Each is read when it is asked for."""

    checkpoint: Checkpoint
    producer: Producer | None
    """None: the checkpoint is not quantized."""
    quantized: dict[str, WeightSpec]
    ordinary: list[str]
    """The unquantized tensors."""
    ignored: dict[str, str]
    """A KV cache's scales, each with the reason."""
    aliases: dict[str, str]
    """As `Reading.aliases`."""
    dtype: torch.dtype
    """Of the values that quantized weights stand for, unless the file declares it for a weight."""
    model_layout: Callable[[Iterable[WeightSpec]], ModelLayout] | None = None
    """As `Reading.model_layout`."""
    rows: dict[str, Rows] = field(default_factory=dict)
    """Where `as_in_transformers` renamed unquantized tensors: where in the files each is."""

    def as_in_transformers(self) -> Content:
        """The same tensors under the names, and with the config, of transformers' class of the model.

        Raises:
            ValueError: the config is damaged.
            NotImplementedError: the config is of an unknown model.
        """
        if self.model_layout is None:
            return self
        try:
            layout = self.model_layout(self.quantized.values())
        except (TypeError, LookupError) as error:
            raise ValueError(f"config.json of {self.checkpoint.path} is damaged ({error!r}); get it anew") from error
        return replace(
            self,
            checkpoint=replace(self.checkpoint, config=layout.config),
            quantized={spec.name: spec for spec in layout.quantized},
            ordinary=list(layout.ordinary),
            rows=layout.ordinary,
            model_layout=None,
        )

    @property
    def names(self) -> list[str]:
        """Every tensor, without aliases."""
        return [*self.quantized, *self.ordinary]

    def read(self, name: str, reader: Reader) -> Tensor:
        """Read one tensor, as an MXTensor if it is quantized."""
        spec = self.quantized.get(name)
        if spec is None:
            rows = self.rows.get(name)
            return reader.read(name) if rows is None else reader.read(rows.source)[rows.first : rows.last]
        return build(spec, self.dtype, reader.read)

    def read_alone(self, name: str) -> Tensor:
        """Read one tensor. Its file is unmapped with it."""
        return self.read(name, Reader(self.checkpoint))

    def shape(self, name: str) -> tuple[int, ...]:
        """The logical shape, from the headers."""
        spec = self.quantized.get(name)
        return self._info(name).shape if spec is None else logical_shape(spec.physical_shape, spec.axis)

    def nbytes(self, name: str) -> int:
        """Bytes in the files."""
        spec, tensors = self.quantized.get(name), self.checkpoint.tensors
        infos = [self._info(name)] if spec is None else [tensors[part] for part in spec.tensor_names]
        return sum(map(_nbytes, infos))

    def _info(self, name: str) -> TensorInfo:
        """The header of an unquantized tensor."""
        rows = self.rows.get(name, Rows(name))
        info = self.checkpoint.tensors[rows.source]
        if not info.shape:
            return info
        count = len(range(*slice(rows.first, rows.last).indices(info.shape[0])))
        return replace(info, shape=(count, *info.shape[1:]))


def read_content(path: str | os.PathLike[str]) -> Content:
    """Recognize a checkpoint's producer and check every tensor by the headers. No tensor is read.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: damaged, missing or superfluous tensors; see `open_checkpoint`. Or tensors are quantized, and no
            config or header says how.
        NotImplementedError: an unknown producer, or a scheme that mxquant does not compute.
    """
    checkpoint = open_checkpoint(path, sidecar_files())
    producer, reading = _read_configs(checkpoint)
    quantized: dict[str, WeightSpec] = {}
    used: dict[str, str] = {}
    for spec in reading.quantized:
        if spec.name in quantized:
            raise ValueError(f"{spec.name!r} is stored twice, as {quantized[spec.name].qdata!r} and {spec.qdata!r}")
        quantized[spec.name] = checked(spec, checkpoint.tensors)
        for name in spec.tensor_names:
            if name in used:
                raise ValueError(f"{name!r} belongs both to {used[name]!r} and to {spec.name!r}")
            used[name] = spec.name
    suffixes = () if producer is None else producer.kv_cache_suffixes
    ignored = {name: "scale of a KV cache" for name in checkpoint.tensors if name.endswith(suffixes)}
    ordinary = [name for name in checkpoint.tensors if name not in used and name not in ignored]
    _check_ordinary(ordinary, quantized, checkpoint, producer)
    names = {*quantized, *ordinary}
    for name, first in reading.aliases.items():
        if name in names or first not in names:
            raise ValueError(f"the metadata says that {name!r} stands for {first!r}; the tensors say otherwise")
    if ignored:
        name, reason = next(iter(ignored.items()))
        _logger.warning("%d tensors of %s are ignored: %s (%s)", len(ignored), checkpoint.path, reason, name)
    dtype, aliases = dtype_named_by(checkpoint.config) or torch.bfloat16, reading.aliases
    return Content(checkpoint, producer, quantized, ordinary, ignored, aliases, dtype, reading.model_layout)


def _read_configs(checkpoint: Checkpoint) -> tuple[Producer | None, Reading]:
    """NOTE: configs are untrusted. A value of a wrong type, which the producer's code trips over, is damage."""
    try:
        producer = recognize(checkpoint)
        return producer, Reading([]) if producer is None else producer.read(checkpoint)
    except (TypeError, AttributeError, LookupError) as error:
        raise ValueError(
            f"the quantization config of {checkpoint.path} is damaged ({type(error).__name__}: {error}); get it anew"
        ) from error


def load_state(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Load the tensors of a checkpoint, quantized ones as MXTensors, without building a model.

    The files say which producer wrote them; docs/checkpoints.md lists those that are read. Unquantized checkpoints are
    read as well. Nothing is dequantized or requantized. Tensors are views of memory-mapped files wherever the file
    arranges the bytes as MXTensor does, so the files must not change while the tensors live.

    Args:
        path: a folder, or one safetensors file.

    Returns:
        the tensors by their names in the checkpoint; tied names share one tensor.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: damaged, missing or superfluous tensors; or they are quantized, and config.json is missing.
        NotImplementedError: an unknown producer, or a scheme that mxquant does not compute.
    """
    content = read_content(path)
    reader = Reader(content.checkpoint)
    state = {name: content.read(name, reader) for name in content.names}
    return state | {name: state[first] for name, first in content.aliases.items()}


def _check_ordinary(
    ordinary: Iterable[str], quantized: Mapping[str, WeightSpec], checkpoint: Checkpoint, producer: Producer | None
) -> None:
    """Refuse codes and scales among the unquantized tensors, which they would be taken for."""
    suffixes = weight_suffixes()
    for name in ordinary:
        if name in quantized:
            raise ValueError(f"{name!r} is there both as it is and as {quantized[name].qdata!r}; one of them must go")
        is_part, dtype = name.endswith(suffixes), checkpoint.tensors[name].dtype
        if producer is not None and is_part:
            raise ValueError(
                f"{name!r} belongs to no quantized weight of a checkpoint of {producer.name}: its codes are missing"
            )
        holds_bytes = dtype == "U8" or dtype.startswith(("F8", "F4"))
        if not holds_bytes or not (is_part or name.endswith("weight") or dtype in _ONLY_QUANTIZED):
            continue
        if producer is not None:
            raise ValueError(f"{name!r} is {dtype} in a checkpoint of {producer.name}, but no scales say what it means")
        configs = " or ".join((CONFIG, *sidecar_files()))
        raise ValueError(
            f"{name!r} is {dtype}, part of a quantized weight, but no {configs} of {checkpoint.path} and no header "
            "says how it is quantized; put the checkpoint's own beside the weights and give the folder"
        )


def dtype_named_by(config: Mapping[str, Any]) -> torch.dtype | None:
    """The model's dtype by a config.json or its `text_config`; None if they name none."""
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, Mapping) else {}):
        for key in ("dtype", "torch_dtype"):
            name = part.get(key)
            if isinstance(name, str) and name.removeprefix("torch.") in _DTYPES:
                return _DTYPES[name.removeprefix("torch.")]
    return None


def _nbytes(info: TensorInfo) -> int:
    bits = {"BOOL": 8, "F4": 4}.get(info.dtype) or int("".join(filter(str.isdigit, info.dtype.partition("_")[0])))
    return math.prod(info.shape) * bits // 8
