"""Saving: plain tensors and string metadata for safetensors, and pickling.

Both save the canonical bytes and versioned JSON. Backend, layout and the emulation class are not saved. TorchScript
saves storages, which quantized tensors lack: it is refused.
"""

from __future__ import annotations

import copyreg
import json
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from mxquant.backends.base import CANONICAL, Operand
from mxquant.tensor.checks import check_operand
from mxquant.tensor.dispatch import FUNCTIONS, implements
from mxquant.tensor.exporters import REMEDY
from mxquant.tensor.metadata import VERSION, check_version, metadata_from_fields, metadata_from_json
from mxquant.tensor.mxtensor import EmulatedMXTensor, MXTensor

METADATA_KEY = "mxquant"
SAVED_PARTS = ("qdata", "scale", "per_tensor_scale", "activation_scale")


def flatten_state_dict(state_dict: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """A state dict as plain tensors and string metadata, which `safetensors.torch.save_file` takes.

    Each MXTensor `name` becomes `name.qdata`, `name.scale` and, if it has them, `name.per_tensor_scale` and
    `name.activation_scale`. Other tensors stay as they are. Of tied tensors, quantized or not, the first is written.

    Returns:
        the tensors; and {"mxquant": JSON}, which holds the version, the metadata of each quantized tensor, and the name
        of the written tensor for each other tied name.

    Raises:
        ValueError: two tensors would get the same name.
        TypeError: not a mapping of names to tensors.
    """
    if not isinstance(state_dict, Mapping) or not all(isinstance(tensor, Tensor) for tensor in state_dict.values()):
        raise TypeError(f"flatten_state_dict takes a state dict, names to tensors; got {type(state_dict).__name__}")
    tensors: dict[str, Tensor] = {}
    described: dict[str, Any] = {}
    aliases = tied_names(state_dict)
    for name, tensor in state_dict.items():
        if name in aliases:
            continue
        if isinstance(tensor, MXTensor):
            canonical = tensor.canonical()
            described[name] = json.loads(canonical.metadata.to_json(tuple(canonical.shape)))
            parts = {f"{name}.{part}": inner for part in SAVED_PARTS if (inner := getattr(canonical, part)) is not None}
        else:
            parts = {name: tensor}
        for part, inner in parts.items():
            if part in tensors:
                raise ValueError(f"two tensors would be saved as {part!r}; rename one of them in the state dict")
            tensors[part] = inner.contiguous() if isinstance(tensor, MXTensor) else inner
    content = {"version": VERSION, "tensors": described, "aliases": aliases}
    return tensors, {METADATA_KEY: json.dumps(content, sort_keys=True)}


def tied_names(state_dict: Mapping[str, Tensor]) -> dict[str, str]:
    """The names of tied tensors, each with the first name in the state dict of the same tensor."""
    first_names: dict[Any, str] = {}
    firsts = {name: first_names.setdefault(_memory_of(tensor) or name, name) for name, tensor in state_dict.items()}
    return {name: first for name, first in firsts.items() if first != name}


def _memory_of(tensor: Tensor) -> tuple[Any, ...] | None:
    """What tied tensors have in common: memory, shape, strides and dtype; None for a tensor without memory."""
    inner = tensor.qdata if isinstance(tensor, MXTensor) else tensor
    if tensor.is_meta or inner.numel() == 0 or tensor.layout != torch.strided:
        return None
    return type(tensor), inner.device, inner.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def unflatten_state_dict(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> dict[str, Tensor]:
    """The inverse of `flatten_state_dict`; load the result with `model.load_state_dict(..., assign=True)` into an
    unquantized model.

    Raises:
        ValueError: the metadata is missing, damaged or of an unknown version; or a tensor is missing or does not fit.
        TypeError: an argument is not a mapping.
    """
    for given in (tensors, {} if metadata is None else metadata):  # None: a file that was saved without
        if not isinstance(given, Mapping):
            raise TypeError(f"unflatten_state_dict takes the tensors and the metadata, two mappings; got {given!r}")
    described, aliases = parse_metadata(metadata or {})
    state_dict = dict(tensors)
    for name, fields in described.items():
        parsed, shape = metadata_from_fields(fields)
        if shape is None or parsed.layout != CANONICAL:
            raise ValueError(f"metadata of {name!r} lacks its shape, or its layout is not saved so: {fields!r}")
        inner = {part: state_dict.pop(f"{name}.{part}", None) for part in SAVED_PARTS}
        for part in ("qdata", "scale"):
            if inner[part] is None:
                raise ValueError(
                    f"tensor {name + '.' + part!r} is missing: the metadata says that {name!r} is quantized"
                )
        if name in state_dict:
            raise ValueError(f"both {name!r} and {name + '.qdata'!r} are there; one of them must go")
        operand = Operand(**inner)  # type: ignore[arg-type]
        try:
            state_dict[name] = MXTensor(check_operand(operand, parsed, shape), parsed, shape)
        except (ValueError, TypeError) as error:
            raise ValueError(f"cannot rebuild {name!r}: {error}") from error
    for name, first in aliases.items():
        if name in state_dict or first not in state_dict:
            raise ValueError(f"the metadata says that {name!r} stands for {first!r}; the tensors say otherwise")
        state_dict[name] = state_dict[first]
    return state_dict


def parse_metadata(metadata: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The fields of each quantized tensor and the tied names, from what `flatten_state_dict` wrote; or a ValueError."""
    if METADATA_KEY not in metadata:
        raise ValueError(
            f"no {METADATA_KEY!r} in the metadata (it has {sorted(metadata)}); pass on the metadata that "
            "flatten_state_dict gave: safetensors.safe_open(path, 'pt').metadata()"
        )
    try:
        content = json.loads(metadata[METADATA_KEY])
        version, described, aliases = content["version"], content["tensors"], content.get("aliases", {})
        if not (isinstance(described, dict) and isinstance(aliases, dict)):
            raise TypeError("tensors and aliases are objects")
        if not all(isinstance(first, str) for first in aliases.values()):
            raise TypeError("aliases stand for names")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"the {METADATA_KEY!r} metadata is damaged ({error}): {metadata[METADATA_KEY][:80]!r}"
        ) from error
    check_version(version)
    return described, aliases


def rebuild(operand: tuple[Tensor | None, ...], metadata: str, attributes: dict[str, Any]) -> MXTensor:
    """Unpickle an MXTensor. NOTE: pickles on users' disks name this function by its module."""
    parsed, shape = metadata_from_json(metadata)
    assert shape is not None
    checked = check_operand(Operand(*operand), parsed, shape)  # type: ignore[arg-type]
    tensor = MXTensor(checked, parsed, shape)
    tensor.__dict__.update(attributes)
    return tensor


def reduce(tensor: MXTensor) -> tuple[Any, ...]:
    """How `copyreg` pickles an MXTensor: the canonical bytes as a plain MXTensor.

    A parameter keeps the attributes that others put on it, as any parameter does; tensors of a state dict do not.
    """
    canonical = tensor.canonical()
    text = canonical.metadata.to_json(tuple(canonical.shape))
    mark = tensor.parameter_mark()
    attributes = tensor.foreign_attributes() | mark if mark else {}
    return rebuild, (tuple(canonical.operand), text, attributes)


for _cls in (MXTensor, EmulatedMXTensor):
    copyreg.pickle(_cls, reduce)
torch.serialization.add_safe_globals([rebuild, MXTensor, EmulatedMXTensor])


@implements(torch.Tensor.storage, table=FUNCTIONS)
def storage(tensor: MXTensor) -> NoReturn:
    """Refuse: an MXTensor has no storage. safetensors' `save_file` and transformers' `save_pretrained` ask for one."""
    raise TypeError(
        f"{tensor!r} has no storage that could be written as it is; save a transformers model with "
        "mxquant.save_pretrained(model, path), a state dict with torch.save, or what flatten_state_dict makes of it. "
        "Accelerate's save_state and diffusers' save_pretrained "
        "take safe_serialization=False. What sentence-transformers saves can be saved where "
        "its transformers model was quantized on load, by MXQuantConfig"
    )


def _prepare_scriptable(self: nn.Module) -> nn.Module:
    """The module itself. `torch.jit.script` calls this for every module before it compiles any.

    NOTE: a scripted module would run, and once saved and loaded give other numbers or end the process.

    Raises:
        NotImplementedError: a parameter is quantized.
    """
    for name, parameter in self._parameters.items():
        if isinstance(parameter, MXTensor):
            raise NotImplementedError(
                f"torch.jit.script cannot compile with the {name} of {type(self).__name__}, {parameter!r}; {REMEDY}"
            )
    return self


# NOTE: on the class, as any module may be given a quantized parameter, and attributes of a module are pickled with it.
nn.Module.__prepare_scriptable__ = _prepare_scriptable  # type: ignore[attr-defined]
