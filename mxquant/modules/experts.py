"""How expert blocks stack their weights: which axis a matmul contracts, where biases and gates are.

A 3-D parameter does not say which of its axes is K, and sizes do not tell: a layout does. `mxquant.modules.registry`
finds that of a module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from mxquant.modules.gates import transformers_activation, transformers_gate

GATE_ORDERS = ("halves", "interleaved", "separate")
_ROUTER_WEIGHTS = ("output", "input")


@dataclass(frozen=True, kw_only=True)
class ExpertsLayout:
    """The parameters of one class of expert blocks. `register_experts_layout` explains the fields."""

    k_axis: Mapping[str, int]
    biases: Mapping[str, str] = field(default_factory=dict)
    up: tuple[str, ...] = ()
    down: str | None = None
    gate_order: str | None = None
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
        if self.gate_order is not None and self.gate_order not in GATE_ORDERS:
            accepted = ", ".join(map(repr, GATE_ORDERS))
            raise ValueError(f"gate_order={self.gate_order!r} is unknown; use one of {accepted}, or None without gates")
        if self.router_weight not in _ROUTER_WEIGHTS:
            raise ValueError(f"router_weight={self.router_weight!r} is unknown; use 'output' or 'input'")

    def fits(self, module: nn.Module) -> bool:
        """Whether the module has every weight that is named here, and a place for every bias, which may be None."""
        return all(module._parameters.get(name) is not None for name in self.k_axis) and all(
            name in module._parameters for name in self.biases.values()
        )

    def stack_of(self, module: nn.Module) -> int | None:
        """The number of experts, where 2-D parameters hold their matrices one below the other; else None."""
        if self.num_experts is None:
            return None
        count = getattr(module, self.num_experts, None)
        if not isinstance(count, int) or count < 1:
            raise ValueError(
                f"num_experts={self.num_experts!r} of the layout of {type(module).__name__} names an attribute that is "
                f"{count!r}; it must be the number of experts, a positive int"
            )
        return count


def decorated_layout(module: nn.Module) -> ExpertsLayout | None:
    """From the attributes that transformers' `use_experts_implementation` leaves on every instance of a class that it
    decorates. Which there are depends on its version.
    """
    is_transposed, has_bias = getattr(module, "is_transposed", None), getattr(module, "has_bias", None)
    if not isinstance(is_transposed, bool) or not isinstance(has_bias, bool):
        return None
    has_gate = bool(getattr(module, "has_gate", True))
    up = "gate_up_proj" if has_gate else "up_proj"
    axis = -2 if is_transposed else -1
    order = "halves" if getattr(module, "is_concatenated", True) else "interleaved"
    layout = ExpertsLayout(
        k_axis={up: axis, "down_proj": axis},
        biases={up: f"{up}_bias", "down_proj": "down_proj_bias"} if has_bias else {},
        up=(up,),
        down="down_proj",
        gate_order=order if has_gate else None,
        gate=transformers_gate if has_gate else transformers_activation,
        post_norm="post_expert_norm" if getattr(module, "has_post_expert_norm", False) else None,
    )
    return layout if layout.fits(module) else None
