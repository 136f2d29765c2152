"""Quantize a checkpoint from disk to disk, one parameter at a time, for models that do not fit into memory.

The model on the meta device tells which tensors are weights of linear layers and experts. Memory holds one parameter
and the shard that is being written.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mxquant.checkpoints.files import CONFIG
from mxquant.checkpoints.known_producers import get_writer
from mxquant.checkpoints.load import read_content
from mxquant.checkpoints.native import Native
from mxquant.checkpoints.producer import Producer, module_of
from mxquant.checkpoints.write import MAX_SHARD_BYTES, ShardWriter, replacing
from mxquant.integrations.extra import needing_transformers
from mxquant.modules.quantize_target import Target, stand_in_for
from mxquant.tensor import MXTensor

if TYPE_CHECKING:
    from mxquant.integrations.parameters import Parameters


@dataclass(frozen=True)
class Quantized:
    """What was done to a checkpoint."""

    weights: int
    """Quantized weights in the files that were written."""
    skipped: dict[str, str]
    """Unquantized parameters of two or more dimensions, each with the reason."""
    nbytes_before: int
    nbytes: int


def quantize_checkpoint(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    config: object,
    *,
    producer: str = "mxquant",
    max_shard_bytes: int | None = None,
    progress: Callable[[Iterable[str]], Iterable[str]] = iter,
) -> Quantized:
    """Quantize an unquantized transformers checkpoint into another folder.

    The bytes are those of `MXQuantConfig(config)` on the loaded model, adjusted by the producer where its files could
    not hold them exactly (`Producer.prepare`). The folder appears when it is complete, with copies of the files beside
    the weights, such as the tokenizer and the generation config.

    Args:
        config: as for `quantize_`.
        producer: whose files to write; see `save_pretrained`.
        max_shard_bytes: the most bytes of tensors in a file; None: half of the source's largest file, which bounds the
            memory that waits to be written.
        progress: wraps the names of parameters that are gone through, as tqdm does.

    Raises:
        FileNotFoundError: there is no checkpoint or no config.json.
        ValueError: the checkpoint is quantized already or damaged, the config does not fit or needs calibration, or the
            destination is the source.
        NotImplementedError: the producer's files cannot hold what the config asks for. Nothing has been read then.
        ImportError: transformers is not installed.
    """
    with needing_transformers():
        from mxquant.integrations.parameters import parameters_of
        from mxquant.integrations.quantizer import MXQuantConfig, select_for_loading

    target = get_writer(producer)
    content = read_content(source)
    if content.producer is not None:
        raise ValueError(
            f"{source} is quantized already, by {content.producer.name}; name the checkpoint it was made of"
        )
    if Path(source).resolve() == Path(destination).resolve():
        raise ValueError(f"{destination} is the source; name another folder")
    parameters = parameters_of(content)
    options = MXQuantConfig(config)
    selection = select_for_loading(parameters.model, options)
    targets = {site.name: wanted for wanted in selection.targets for site in wanted.sites}
    task = _Task(parameters, targets, target)
    limit = max_shard_bytes or max(1, min(MAX_SHARD_BYTES, max(content.checkpoint.file_sizes) // 2))
    with replacing(destination) as folder:
        writer = ShardWriter(folder, target, limit)
        for name in progress(parameters.names):
            task.write(name, writer)
        _finish(task, writer, folder, options.to_dict())
    skipped = {skip.name: skip.reason for skip in selection.skips if skip.parameter.dim() >= 2}
    return Quantized(len(task.weights), skipped, sum(content.checkpoint.file_sizes), writer.nbytes)


class _Task:
    """The quantization of one checkpoint. What the producer's files cannot hold is refused before anything is read."""

    def __init__(self, parameters: Parameters, targets: Mapping[str, Target], producer: Producer) -> None:
        self.parameters, self.targets, self.producer = parameters, targets, producer
        self.weights: dict[str, MXTensor] = {}
        """A stand-in for each quantized weight, by its name in the files that are written."""
        self.ordinary: list[str] = []
        """Modules whose weights are unquantized matrices."""
        for name in parameters.names:
            if name in targets:
                self.weights |= self._named(name, stand_in_for(targets[name], parameters.content.dtype))
        for file_name, weight in self.weights.items():
            producer.encode(file_name, weight, {})

    def write(self, name: str, writer: ShardWriter) -> None:
        """Read, merge, quantize and write one parameter."""
        from mxquant.integrations.quantizer import quantize_loaded

        value = self.parameters.read_alone(name)
        if name not in self.targets:
            for file_name, tensor in self._named(name, value).items():
                if tensor.dim() == 2 and file_name.endswith(".weight"):
                    self.ordinary.append(module_of(file_name))
                writer.add({file_name: tensor.clone()})
            return
        weight = quantize_loaded(self.targets[name], value.to(self.parameters.content.dtype)).detach()
        assert isinstance(weight, MXTensor)
        for file_name, part in self._named(name, weight.canonical()).items():
            part = self.producer.prepare(part)
            writer.add(self.producer.encode(file_name, part, {}), {file_name: part})

    def all_ordinary(self) -> list[str]:
        """Modules whose weights are unquantized matrices, tied ones included."""
        tied = dict(getattr(self.parameters.model, "all_tied_weights_keys", None) or {})
        sources, targets = self.parameters.sources, self.targets
        absent = [module_of(name) for name, first in tied.items() if name not in sources and first not in targets]
        return [*self.ordinary, *absent]

    def _named(self, name: str, value: Tensor) -> dict[str, Any]:
        """A parameter under its names in the files that are written, with experts split where the files split them."""
        from mxquant.integrations.conversion import split_experts

        source, names = self.parameters.sources[name], self.producer.weight_names
        if names == "family" and source.converter is None:
            return {source.names[0]: value}
        return split_experts(self.parameters.model, {name: value}, names)


def _finish(task: _Task, writer: ShardWriter, folder: Path, options: dict[str, Any]) -> None:
    checkpoint = task.parameters.content.checkpoint
    for file in checkpoint.path.iterdir():
        is_weights = file.name.endswith((".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf"))
        if file.is_file() and not is_weights and file.name != CONFIG:
            shutil.copyfile(file, folder / file.name)
    is_native = isinstance(task.producer, Native)
    documents = {CONFIG: options} if is_native else task.producer.config(task.weights, task.all_ordinary())
    writer.finish(documents, checkpoint.config)
