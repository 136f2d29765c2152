"""`save_state`: a dict of tensors as the checkpoint of any producer that mxquant writes, without transformers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mxquant.checkpoints.encode import encode_state
from mxquant.checkpoints.files import CONFIG, json_of
from mxquant.checkpoints.known_producers import get_writer
from mxquant.checkpoints.load import dtype_named_by, read_content
from mxquant.checkpoints.provenance import Provenance
from mxquant.checkpoints.write import MAX_SHARD_BYTES, replacing, write_encoded
from mxquant.tensor import MXTensor
from mxquant.tensor.state import tied_names


def save_state(
    state: Mapping[str, Tensor],
    path: str | os.PathLike[str],
    producer: str = "mxquant",
    *,
    source: str | os.PathLike[str] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a dict of tensors as a checkpoint, the counterpart of `load_state`.

    Codes and scales are copied, never requantized. Everything is validated first, and the folder appears when it is
    complete: a save that fails or is interrupted leaves what was there before. mxquant's own files store tied tensors
    once; other producers' files have each under its name.

    Args:
        state: tensors by the names that the files give them; quantized ones are MXTensors.
        path: the folder. An existing one is replaced, except for files that are not weights and, without `source`, what
            its config.json holds beside quantization.
        producer: whose files to write: a name in `mxquant.checkpoints.PRODUCERS`.
        source: the checkpoint that `load_state` read the tensors from. Its config.json is written again; and if it is
            of the same producer, so is what the tensors do not tell of unchanged weights: scales as they were stored,
            scales of a KV cache, the quantization config. Then equal tensors are stored as equal bytes.
        max_shard_bytes: the most bytes of tensors in a file.

    Raises:
        TypeError: `state` is not a mapping of names to tensors, or a tensor's dtype cannot be stored.
        ValueError: an unknown producer, nothing in `state` is quantized, a tensor is sparse or on device "meta", two
            tensors would have one name in the files, or `source` is damaged.
        NotImplementedError: the producer's files are only read, or cannot hold a weight; the message says what would be
            lost.
        FileExistsError: `path` is a file, or a folder that cannot be replaced.
        FileNotFoundError: there is no checkpoint in `source`.
    """
    target = get_writer(producer)
    _check_state(state)
    aliases = tied_names(state) if target.stores_aliases else {}
    content = None if source is None else read_content(source)
    provenance = None if content is None or content.producer is None else Provenance.of(content)
    stored = {name: tensor.detach() for name, tensor in state.items() if name not in aliases}
    encoded = encode_state(stored, target, provenance, aliases)
    config = (json_of(Path(path) / CONFIG) or {}) if content is None else content.checkpoint.config
    model_config = without_quantization(config)
    if not target.stores_dtype:
        model_config |= _dtype_entry(stored, model_config)
    with replacing(path) as folder:
        write_encoded(folder, encoded, model_config, max_shard_bytes, aliases=aliases)
        read_content(folder)  # what `load_state` would refuse does not replace anything


def _check_state(state: Any) -> None:
    if not isinstance(state, Mapping):
        raise TypeError(
            f"save_state takes a dict of tensors; got {type(state).__name__}. Give a module's state_dict(), or save a "
            "transformers model by save_pretrained"
        )
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise TypeError(f"save_state takes a dict of tensors by their names; got {name!r}: {type(tensor).__name__}")
        if tensor.is_meta:
            raise ValueError(f"{name!r} is on device 'meta' and has no values to save; load it first")
        if tensor.is_quantized or tensor.dtype == torch.complex128:
            raise TypeError(f"{name!r} is {tensor.dtype}, which safetensors cannot hold; convert it first")
        if tensor.layout != torch.strided:
            raise ValueError(f"{name!r} is {tensor.layout}, which safetensors cannot hold; call .to_dense() first")


def _dtype_entry(state: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, str]:
    """The entry of config.json that tells a loader the dtype of the quantized weights; empty if it knows it.

    Raises:
        NotImplementedError: the config names another dtype, or weights have different ones.
    """
    named = dtype_named_by(config)
    for name, weight in state.items():
        if isinstance(weight, MXTensor):
            named = named or weight.dtype
            if weight.dtype != named:
                raise NotImplementedError(
                    f"{name!r} is {weight.dtype} and would be loaded as {named}, the one dtype of this checkpoint; "
                    f"convert it: .to({named}), or save as 'mxquant'"
                )
    known = dtype_named_by(config) or torch.bfloat16
    return {} if named in (None, known) else {"dtype": str(named).removeprefix("torch.")}


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json holds beside quantization configs, its own and that of its `text_config`."""
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    if isinstance(inner := plain.get("text_config"), dict):
        plain["text_config"] = without_quantization(inner)
    return plain
