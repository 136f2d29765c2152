"""Running calibration batches through a model one transformer block at a time.

The blocks are the children of the `nn.ModuleList` that holds most of the weights. What the model passes to each is
recorded in one cheap forward in which they do not compute; then each block runs alone, on the outputs of the one before
it. A model without such a list, or one whose blocks do not simply follow each other, is one stage by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Batch = Tensor | Sequence[Any] | Mapping[str, Any]
_Call = tuple[tuple[Any, ...], dict[str, Any]]


class Stop(Exception):
    """Raised in a hook when the rest of a forward is not wanted."""


class _NoChain(Exception):
    """The blocks do not simply follow each other."""


class Stage:
    """A module, and how it is called for each batch."""

    def __init__(self, name: str, module: nn.Module, calls: Sequence[_Call]) -> None:
        self.name = name
        self.module = module
        self.calls = list(calls)

    def run(self, after_batch: Callable[[], None]) -> list[Any]:
        """What the module gives for each batch; None where a hook raised `Stop`."""
        outputs = []
        for args, kwargs in self.calls:
            try:
                outputs.append(self.module(*args, **kwargs))
            except Stop:
                outputs.append(None)
            after_batch()
        return outputs

    def first(self) -> Stage:
        """The stage with its first batch only."""
        return Stage(self.name, self.module, self.calls[:1])


def model_stage(model: nn.Module, batches: Sequence[Batch]) -> Stage:
    """The whole model as one stage."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    return Stage("", model, [_call_of(batch, device) for batch in batches])


def block_stages(model: nn.Module, whole: Stage, weight_names: Sequence[str]) -> list[Stage]:
    """The blocks that hold most of the weights with these names, ready to be run by `chained`; empty where there are
    none or they do not simply follow each other.
    """
    name, blocks = _block_list(model, weight_names)
    if blocks is None:
        return []
    try:
        calls = [_record(model, call, list(blocks)) for call in whole.calls]
    except _NoChain:
        return []
    return [Stage(f"{name}.{i}", block, [call[i] for call in calls]) for i, block in enumerate(blocks)]


def pass_on(outputs: Sequence[Any], following: Stage) -> None:
    """Make what one block gave the input of the next."""
    for index, (output, (args, kwargs)) in enumerate(zip(outputs, following.calls, strict=True)):
        hidden = _hidden_of(output)
        call = ((hidden, *args[1:]), kwargs) if args else ((), kwargs | {"hidden_states": hidden})
        following.calls[index] = call


@contextmanager
def calibrating(model: nn.Module) -> Iterator[None]:
    """Without gradients, dropout and caches."""
    training = [module for module in model.modules() if module.training]
    config = getattr(model, "config", None)
    use_cache = getattr(config, "use_cache", None)
    try:
        model.eval()
        if use_cache:
            config.use_cache = False  # type: ignore[union-attr]
        with torch.no_grad():
            yield
    finally:
        if use_cache:
            config.use_cache = use_cache  # type: ignore[union-attr]
        for module in training:
            module.training = True


def _call_of(batch: Batch, device: torch.device) -> _Call:
    def there(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    if isinstance(batch, Tensor):
        return (there(batch),), {}
    if isinstance(batch, Mapping):
        return (), {key: there(value) for key, value in batch.items()}
    return tuple(there(value) for value in batch), {}


def _block_list(model: nn.Module, weight_names: Sequence[str]) -> tuple[str, nn.ModuleList | None]:
    """The list with most of the weights below its children; of such that contain each other, the outer one."""
    best: tuple[int, str, nn.ModuleList | None] = (0, "", None)
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            inside = sum(weight.startswith(f"{name}.") for weight in weight_names)
            if inside > best[0]:
                best = (inside, name, module)
    return best[1:]


def _record(model: nn.Module, call: _Call, blocks: list[nn.Module]) -> list[_Call]:
    """What the model passes to each block; only the first one computes, to show what a block gives.

    Raises:
        _NoChain: a block is left out, called twice or out of order, or not with what the one before it gave.
    """
    calls: list[_Call] = []
    given: list[Any] = []

    def stand_in(index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            hidden = args[0] if args else kwargs.get("hidden_states")
            if len(calls) != index or (given and hidden is not _hidden_of(given[0])):
                raise _NoChain
            calls.append((args, kwargs))
            if index == len(blocks) - 1:
                raise Stop
            if not given:
                given.append(forward(*args, **kwargs))
                if _hidden_of(given[0]) is None:
                    raise _NoChain
            return given[0]

        return record

    own = [vars(block).get("forward") for block in blocks]  # of an instance, which other libraries may have set
    for index, block in enumerate(blocks):
        block.forward = stand_in(index, block.forward)
    try:
        model(*call[0], **call[1])
    except Stop:
        return calls
    finally:
        for block, forward in zip(blocks, own, strict=True):
            vars(block).pop("forward", None)
            if forward is not None:
                block.forward = forward
    raise _NoChain


def _hidden_of(output: Any) -> Tensor | None:
    first = output[0] if isinstance(output, (tuple, list)) and output else output
    return first if isinstance(first, Tensor) else None
