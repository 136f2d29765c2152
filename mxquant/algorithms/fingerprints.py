"""SHA-256 of the inputs of a calibration (model, batches, configs), by which a resumed one knows its files."""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from mxquant.algorithms.blockwise import Batch
from mxquant.tensor import flatten_state_dict
from mxquant.tensor.state import METADATA_KEY

_Update = Callable[[Any], Any]
# Attributes and settings that do not change what a model computes, such as where it came from.
_INCIDENTAL = {
    "architectures",
    "dtype",
    "generation_config",
    "gradient_checkpointing",
    "name_or_path",
    "torch_dtype",
    "training",
    "transformers_version",
    "use_cache",
}
_DEEPEST = 8
"""Depth of nested attributes. Limited, since they may contain themselves."""


def model_fingerprint(model: nn.Module) -> str:
    """SHA-256 of a model's parameters, buffers, module classes, plain attributes and configs."""
    described = [
        (name, type(module).__qualname__, _plain(vars(module)))
        for name, module in model.named_modules(remove_duplicate=False)
    ]
    held = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    tensors, header = flatten_state_dict(held)
    return tensors_fingerprint(tensors, header[METADATA_KEY], json.dumps(described, sort_keys=True))


def _plain(value: Any, depth: int = 0) -> Any:
    """An attribute as JSON values. Tensors, modules and other objects are represented by their class."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if depth < _DEEPEST and not isinstance(value, type):
        if callable(to_dict := getattr(value, "to_dict", None)):
            value = to_dict()
        elif isinstance(value, SimpleNamespace):
            value = vars(value)
        elif is_dataclass(value):
            value = {one.name: getattr(value, one.name) for one in fields(value)}
        if isinstance(value, Mapping):
            kept = {str(k): v for k, v in value.items() if not str(k).startswith("_") and k not in _INCIDENTAL}
            return {key: _plain(one, depth + 1) for key, one in kept.items()}
        if isinstance(value, (tuple, list)):
            return [_plain(one, depth + 1) for one in value]
    if isinstance(value, (torch.dtype, Enum)):
        return str(value)
    return getattr(value, "__qualname__", type(value).__qualname__)


def batches_fingerprint(batches: Sequence[Batch]) -> str:
    """SHA-256 of the values, types and order of batches. `open_stages` lists the errors."""
    sha = hashlib.sha256()
    for batch in batches:
        _update(sha.update, batch)
    return sha.hexdigest()


def _update(update: _Update, value: Any, around: tuple[Any, ...] = ()) -> None:
    """Hash a value of a batch with its type and length, so that no two batches collide. `around`: its containers."""
    if any(value is one for one in around):
        raise ValueError(f"a calibration batch holds a {type(value).__name__} that contains itself; give another")
    inside = (*around, value)
    if isinstance(value, Tensor):
        _update_tensor(update, "", value)
    elif isinstance(value, Mapping):
        update(f"mapping of {len(value)}:".encode())
        for key in sorted(value, key=repr):
            update(f"{key!r}:".encode())
            _update(update, value[key], inside)
    elif isinstance(value, (tuple, list)):
        update(f"sequence of {len(value)}:".encode())
        for one in value:
            _update(update, one, inside)
    elif value is None or isinstance(value, (bool, int, float, str, bytes, torch.dtype, torch.device)):
        update(f"{type(value).__name__} {value!r}:".encode())
    else:
        raise TypeError(
            f"a calibration batch holds a {type(value).__name__}, of which resume cannot tell whether it is the same; "
            "give tensors, numbers, strings and None, or leave resume out"
        )


def _update_tensor(update: _Update, name: str, tensor: Tensor) -> None:
    update(f"{name!r} {tensor.dtype} {tuple(tensor.shape)}:".encode())
    if tensor.is_meta:
        return  # no values
    values = tensor.detach().cpu()
    if values.layout != torch.strided:
        values = values.to_sparse_coo().coalesce()
        _update_tensor(update, "indices", values.indices())
        values = values.values()
    values = values.contiguous()
    if values.nbytes:  # an empty tensor has no address
        update((ctypes.c_char * values.nbytes).from_address(values.data_ptr()))


def tensors_fingerprint(tensors: Mapping[str, Tensor], *texts: str) -> str:
    """SHA-256 of tensors, in the order of their names, and of texts."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        _update_tensor(sha.update, name, tensors[name])
    for text in texts:
        sha.update(f"{len(text)}:{text}".encode())
    return sha.hexdigest()
