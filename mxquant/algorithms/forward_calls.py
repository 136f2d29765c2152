"""The arguments that a module's forward is called with: copying them, moving them, and chaining them to outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


@dataclass(frozen=True)
class PreviousOutput:
    """In a captured call: a placeholder for one output of the previous block."""

    index: int


def clone_call(call: Call, device: torch.device | None = None) -> Call:
    """A copy of the arguments, so that a module can change tensors in place and append to caches.

    An object that occurs twice is copied once: layers are known to share an input by its identity.

    Args:
        device: put the copies there; None: keep their device. Objects with a `to` method (such as an attention mask
            that is not a tensor) are copied and moved as well. A `torch.device` among the arguments becomes `device`.
    """

    def copied(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.clone() if device is None else value.to(device, copy=True)
        if _is_cache(value):
            own = copy.deepcopy(value)
            return own if device is None else _move_cache(own, device, set())
        if device is not None and isinstance(value, torch.device):
            return device
        is_mover = not isinstance(value, (type, nn.Module)) and callable(getattr(value, "to", None))
        return copy.copy(value).to(device) if is_mover and device is not None else value

    return _map_leaves(call, copied, {})


def move_tensors(value: Any, device: torch.device) -> Any:
    """`value`, a tensor or nested tuples, lists and dicts, with every tensor on `device`."""
    return _map_leaves(value, lambda one: one.to(device) if isinstance(one, Tensor) else one, {})


def link_outputs(call: Call, outputs: Sequence[Any]) -> Call:
    """Replace each tensor of a call that is one of `outputs` by a `PreviousOutput`."""
    links: dict[int, PreviousOutput] = {}
    for index, value in enumerate(outputs):
        if isinstance(value, Tensor):
            links.setdefault(id(value), PreviousOutput(index))
    return _map_leaves(call, lambda value: links.get(id(value), value), {})


def fill_outputs(call: Call, outputs: Sequence[Any]) -> Call:
    """Replace each `PreviousOutput` of a call by that output."""
    return _map_leaves(call, lambda value: outputs[value.index] if isinstance(value, PreviousOutput) else value, {})


def as_tuple(output: Any) -> tuple[Any, ...]:
    """A module's outputs, also where it returns a single one."""
    return tuple(output) if isinstance(output, (tuple, list)) else (output,)


def tensor_version(value: object) -> int:
    """A tensor's version counter, which in-place operations increase; 0 for other objects and inference tensors."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _is_cache(value: object) -> bool:
    """Whether it is a key-value cache, by the names of transformers' classes."""
    return any(base.__name__.endswith("Cache") for base in type(value).__mro__)


def _move_cache(value: Any, device: torch.device, seen: set[int]) -> Any:
    """Move the tensors of a cache and of its layers in place, and the devices that they have stored."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, torch.device):
        return device
    if id(value) in seen:
        return value
    seen.add(id(value))
    if type(value) in (tuple, list):
        return type(value)(_move_cache(one, device, seen) for one in value)
    if isinstance(value, dict):
        value.update({key: _move_cache(one, device, seen) for key, one in value.items()})
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        vars(value).update({key: _move_cache(one, device, seen) for key, one in vars(value).items()})
    return value


def _map_leaves(value: Any, change: Callable[[Any], Any], done: dict[int, Any]) -> Any:
    """Apply `change` to the leaves of nested tuples, lists and dicts, once an object. Lists may contain themselves."""
    if id(value) in done:
        return done[id(value)]
    if type(value) is list:
        found: Any = done.setdefault(id(value), [])
        found.extend(_map_leaves(one, change, done) for one in value)
    elif type(value) is dict:
        found = done.setdefault(id(value), {})
        found.update((key, _map_leaves(one, change, done)) for key, one in value.items())
    elif type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_fields")):
        parts = [_map_leaves(one, change, done) for one in value]
        found = tuple(parts) if type(value) is tuple else type(value)(*parts)
    else:
        found = change(value)
    done[id(value)] = found
    return found
