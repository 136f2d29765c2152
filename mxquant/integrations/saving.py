"""`save_pretrained`: a quantized transformers model as the checkpoint of any producer that mxquant writes."""

from __future__ import annotations

import contextlib
import copy
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mxquant.checkpoints.encode import Encoded, encode
from mxquant.checkpoints.files import json_of
from mxquant.checkpoints.known_producers import get_producer
from mxquant.checkpoints.producer import Producer
from mxquant.checkpoints.provenance import PROVENANCE
from mxquant.checkpoints.write import MAX_SHARD_BYTES, ShardWriter, described, replacing
from mxquant.integrations.device_map import whole_state
from mxquant.integrations.extra import needing_transformers
from mxquant.tensor import MXTensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def save_pretrained(
    model: PreTrainedModel,
    path: str | os.PathLike[str],
    producer: str = "mxquant",
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a quantized model so that the producer's own tools load it.

    Codes and scales are written as they are. A model that `from_pretrained` loaded from the same producer gives the
    same bytes, tensor by tensor, and the same config. All is validated before anything is written, and the folder
    appears when it is complete: an interrupted save leaves what was there before.

    Args:
        model: a transformers model with weights that `quantize_`, `MXQuantConfig` or `from_pretrained` quantized.
        path: the folder; one that is there is replaced, but for files that are no weights.
        producer: "mxquant", "compressed-tensors", "quark", "modelopt" or "gpt-oss".
        max_shard_bytes: the most that one file holds.

    Raises:
        ValueError: an unknown producer, or nothing in the model is quantized.
        TypeError: no transformers model.
        NotImplementedError: the producer's files cannot hold a weight; the message says what would be lost.
        ImportError: transformers is not installed.
    """
    with needing_transformers():
        from transformers import PreTrainedModel

    target = get_producer(producer)
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"save_pretrained takes a transformers model; got {type(model).__name__}. For another module, save what "
            "flatten_state_dict makes of its state_dict"
        )
    own = target.name == "mxquant"
    state, tied = _untied(model)
    origin = vars(model).get(PROVENANCE)
    came_from_there = origin is not None and origin.producer == producer
    names = state if own else _names_in_files(model, state, target, came_from_there)
    encoded = encode(names, target, origin, {name: first for name, first in tied.items() if first in names})
    if own:
        encoded.documents["config.json"] = _own_config(model)
    with replacing(path) as folder:
        _write(model, names, encoded, folder, own, max_shard_bytes)


def _write(
    model: Any, state: dict[str, Tensor], encoded: Encoded, folder: Path, own: bool, max_shard_bytes: int
) -> None:
    from tqdm.auto import tqdm

    writer = ShardWriter(folder, max_shard_bytes)
    for name, tensors in tqdm(encoded.tensors.items(), desc="writing", unit="tensor", delay=1, leave=False):
        weight = state.get(name)
        writer.add(tensors, described(name, weight) if own and isinstance(weight, MXTensor) else None)
    documents = dict(encoded.documents)
    quantization = documents.pop("config.json")
    documents["config.json"] = _model_config(model, folder) | {"quantization_config": quantization}
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    writer.finish(documents)


def _names_in_files(
    model: Any, state: dict[str, Tensor], producer: Producer, came_from_there: bool
) -> dict[str, Tensor]:
    """Merged experts taken apart, by the names that the model's own checkpoint of that producer had, else by those that
    its tools look for.
    """
    from mxquant.integrations import conversion

    if came_from_there:
        return conversion.as_loaded(model, state)
    return conversion.by_modules(model, state) if producer.by_modules else conversion.by_family(model, state)


def _untied(model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The state dict without the names that tied weights have beside their first, and these, each with its first."""
    state = whole_state(model)
    known = dict(getattr(model, "all_tied_weights_keys", None) or {})
    tied = {
        name: first
        for name, first in known.items()
        if name in state and first in state and _place(state[name]) == _place(state[first])
    }
    return {name: tensor for name, tensor in state.items() if name not in tied}, tied


def _place(tensor: Tensor) -> tuple[Any, ...]:
    inner = tensor.qdata if isinstance(tensor, MXTensor) else tensor
    return type(tensor), inner.device, inner.data_ptr(), tuple(tensor.shape)


def _own_config(model: Any) -> dict[str, Any]:
    from mxquant.integrations.quantizer import MXQuantConfig

    config = getattr(model.config, "quantization_config", None)
    return (config if isinstance(config, MXQuantConfig) else MXQuantConfig()).to_dict()


def _model_config(model: Any, folder: Path) -> dict[str, Any]:
    """What transformers would write of the model's config, without its quantization."""
    config = copy.deepcopy(model.config)
    for holder in (config, config.get_text_config()):
        with contextlib.suppress(AttributeError):
            del holder.quantization_config
    config.architectures = [type(model).__name__]
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    return json_of(folder / "config.json") or {}
