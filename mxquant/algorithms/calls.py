"""What a module is called with: copies to run it on, and what of it another call gave."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Part:
    """Stands for a tensor of what a block gives, in the call of the next one."""

    index: int


def fresh(call: Call) -> Call:
    """A call with tensors and caches of its own, so that a module may work on them in place or append to them.

    What is one object stays one: layers that share their inputs are told by that.
    """

    def copied(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.clone()
        return copy.deepcopy(value) if _is_cache(value) else value

    return _mapped(call, copied, {})


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
    elif type(value) is tuple:
        found = tuple(_mapped(one, change, done) for one in value)
    else:
        found = change(value)
    done[id(value)] = found
    return found
