"""Which layout an expert block has: the user's, the table's, or the one that transformers' decorator describes.

No other module is taken for experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mxquant.modules.experts import ExpertsLayout, decorated_layout
from mxquant.modules.families import family_layouts
from mxquant.modules.gates import default_gate

_registered: dict[type[nn.Module], ExpertsLayout] = {}


def register_experts_layout(
    cls: type[nn.Module],
    k_axis: Mapping[str, int],
    *,
    biases: Mapping[str, str] | None = None,
    up: str | Sequence[str] = (),
    down: str | None = None,
    gate_order: str | None = None,
    gate: Callable[..., Tensor] | None = None,
    post_norm: str | None = None,
    router_weight: str = "output",
    num_experts: str | None = None,
) -> None:
    """Tell `quantize_` how a class of expert blocks stacks its weights. Holds for its subclasses too.

    `k_axis` alone makes the weights quantizable. The class's own forward multiplies with them, through `W[e]`,
    `W[ids]`, `torch.bmm` or `torch._grouped_mm`. With `up` and `down`, `mxquant.experts_forward` computes the block.

    Args:
        cls: the module's class. A second call for it replaces the first.
        k_axis: the axis that the matmul contracts, by the weight's name: -1 for [experts, N, K], as F.linear takes a
            weight; -2 for [experts, K, N], as in `x @ weight`.
        biases: the name of the bias [experts, N], by the weight's name. Biases are not quantized.
        up: the name of the first matmul's weight, or of two, gate and up.
        down: the name of the second matmul's weight.
        gate_order: where the default gate finds gates: "halves" (all gates, then all ups), "interleaved" (gate, up,
            gate, up, ...), "separate" (two weights); None: no gates.
        gate: `(module, *outputs of up) -> input of down`. The default is silu(gate) * up, or silu(up) without gates.
        post_norm: the name of a submodule that each expert's output goes through, before the router's weight.
        router_weight: whether the router's weight multiplies each expert's "output" or its "input".
        num_experts: the attribute with the number of experts, for 2-D parameters that hold the experts' matrices one
            below the other, [experts * N, K]. They are 3-D while they are quantized.

    Raises:
        TypeError: `cls` is no class of modules, or an argument of the wrong kind.
        ValueError: an axis or option that is unknown, or a name that `k_axis` lacks.
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise TypeError(f"register_experts_layout takes a subclass of torch.nn.Module; got {cls!r}")
    names = (up,) if isinstance(up, str) else tuple(up)
    _check_kinds(k_axis, biases or {}, num_experts, gate)
    default = default_gate(gate_order)
    expected = 2 if gate_order == "separate" else 1
    if names and gate is None and len(names) != expected:
        raise ValueError(
            f"gate_order={gate_order!r} goes with {expected} of the weights in up, not {list(names)}; name them, or "
            "pass a gate that takes their outputs"
        )
    _registered[cls] = ExpertsLayout(
        k_axis=dict(k_axis),
        biases=dict(biases or {}),
        up=names,
        down=down,
        gate=gate or (default if names else None),
        post_norm=post_norm,
        router_weight=router_weight,
        num_experts=num_experts,
    )
    _cached_layouts_of.cache_clear()


def _check_kinds(k_axis: Any, biases: Any, num_experts: Any, gate: Any) -> None:
    for what, value in (("k_axis", k_axis), ("biases", biases)):
        if not isinstance(value, Mapping):
            raise TypeError(f"{what} is a dict by the names of weights; got {value!r}")
    if num_experts is not None and not isinstance(num_experts, str):
        raise TypeError(f"num_experts is an attribute's name, as a string; got {num_experts!r}")
    if gate is not None and not callable(gate):
        raise TypeError(f"gate is a function (module, *outputs of up) -> input of down; got {gate!r}")


def experts_layout(module: nn.Module) -> ExpertsLayout | None:
    """The layout of an expert block; None for a module that is not known to be one.

    Raises:
        ValueError: the layout that the user registered for its class names a parameter that it does not have.
    """
    # NOTE: Dynamo warns about lru_cache, and traces this only once a graph.
    layouts_of = _layouts_of if torch.compiler.is_compiling() else _cached_layouts_of
    registered, families = layouts_of(type(module))  # type: ignore[arg-type]
    if registered is not None:
        if not registered.fits(module):
            cls = next(base for base in type(module).__mro__ if base in _registered)
            raise ValueError(
                f"the experts layout registered for {cls.__name__} names "
                f"{[*registered.k_axis, *registered.biases.values()]}; this {type(module).__name__} has the parameters "
                f"{list(module._parameters)}"
            )
        return registered
    for layout in families:
        if layout.fits(module):
            return layout
    return decorated_layout(module)


def _layouts_of(cls: type[nn.Module]) -> tuple[ExpertsLayout | None, tuple[ExpertsLayout, ...]]:
    """The layout registered for a class or the nearest one that it derives from, and the table's layouts."""
    registered = (_registered[base] for base in cls.__mro__ if base in _registered)
    return next(registered, None), family_layouts(cls)


# Asked in every forward. Which of a class's layouts fits depends on the instance, and is not cached.
_cached_layouts_of = functools.lru_cache(maxsize=256)(_layouts_of)


def unknown_experts(module: nn.Module) -> str:
    """Why the stacked weights of a module without a layout are skipped."""
    name = type(module).__name__
    if type(module).__module__.startswith("torch.nn."):
        return f"stacked experts in a bare {name}: a class of their own can have a layout, with register_experts_layout"
    return f"stacked experts of unknown layout: register_experts_layout({name}, ...) tells the K axis"
