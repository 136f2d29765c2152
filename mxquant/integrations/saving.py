"""`save_pretrained`: a quantized transformers model as the checkpoint of any producer that mxquant writes."""

from __future__ import annotations

import functools
import json
import os
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mxquant.checkpoints.encode import encode_state
from mxquant.checkpoints.files import CONFIG
from mxquant.checkpoints.known_producers import get_writer
from mxquant.checkpoints.native import Native
from mxquant.checkpoints.provenance import PROVENANCE
from mxquant.checkpoints.save import without_quantization
from mxquant.checkpoints.write import MAX_SHARD_BYTES, replacing, write_encoded
from mxquant.integrations.device_map import whole_state
from mxquant.integrations.extra import needing_transformers
from mxquant.tensor.state import tied_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def save_pretrained(
    model: PreTrainedModel,
    path: str | os.PathLike[str],
    producer: str = "mxquant",
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a quantized model as a checkpoint that the producer's own tools load.

    Codes and scales are copied, never requantized. A model that `from_pretrained` loaded from the same producer gives
    the same bytes, tensor by tensor, and the same config. Everything is validated first, and the folder appears when it
    is complete: a save that fails or is interrupted leaves what was there before.

    Args:
        model: a transformers model with weights that `quantize_`, `MXQuantConfig` or `from_pretrained` quantized.
        path: the folder. An existing one is replaced, except for files that are not weights.
        producer: whose files to write: a name in `mxquant.checkpoints.PRODUCERS`.
        max_shard_bytes: the most bytes of tensors in a file.

    Raises:
        ValueError: an unknown producer, or nothing in the model is quantized.
        TypeError: not a transformers model.
        NotImplementedError: the producer's files are only read, or cannot hold a weight; the message says what would be
            lost.
        ImportError: transformers is not installed.
    """
    with needing_transformers():
        from tqdm.auto import tqdm
        from transformers import PreTrainedModel

        from mxquant.integrations.conversion import as_loaded, split_experts
        from mxquant.integrations.quantizer import MXQuantConfig

    target = get_writer(producer)
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"save_pretrained takes a transformers model; got {type(model).__name__}. For another module, call "
            "save_state with its state_dict()"
        )
    state, tied = _untied(model)
    provenance = vars(model).get(PROVENANCE)
    if target.weight_names != "parameter" and provenance is not None and provenance.producer == producer:
        state = as_loaded(model, state)
    else:
        state = split_experts(model, state, target.weight_names)
    encoded = encode_state(state, target, provenance, {name: first for name, first in tied.items() if first in state})
    if isinstance(target, Native):
        config = getattr(model.config, "quantization_config", None)
        encoded.documents[CONFIG] = (config if isinstance(config, MXQuantConfig) else MXQuantConfig()).to_dict()
    model_config = without_quantization(json.loads(model.config.to_json_string()))
    model_config |= {"architectures": [type(model).__name__], "dtype": str(model.dtype).removeprefix("torch.")}
    progress = functools.partial(tqdm, desc="writing", unit="tensor", delay=1, leave=False)
    with replacing(path) as folder:
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        write_encoded(folder, encoded, model_config, max_shard_bytes, progress=progress)


def _untied(model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The state dict without tied names, and those names, each with the name of the tensor that is kept.

    Only names that transformers ties when it loads the model are left out.
    """
    state = whole_state(model)
    known = dict(getattr(model, "all_tied_weights_keys", None) or {})
    firsts = {name: name for name in state} | tied_names(state)
    tied = {name: first for name, first in known.items() if name in state and firsts[name] == firsts.get(first)}
    return {name: tensor for name, tensor in state.items() if name not in tied}, tied
