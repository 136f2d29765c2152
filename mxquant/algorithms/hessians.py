"""Accumulating the Hessians X^T X of the inputs X of each layer, by forward hooks.

Layers that get the same tensor (the projections of queries, keys and values) share one Hessian. Each expert has one of
its own, over the tokens that are routed to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from mxquant.algorithms.blockwise import StopForward
from mxquant.algorithms.expert_inputs import expert_linear, is_routed_call, routed_rows
from mxquant.algorithms.forward_calls import tensor_version
from mxquant.modules.experts import ExpertsLayout
from mxquant.modules.quantize_target import Target
from mxquant.modules.sites import Site

_InputKey = tuple[tuple[object, int], ...]
"""What tells inputs apart: objects with their versions."""


@dataclass(eq=False)
class SharedInputs:
    """The Hessians of the inputs that one or several weights share."""

    targets: list[Target] = field(default_factory=list)
    hessians: dict[int, Tensor] = field(default_factory=dict)
    """fp32 [K, K] by the index of an expert that got tokens; a linear layer has index 0 only."""
    tokens: dict[int, int] = field(default_factory=dict)
    runs_again: bool = False
    """Whether the layers run more than once in a forward."""

    def accumulate(self, index: int, x: Tensor) -> None:
        """Add the rows [..., K] that matrix `index` multiplies."""
        rows = x.reshape(-1, x.shape[-1]).float()
        if index not in self.hessians:
            self.hessians[index] = rows.new_zeros(rows.shape[1], rows.shape[1])
            self.tokens[index] = 0
        self.hessians[index].addmm_(rows.t(), rows)
        self.tokens[index] += rows.shape[0]


class HessianObserver:
    """Hooks on the layers of one stage. The first forward shows which layers share their inputs."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self.groups: list[SharedInputs] = []
        """In the order in which the layers run."""
        self.only: SharedInputs | None = None
        """Accumulate this group alone, and stop the forward behind it."""
        self.accumulates = True
        """False: only find out which layers share inputs."""
        self._group_of: dict[Target, SharedInputs] = {}
        self._seen: list[tuple[_InputKey, SharedInputs]] = []
        hooks = (self._hook(target, site) for target in targets for site in target.computing_sites)
        self._handles = [handle for handle in hooks if handle is not None]

    def after_batch(self) -> None:
        """Forget the inputs of a forward. They are told apart by identity, so they are kept alive until then."""
        self._seen.clear()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, target: Target, site: Site) -> Any:
        if site.kind == "linear":
            return site.module.register_forward_pre_hook(
                lambda module, args: (
                    self._see(target, args[:1], lambda inputs: inputs.accumulate(0, args[0])) if args else None
                )
            )
        layout = site.layout
        assert layout is not None
        if not layout.is_computable or site.attribute not in (*layout.up, layout.down):
            return None
        is_down = site.attribute == layout.down

        def observe(module: nn.Module, args: tuple[Any, ...]) -> None:
            if is_routed_call(args):
                shared = (module,) if is_down else (args[0], module)
                self._see(target, shared, lambda inputs: _accumulate_experts(inputs, module, layout, args, is_down))

        return site.module.register_forward_pre_hook(observe)

    def _see(self, target: Target, objects: tuple[object, ...], add: Callable[[SharedInputs], None]) -> None:
        """Handle the call of a layer.

        Args:
            objects: layers that get the same objects, unchanged in between, share their inputs.
            add: accumulates this call's inputs.
        """
        key = tuple((one, tensor_version(one)) for one in objects)
        known = next((inputs for seen, inputs in self._seen if _is_same_input(seen, key)), None)
        inputs = self._group_of.get(target)
        if inputs is None:
            inputs = self._group_of[target] = known or SharedInputs()
            inputs.targets.append(target)
            if known is None:
                self.groups.append(inputs)
        if known is inputs:
            return  # another layer of the group has added them
        inputs.runs_again |= any(inputs is seen for _, seen in self._seen)
        self._seen.append((key, inputs))
        if self.accumulates and self.only in (None, inputs):
            add(inputs)
        if self.only is inputs and not inputs.runs_again:
            raise StopForward


def _is_same_input(some: _InputKey, others: _InputKey) -> bool:
    return len(some) == len(others) and all(
        a is b and version == other for (a, version), (b, other) in zip(some, others, strict=True)
    )


def _accumulate_experts(
    inputs: SharedInputs, module: nn.Module, layout: ExpertsLayout, args: tuple[Any, ...], is_down: bool
) -> None:
    """Add the inputs of the up projections, or of down: the gate's outputs by the up projections as they are now."""
    assert layout.gate is not None
    for rows in routed_rows(module, layout, args):
        x = rows.x_RH
        if is_down:
            x = layout.gate(module, *(expert_linear(module, layout, name, rows.expert, x) for name in layout.up))
        inputs.accumulate(rows.expert, x)
