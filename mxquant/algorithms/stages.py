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

from mxquant.algorithms.block_offload import Placement
from mxquant.algorithms.calls import Call, Part, filled, fresh, linked, moved, parts_of, version_of

Batch = Tensor | Sequence[Any] | Mapping[str, Any]


class Stop(Exception):
    """Raised in a hook when the rest of a forward is not wanted."""


class _NoChain(Exception):
    """The blocks do not simply follow each other."""


class Stage:
    """A module, how it is called for each batch, and where it runs: at once, or one of its parts after the other."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        calls: Sequence[Call],
        placement: Placement,
        parts: Sequence[nn.Module] | None = None,
    ) -> None:
        self.name = name
        self.module = module
        self.calls = list(calls)
        self.placement = placement
        self.parts = [module] if parts is None else list(parts)

    def run(self, after_batch: Callable[[], None], *, wants_outputs: bool = False) -> list[Any]:
        """What the module gives for each batch, where the model is: None where a hook raised `Stop`; or, not wanted,
        nothing.
        """
        outputs = []
        with self.placement.running(self.module, self.parts) as device:
            for call in self.calls:
                args, kwargs = fresh(call, device)
                try:
                    output = self.module(*args, **kwargs)
                except Stop:
                    output = None
                if wants_outputs:
                    outputs.append(moved(output, self.placement.home))
                after_batch()
        return outputs

    def first(self) -> Stage:
        """The stage with its first batch only."""
        return Stage(self.name, self.module, self.calls[:1], self.placement, self.parts)


def model_stage(model: nn.Module, batches: Sequence[Batch], placement: Placement | None = None) -> Stage:
    """The whole model as one stage, its batches where it is."""
    placement = Placement(model) if placement is None else placement
    return Stage("", model, [_call_of(batch, placement.home) for batch in batches], placement)


def block_stages(model: nn.Module, whole: Stage, weight_names: Sequence[str]) -> list[Stage]:
    """The blocks that hold most of the weights with these names, ready to be run by `chained`; empty where there are
    none or they do not simply follow each other.
    """
    name, blocks = _block_list(model, weight_names)
    placement = whole.placement
    if blocks is None:
        return []
    try:
        with placement.running(model, (), apart=list(blocks)):
            calls = [_record(model, call, list(blocks), placement) for call in whole.calls]
    except _NoChain:
        return []
    return [Stage(f"{name}.{i}", block, [call[i] for call in calls], placement) for i, block in enumerate(blocks)]


def pass_on(outputs: Sequence[Any], following: Stage) -> None:
    """Make what one block gave the input of the next: hidden states, and what else it passes along."""
    following.calls[:] = [filled(call, parts_of(output)) for output, call in zip(outputs, following.calls, strict=True)]


@contextmanager
def calibrating(model: nn.Module) -> Iterator[None]:
    """Without gradients, dropout and caches, and eager: what is compiled calls no hooks, which look at inputs."""
    training = [module for module in model.modules() if module.training]
    # Models inside of others have configs of their own, which may be one object.
    configs: dict[int, Any] = {id(config): config for config in (getattr(m, "config", None) for m in model.modules())}
    caching = [(config, config.use_cache) for config in configs.values() if getattr(config, "use_cache", None)]
    try:
        model.eval()
        for config, _ in caching:
            config.use_cache = False
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for config, use_cache in caching:
            config.use_cache = use_cache
        for module in training:
            module.training = True


def _call_of(batch: Batch, device: torch.device) -> Call:
    if isinstance(batch, Tensor):
        return (batch.to(device),), {}
    if isinstance(batch, Mapping):
        return (), moved(dict(batch), device)
    return moved(tuple(batch), device), {}


def _block_list(model: nn.Module, weight_names: Sequence[str]) -> tuple[str, nn.ModuleList | None]:
    """The list with most of the weights below its children; of such that contain each other, the outer one."""
    best: tuple[int, str, nn.ModuleList | None] = (0, "", None)
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            inside = sum(weight.startswith(f"{name}.") for weight in weight_names)
            if inside > best[0]:
                best = (inside, name, module)
    return best[1:]


def _record(model: nn.Module, call: Call, blocks: list[nn.Module], placement: Placement) -> list[Call]:
    """What the model passes to each block; only the first one computes, to show what a block gives.

    What of a call the block before gave is a `Part` of that, for `pass_on`.

    Raises:
        _NoChain: a block is left out, called twice or out of order, or not with what the one before it gave.
    """
    calls: list[Call] = []
    given: list[Any] = []
    versions: list[int] = []

    def stand_in(index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            if len(calls) != index:
                raise _NoChain
            called = (args, kwargs)
            if given:
                parts = parts_of(given[0])
                called = linked(called, parts)
                hidden = called[0][0] if args else called[1].get("hidden_states")
                is_next = isinstance(hidden, Part) and hidden.index == 0
                if not is_next or versions != [version_of(part) for part in parts]:
                    raise _NoChain
            calls.append(called)
            if index == len(blocks) - 1:
                raise Stop
            if not given:
                given.append(placement.call(blocks[0], forward, called))
                versions.extend(version_of(part) for part in parts_of(given[0]))
            return given[0]

        return record

    own = [vars(block).get("forward") for block in blocks]  # of an instance, which other libraries may have set
    for index, block in enumerate(blocks):
        block.forward = stand_in(index, block.forward)
    try:
        args, kwargs = fresh(call)
        model(*args, **kwargs)
    except Stop:
        return calls
    finally:
        for block, forward in zip(blocks, own, strict=True):
            vars(block).pop("forward", None)
            if forward is not None:
                block.forward = forward
    raise _NoChain
