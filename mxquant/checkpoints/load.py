"""From files to tensors, one at a time, by whichever producer the files are of."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mxquant.checkpoints.files import Checkpoint, Reader, TensorInfo, open_checkpoint
from mxquant.checkpoints.known_producers import producer_of
from mxquant.checkpoints.producer import ModelLayout, Producer, Reading, Rows
from mxquant.checkpoints.weight_spec import WeightSpec, build, check_stored
from mxquant.tensor import MXTensor
from mxquant.tensor.metadata import logical_shape

_logger = logging.getLogger("mxquant")
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
_PART_SUFFIXES = (
    *(".weight_packed", ".weight_scale", ".weight_scale_2", ".weight_global_scale", ".input_global_scale"),
    ".input_scale",
    *("_blocks", ".blocks", "_scales", ".scales", "_weight_qdata", "_weight_scale"),
)


@dataclass(frozen=True)
class Content:
    """The tensors of a checkpoint by their own names, checked against the headers; none of them is read yet."""

    checkpoint: Checkpoint
    producer: Producer | None
    quantized: dict[str, WeightSpec]
    ordinary: list[str]
    """The tensors that are not quantized."""
    ignored: dict[str, str]
    aliases: dict[str, str]
    dtype: torch.dtype
    """What quantized weights stand for, where the files do not say it of each."""
    layout: Callable[[], ModelLayout] | None = None
    """`Reading.layout`."""
    rows: dict[str, Rows] = field(default_factory=dict)
    """Of tensors that are not quantized, what they are in the files where their names are others."""

    def as_in_transformers(self) -> Content:
        """The same by the names, and with the config, of transformers' class of the model.

        Raises:
            ValueError, NotImplementedError: the config is damaged, or of a model that is not known.
        """
        if self.layout is None:
            return self
        try:
            layout = self.layout()
        except (TypeError, LookupError) as error:
            raise ValueError(f"config.json of {self.checkpoint.path} is damaged ({error!r}); get it anew") from error
        return replace(
            self,
            checkpoint=replace(self.checkpoint, config=layout.config),
            quantized={stored.name: stored for stored in layout.stored},
            ordinary=list(layout.ordinary),
            rows=layout.ordinary,
        )

    @property
    def names(self) -> list[str]:
        """Every tensor but tied names."""
        return [*self.quantized, *self.ordinary]

    def read(self, name: str, reader: Reader) -> Tensor:
        """One tensor: an MXTensor where it is quantized."""
        stored = self.quantized.get(name)
        if stored is None:
            rows = self.rows.get(name)
            return reader.read(name) if rows is None else reader.read(rows.source)[rows.first : rows.last]
        return self.read_quantized(stored, reader.read)

    def read_alone(self, name: str) -> Tensor:
        """One tensor by a reader of its own: its file is unmapped with the tensor."""
        return self.read(name, Reader(self.checkpoint))

    def read_quantized(self, stored: WeightSpec, read: Callable[[str], Tensor]) -> MXTensor:
        return build(stored, self.checkpoint.tensors, self.dtype, read)

    def shape(self, name: str) -> tuple[int, ...]:
        """The logical shape, from the headers."""
        stored = self.quantized.get(name)
        if stored is None:
            return self._info(name).shape
        if stored.declared is not None:
            return stored.declared[1]
        return logical_shape(check_stored(stored, self.checkpoint.tensors), stored.axis)

    def nbytes(self, name: str) -> int:
        """Bytes in the files."""
        stored = self.quantized.get(name)
        parts = [self._info(name)] if stored is None else [self.checkpoint.tensors[part] for part in stored.parts]
        return sum(map(_nbytes, parts))

    def _info(self, name: str) -> TensorInfo:
        """What the header says of a tensor that is not quantized."""
        if name not in self.rows:
            return self.checkpoint.tensors[name]
        rows = self.rows[name]
        info = self.checkpoint.tensors[rows.source]
        if not info.shape:
            return info
        count = len(range(*slice(rows.first, rows.last).indices(info.shape[0])))
        return replace(info, shape=(count, *info.shape[1:]))


def read_content(path: str | os.PathLike[str]) -> Content:
    """Recognize the producer of a checkpoint and check all of it against the headers. No tensor is read.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: damaged, missing or superfluous tensors; see `open_checkpoint`.
        NotImplementedError: an unknown producer, or a scheme that mxquant does not compute.
    """
    checkpoint = open_checkpoint(path)
    producer, reading = _read_configs(checkpoint)
    quantized: dict[str, WeightSpec] = {}
    used: dict[str, str] = {}
    for stored in reading.stored:
        check_stored(stored, checkpoint.tensors)
        if stored.name in quantized:
            raise ValueError(
                f"{stored.name!r} is stored twice, as {quantized[stored.name].qdata!r} and {stored.qdata!r}"
            )
        quantized[stored.name] = stored
        for part in stored.parts:
            if part in used:
                raise ValueError(f"{part!r} belongs both to {used[part]!r} and to {stored.name!r}")
            used[part] = stored.name
    ordinary = [name for name in checkpoint.tensors if name not in used and name not in reading.ignored]
    _check_ordinary(ordinary, quantized, checkpoint, producer)
    _check_aliases(reading.aliases, {*quantized, *ordinary})
    if reading.ignored:
        _logger.warning(
            "%d tensors of %s are left out: %s (%s)",
            len(reading.ignored),
            checkpoint.path,
            next(iter(reading.ignored.values())),
            next(iter(reading.ignored)),
        )
    dtype = _model_dtype(checkpoint)
    ignored, aliases = dict(reading.ignored), reading.aliases
    return Content(checkpoint, producer, quantized, ordinary, ignored, aliases, dtype, reading.layout)


def _read_configs(checkpoint: Checkpoint) -> tuple[Producer | None, Reading]:
    """Whose files they are, and which tensors are quantized. A config comes from anybody: a value of a wrong type is
    an error of its own there, not of the code that expects another.
    """
    try:
        producer = producer_of(checkpoint)
        return producer, Reading([]) if producer is None else producer.read(checkpoint)
    except (TypeError, AttributeError, LookupError) as error:
        raise ValueError(
            f"the quantization config of {checkpoint.path} is damaged ({type(error).__name__}: {error}); get it anew"
        ) from error


def load_state(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of a checkpoint, quantized ones as MXTensors, without building a model.

    Read are mxquant's own files, compressed-tensors, AMD Quark, ModelOpt, gpt-oss and torchao's safetensors, and
    checkpoints that are not quantized; which it is, the files say. Nothing is dequantized or requantized. Tensors are
    views of memory-mapped files wherever their bytes lie as they should: they are read when they are used, and the
    files must stay as they are meanwhile. Names are those of the checkpoint.

    Args:
        path: a folder, or one safetensors file.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: damaged, missing or superfluous tensors.
        NotImplementedError: an unknown producer, or a scheme that mxquant does not compute.
    """
    content = read_content(path)
    reader = Reader(content.checkpoint)
    state = {name: content.read(name, reader) for name in content.names}
    return state | {name: state[first] for name, first in content.aliases.items()}


