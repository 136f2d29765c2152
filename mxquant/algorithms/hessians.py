"""Sums of X^T X over the inputs X of each layer, by hooks that see them while a stage runs.

Layers that are given the same tensor (the queries', keys' and values' projections) share one sum. Experts have one
each, over the tokens that are routed to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from mxquant.algorithms.calls import version_of
from mxquant.algorithms.matrices import is_computable, is_routed_call, multiply, rows_of_experts
from mxquant.algorithms.stages import Stop
from mxquant.modules.experts import ExpertsLayout
from mxquant.modules.quantize_target import Target
from mxquant.modules.sites import Site

_Given = tuple[tuple[object, int], ...]
"""Objects and their versions."""


@dataclass(eq=False)
class Inputs:
    """What is known of the inputs that one or several weights share."""

    targets: list[Target] = field(default_factory=list)
    hessians: dict[int, Tensor] = field(default_factory=dict)
    """fp32 [K, K] for each expert that saw tokens; the only one of a linear layer is 0."""
    tokens: dict[int, int] = field(default_factory=dict)
    runs_again: bool = False
    """Whether the layers run more than once in a forward."""

    def add(self, index: int, x: Tensor) -> None:
        """Rows [..., K] that matrix `index` multiplies."""
        rows = x.reshape(-1, x.shape[-1]).float()
        if index not in self.hessians:
            self.hessians[index] = rows.new_zeros(rows.shape[1], rows.shape[1])
            self.tokens[index] = 0
        self.hessians[index].addmm_(rows.t(), rows)
        self.tokens[index] += rows.shape[0]

    def clear(self) -> None:
        self.hessians.clear()
        self.tokens.clear()


class Observer:
    """Hooks on the layers of one stage. Which of them share their inputs shows when they first run."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self.found: list[Inputs] = []
        """In the order in which the layers run."""
        self.only: Inputs | None = None
        """Sum these alone, and stop the forward there."""
        self.sums = True
        """Whether to sum at all, or only to find out who shares inputs."""
        self._of_target: dict[Target, Inputs] = {}
        self._seen: list[tuple[_Given, Inputs]] = []
        hooks = (self._hook(target, site) for target in targets for site in target.computing_sites)
        self._handles = [handle for handle in hooks if handle is not None]

    def after_batch(self) -> None:
        """Inputs are told apart by the tensors themselves, which live as long as a forward."""
        self._seen.clear()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, target: Target, site: Site) -> Any:
        if site.kind == "linear":
            return site.module.register_forward_pre_hook(
                lambda module, args: (
                    self._see(target, args[:1], lambda inputs: inputs.add(0, args[0])) if args else None
                )
            )
        layout = site.layout
        assert layout is not None
        if not is_computable(layout) or site.attribute not in (*layout.up, layout.down):
            return None  # it cannot be told what its matrices multiply
        part = _down_inputs if site.attribute == layout.down else _up_inputs

        def observe(module: nn.Module, args: tuple[Any, ...]) -> None:
            if is_routed_call(args):
                shared = (args[0], module) if part is _up_inputs else (module,)
                self._see(target, shared, lambda inputs: part(module, layout, args, inputs.add))

        return site.module.register_forward_pre_hook(observe)

    def _see(self, target: Target, objects: tuple[object, ...], add: Callable[[Inputs], None]) -> None:
        """`objects`: what layers of the same inputs are given the same of."""
        given = tuple((one, version_of(one)) for one in objects)  # in place, a tensor becomes another input
        known = next((inputs for seen, inputs in self._seen if _are_same(seen, given)), None)
        inputs = self._of_target.get(target)
        if inputs is None:
            inputs = self._of_target[target] = known or Inputs()
            inputs.targets.append(target)
            if known is None:
                self.found.append(inputs)
        if known is inputs:
            return  # summed for the one that it shares them with
        inputs.runs_again |= any(inputs is seen for _, seen in self._seen)
        self._seen.append((given, inputs))
        if self.sums and self.only in (None, inputs):
            add(inputs)
        if self.only is inputs and not inputs.runs_again:
            raise Stop


def _are_same(some: _Given, others: _Given) -> bool:
    return len(some) == len(others) and all(
        a is b and version == other for (a, version), (b, other) in zip(some, others, strict=True)
    )


def _up_inputs(
    module: nn.Module, layout: ExpertsLayout, arguments: tuple[Any, ...], add: Callable[[int, Tensor], None]
) -> None:
    for rows in rows_of_experts(module, layout, arguments):
        add(rows.expert, rows.x_RH)


def _down_inputs(
    module: nn.Module, layout: ExpertsLayout, arguments: tuple[Any, ...], add: Callable[[int, Tensor], None]
) -> None:
    """What comes out of the gate, computed by the first weights as they are now: quantized or not."""
    assert layout.gate is not None
    for rows in rows_of_experts(module, layout, arguments):
        outputs = [multiply(module, layout, name, rows.expert, rows.x_RH) for name in layout.up]
        add(rows.expert, layout.gate(module, *outputs))
