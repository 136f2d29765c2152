"""Block-wise calibration: running calibration batches through a model one transformer block at a time.

The blocks are the children of the `nn.ModuleList` that holds most of the weights. One forward of the model captures
what it passes to each block; only the first block computes in it. After that each block runs alone, on the outputs of
the block before it. A model without such a list, or whose blocks do not form a chain, is one stage as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from mxquant.algorithms.block_offload import BlockOffload
from mxquant.algorithms.forward_calls import (
    Call,
    PreviousOutput,
    as_tuple,
    clone_call,
    fill_outputs,
    link_outputs,
    move_tensors,
    tensor_version,
)

Batch = Tensor | Sequence[Any] | Mapping[str, Any]
"""What the model is called with: a tensor, a sequence of positional or a mapping of keyword arguments."""


class StopForward(Exception):
    """Raised in a hook to skip the rest of a forward."""


class _NotAChain(Exception):
    """A block's input is not the output of the block before it."""


@dataclass(eq=False)
class Stage:
    """A block, or the whole model."""

    name: str
    module: nn.Module
    calls: list[Call]
    """Its arguments for every batch."""
    offload: BlockOffload
    units: list[nn.Module] = field(default_factory=list)
    """The modules that move to the compute device one at a time, such as the blocks of a model; empty: the module."""

    def run(self, after_batch: Callable[[], None], *, wants_outputs: bool = False) -> list[Any]:
        """The module's outputs on every batch, on the model's device; empty without `wants_outputs`.

        The output is None for a batch whose forward a hook stopped.
        """
        outputs = []
        with self.offload.offloaded(self.module, self.units or [self.module]) as device:
            for call in self.calls:
                args, kwargs = clone_call(call, device)
                try:
                    output = self.module(*args, **kwargs)
                except StopForward:
                    output = None
                if wants_outputs:
                    outputs.append(move_tensors(output, self.offload.model_device))
                after_batch()
        return outputs

    def first_batch(self) -> Stage:
        """The same stage with its first batch only."""
        return replace(self, calls=self.calls[:1])


def model_stage(model: nn.Module, batches: Sequence[Batch], offload: BlockOffload | None = None) -> Stage:
    """The whole model as one stage. Batches move to the model's device."""
    offload = BlockOffload(model) if offload is None else offload
    return Stage("", model, [_call_of(batch, offload.model_device) for batch in batches], offload)


def block_stages(model: nn.Module, whole: Stage, weight_names: Sequence[str]) -> list[Stage]:
    """One stage for each block of the list that holds most of the named weights.

    Only the first stage can run at once. The calls of the others hold placeholders until `feed_next` fills them.
    Empty if the model has no such list, or if its blocks do not form a chain.
    """
    name, blocks = _block_list(model, weight_names)
    offload = whole.offload
    if blocks is None:
        return []
    try:
        with offload.offloaded(model, (), excluded=list(blocks)):
            calls = [_capture_block_calls(model, call, list(blocks), offload) for call in whole.calls]
    except _NotAChain:
        return []
    return [Stage(f"{name}.{i}", block, [call[i] for call in calls], offload) for i, block in enumerate(blocks)]


def feed_next(outputs: Sequence[Any], following: Stage) -> None:
    """Put the outputs of one block into the calls of the next: hidden states, and what else it passes along."""
    pairs = zip(outputs, following.calls, strict=True)
    following.calls[:] = [fill_outputs(call, as_tuple(output)) for output, call in pairs]


@contextmanager
def calibration_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients and key-value caches. Compiled modules run eagerly, so that hooks run."""
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
        return (), move_tensors(dict(batch), device)
    return move_tensors(tuple(batch), device), {}


def _block_list(model: nn.Module, weight_names: Sequence[str]) -> tuple[str, nn.ModuleList | None]:
    """The list with most of the named weights in its children. Of nested lists, the outer one."""
    best: tuple[int, str, nn.ModuleList | None] = (0, "", None)
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            inside = sum(weight.startswith(f"{name}.") for weight in weight_names)
            if inside > best[0]:
                best = (inside, name, module)
    return best[1:]


def _capture_block_calls(model: nn.Module, call: Call, blocks: list[nn.Module], offload: BlockOffload) -> list[Call]:
    """Capture what the model passes to each block in one forward, in which only the first block computes.

    The others return its output. A tensor that comes from the previous block is captured as a `PreviousOutput`.

    Raises:
        _NotAChain: a block is skipped, called twice or out of order, or its hidden states are not the output of the
            block before it.
    """
    calls: list[Call] = []
    first_output: list[Any] = []
    versions: list[int] = []

    def capturing(index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def capture(*args: Any, **kwargs: Any) -> Any:
            if len(calls) != index:
                raise _NotAChain
            called = (args, kwargs)
            if first_output:
                outputs = as_tuple(first_output[0])
                called = link_outputs(called, outputs)
                hidden = called[0][0] if args else called[1].get("hidden_states")
                is_next = isinstance(hidden, PreviousOutput) and hidden.index == 0
                if not is_next or versions != [tensor_version(output) for output in outputs]:
                    raise _NotAChain
            calls.append(called)
            if index == len(blocks) - 1:
                raise StopForward
            if not first_output:
                first_output.append(offload.call(blocks[0], forward, called))
                versions.extend(tensor_version(output) for output in as_tuple(first_output[0]))
            return first_output[0]

        return capture

    instance_forwards = [vars(block).get("forward") for block in blocks]  # other libraries may have set one
    for index, block in enumerate(blocks):
        block.forward = capturing(index, block.forward)
    try:
        args, kwargs = clone_call(call)
        model(*args, **kwargs)
    except StopForward:
        return calls
    finally:
        for block, forward in zip(blocks, instance_forwards, strict=True):
            vars(block).pop("forward", None)
            if forward is not None:
                block.forward = forward
    raise _NotAChain