def _check_ordinary(
    ordinary: Iterable[str], quantized: Mapping[str, WeightSpec], checkpoint: Checkpoint, producer: Producer | None
) -> None:
    who = "an unquantized checkpoint" if producer is None else f"a checkpoint of {producer.name}"
    for name in ordinary:
        if name in quantized:
            raise ValueError(f"{name!r} is there both as it is and as {quantized[name].qdata!r}; one of them must go")
        info = checkpoint.tensors[name]
        if producer is not None and name.endswith(_PART_SUFFIXES):
            raise ValueError(f"{name!r} belongs to no quantized weight of {who}: its codes are missing")
        if name.endswith("weight") and (info.dtype == "U8" or info.dtype.startswith(("F8", "F4"))):
            raise ValueError(f"{name!r} is {info.dtype} in {who}, but no scales say what its codes mean")


def _check_aliases(aliases: Mapping[str, str], names: set[str]) -> None:
    for name, first in aliases.items():
        if name in names or first not in names:
            raise ValueError(f"the metadata says that {name!r} stands for {first!r}; the tensors say otherwise")


def _model_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The dtype of the model, as its config has it; bf16 where it says nothing."""
    for holder in _configs(checkpoint):
        for key in ("dtype", "torch_dtype"):
            name = holder.get(key)
            if isinstance(name, str) and name.removeprefix("torch.") in _DTYPES:
                return _DTYPES[name.removeprefix("torch.")]
    return torch.bfloat16


def _configs(checkpoint: Checkpoint) -> Iterator[dict[str, object]]:
    yield checkpoint.config
    if isinstance(inner := checkpoint.config.get("text_config"), dict):
        yield inner


def _nbytes(info: TensorInfo) -> int:
    bits = {"BOOL": 8, "F4": 4}.get(info.dtype) or int("".join(filter(str.isdigit, info.dtype.partition("_")[0])))
    count = 1
    for size in info.shape:
        count *= size
    return count * bits // 8
