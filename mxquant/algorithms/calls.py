"""What a module is called with: copies to run it on, and what of it another call gave."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Part:
    """Stands for a tensor of what a block gives, in the call of the next one."""

    index: int


def fresh(call: Call, device: torch.device | None = None) -> Call:
    """A call with tensors and caches of its own, so that a module may work on them in place or append to them.

    What is one object stays one: layers that share their inputs are told by that.

    Args:
        device: make the copies there, and send what else can be sent (an attention mask that is no tensor), a copy of
            it, as some send themselves; a device that is passed becomes this one. None: where the call is.
    """

    def copied(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.clone() if device is None else value.to(device, copy=True)
        if _is_cache(value):
            own = copy.deepcopy(value)
            return own if device is None else _sent(own, device, set())
        if device is not None and isinstance(value, torch.device):
            return device
        is_mover = not isinstance(value, (type, nn.Module)) and callable(getattr(value, "to", None))
        return copy.copy(value).to(device) if is_mover and device is not None else value

    return _mapped(call, copied, {})


def moved(value: Any, device: torch.device) -> Any:
    """What a module gives, its tensors on a device."""
    return _mapped(value, lambda one: one.to(device) if isinstance(one, Tensor) else one, {})


def linked(call: Call, given: Sequence[Any]) -> Call:
    """A call whose tensors that are those of `given` become `Part`s of it."""
    parts: dict[int, Part] = {}
    for index, value in enumerate(given):
        if isinstance(value, Tensor):
            parts.setdefault(id(value), Part(index))
    return _mapped(call, lambda value: parts.get(id(value), value), {})


def filled(call: Call, given: Sequence[Any]) -> Call:
    """A call with parts of `given` in the places of its `Part`s."""
    return _mapped(call, lambda value: given[value.index] if isinstance(value, Part) else value, {})


def parts_of(output: Any) -> tuple[Any, ...]:
    """What a module gives, as a tuple."""
    return tuple(output) if isinstance(output, (tuple, list)) else (output,)


def version_of(value: object) -> int:
    """A number that working on a tensor in place changes; 0 for what is none, or is not counted."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _is_cache(value: object) -> bool:
    """Whether it keeps keys and values of earlier tokens, as the classes of transformers are called that do."""
    return any(base.__name__.endswith("Cache") for base in type(value).__mro__)


def _sent(value: Any, device: torch.device, seen: set[int]) -> Any:
    """A cache with its tensors on a device, and those of its layers, which remember where they are."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, torch.device):
        return device
    if id(value) in seen:
        return value
    seen.add(id(value))
    if type(value) in (tuple, list):
        return type(value)(_sent(one, device, seen) for one in value)
    if isinstance(value, dict):
        value.update({key: _sent(one, device, seen) for key, one in value.items()})
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        vars(value).update({key: _sent(one, device, seen) for key, one in vars(value).items()})
    return value


def _mapped(value: Any, change: Callable[[Any], Any], done: dict[int, Any]) -> Any:
    """`value` with what is in its tuples, lists and dicts changed, each object once: lists may hold themselves."""
    if id(value) in done:
        return done[id(value)]
    if type(value) is list:
        found: Any = done.setdefault(id(value), [])
        found.extend(_mapped(one, change, done) for one in value)
    elif type(value) is dict:
        found = done.setdefault(id(value), {})
        found.update((key, _mapped(one, change, done)) for key, one in value.items())
    elif type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_fields")):
        parts = [_mapped(one, change, done) for one in value]
        found = tuple(parts) if type(value) is tuple else type(value)(*parts)
    else:
        found = change(value)
    done[id(value)] = found
    return found
