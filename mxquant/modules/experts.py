"""How expert blocks stack their weights: which axis a matmul contracts, and which biases and gate belong to them.

A 3-D parameter and its sizes do not tell which axis is K; a layout does. `mxquant.modules.experts_layouts` finds the
layout of a module.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from mxquant.modules.gates import transformers_gate

_ROUTER_WEIGHTS = ("output", "input")


@dataclass(frozen=True, kw_only=True)
class ExpertsLayout:
    """The parameters of one class of expert blocks. `register_experts_layout` explains the fields."""

    k_axis: Mapping[str, int]
    biases: Mapping[str, str] = field(default_factory=dict)
    up: tuple[str, ...] = ()
    down: str | None = None
    gate: Callable[..., Tensor] | None = None
    post_norm: str | None = None
    router_weight: str = "output"
    num_experts: str | None = None

    def __post_init__(self) -> None:
        if not self.k_axis:
            raise ValueError("k_axis is empty: name the weights, each with the axis that its matmul contracts")
        for name, axis in self.k_axis.items():
            if type(axis) is not int or axis not in (-1, -2):
                raise ValueError(
                    f"k_axis of {name!r} is {axis!r}; -1 for [experts, N, K], as F.linear takes a weight, or -2 for "
                    "[experts, K, N], as in x @ weight"
                )
        for what, names in (("biases", self.biases), ("up", self.up), ("down", (self.down,) if self.down else ())):
            if unknown := set(names) - set(self.k_axis):
                raise ValueError(f"{what} names {sorted(unknown)}, which k_axis lacks; it has {', '.join(self.k_axis)}")
        if self.router_weight not in _ROUTER_WEIGHTS:
            raise ValueError(f"router_weight={self.router_weight!r} is unknown; use 'output' or 'input'")

    @property
    def is_computable(self) -> bool:
        """Whether it names the up and down projections and the gate, so that the block can be computed by it."""
        return bool(self.up) and self.down is not None and self.gate is not None

    def fits(self, module: nn.Module) -> bool:
        """Whether the module has every weight, and a place for every bias, which may be None."""
        parameters = module._parameters
        return all(parameters.get(name) is not None for name in self.k_axis) and all(
            name in parameters for name in self.biases.values()
        )

    def matrices(self, module: nn.Module, weight: Tensor) -> Tensor:
        """A weight of the module as a stack of matrices, one an expert: [E, N, K] or [E, K, N].

        Raises:
            ValueError: its rows cannot be cut into E matrices, or it is not 3-D.
        """
        count = None if self.num_experts is None else getattr(module, self.num_experts, None)
        if self.num_experts is not None and (not isinstance(count, int) or count < 1):
            raise ValueError(
                f"num_experts={self.num_experts!r} of the layout of {type(module).__name__} names an attribute that is "
                f"{count!r}; it must be the number of experts, a positive int"
            )
        if count is not None and weight.dim() == 2 and weight.shape[0] % count == 0:
            return weight.unflatten(0, (count, -1))
        if weight.dim() != 3:
            stack = "stack of" if count is None else f"stack of {count}"
            raise ValueError(f"shape {tuple(weight.shape)} is no {stack} matrices")
        return weight


def decorated_layout(module: nn.Module) -> ExpertsLayout | None:
    """The layout that transformers' `use_experts_implementation` describes by attributes of each instance.

    NOTE: older releases set fewer attributes. The defaults are what a block without the attribute is.
    """
    is_transposed, has_bias = getattr(module, "is_transposed", None), getattr(module, "has_bias", None)
    if not isinstance(is_transposed, bool) or not isinstance(has_bias, bool):
        return None
    has_gate = bool(getattr(module, "has_gate", True))
    has_post_norm = bool(getattr(module, "has_post_expert_norm", False))
    layout = _DECORATED[is_transposed, has_bias, has_gate, has_post_norm]
    return layout if layout.fits(module) else None


def _decorated_layout(is_transposed: bool, has_bias: bool, has_gate: bool, has_post_norm: bool) -> ExpertsLayout:
    up = "gate_up_proj" if has_gate else "up_proj"
    axis = -2 if is_transposed else -1
    return ExpertsLayout(
        k_axis={up: axis, "down_proj": axis},
        biases={up: f"{up}_bias", "down_proj": "down_proj_bias"} if has_bias else {},
        up=(up,),
        down="down_proj",
        gate=transformers_gate if has_gate else lambda module, up: module.act_fn(up),
        post_norm="post_expert_norm" if has_post_norm else None,
    )


_DECORATED = {flags: _decorated_layout(*flags) for flags in itertools.product((False, True), repeat=4)}
"""Made once, as every forward asks for a layout."""
