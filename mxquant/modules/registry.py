"""Which layout a module of expert blocks has: the user's, the table's, or what transformers' decorator says.

Nothing else is taken for experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from mxquant.modules.experts import ExpertsLayout, decorated_layout
from mxquant.modules.families import family_layout
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

    `k_axis` alone makes the weights quantizable: the class's own forward then multiplies with them, through `W[e]`,
    `W[ids]`, `torch.bmm` or `torch._grouped_mm`. With `up`, `down` and `gate`, `mxquant.experts_forward` computes it.

    Args:
        cls: the module's class. A second call for it replaces the first.
        k_axis: for each weight's name the axis that its matmul contracts: -1 for [experts, N, K], as F.linear takes a
            weight; -2 for [experts, K, N], as in `x @ weight`.
        biases: for each weight's name, where it has one, that of its bias [experts, N], which is left as it is.
        up: the first matmul's weight, or two, gate and up, that see the same input.
        down: the second matmul's weight.
        gate_order: "halves" (all gates, then all ups), "interleaved" (gate, up, gate, up, ...), "separate" (two
            weights); None: no gate. For whoever splits the weights, and for a `gate` that is not given.
        gate: `(module, *outputs of up) -> input of down`; None with `up`: silu(gate) * up, as `gate_order` says, or
            silu(up) without gates.
        post_norm: a submodule's name: each expert's output goes through it, before the router's weight.
        router_weight: multiplied with each expert's "output", or with its "input".
        num_experts: for 2-D parameters that hold their experts' matrices one below the other, [experts * N, K]: the
            attribute with the number of experts. They are 3-D once quantized, until `dequantize_`.

    Raises:
        TypeError: `cls` is no class of modules, or an argument of the wrong kind.
        ValueError: an axis or option that is unknown, or a name that `k_axis` lacks.
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise TypeError(f"register_experts_layout takes a subclass of torch.nn.Module; got {cls!r}")
    names = (up,) if isinstance(up, str) else tuple(up)
    _check_kinds(k_axis, biases or {}, num_experts, gate)
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
        gate_order=gate_order,
        gate=gate or (default_gate(gate_order) if names else None),
        post_norm=post_norm,
        router_weight=router_weight,
        num_experts=num_experts,
    )


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
    for cls in type(module).__mro__:
        layout = _registered.get(cls)
        if layout is None:
            continue
        if not layout.fits(module):
            raise ValueError(
                f"the experts layout registered for {cls.__name__} names {[*layout.k_axis, *layout.biases.values()]}; "
                f"this {type(module).__name__} has the parameters {list(module._parameters)}"
            )
        return layout
    return family_layout(module) or decorated_layout(module)


def unknown_experts(module: nn.Module) -> str:
    """Why the stacked weights of a module without a layout are left as they are."""
    name = type(module).__name__
    if type(module).__module__.startswith("torch.nn."):
        return f"stacked experts in a bare {name}: a class of their own can have a layout, with register_experts_layout"
    return f"stacked experts of unknown layout: register_experts_layout({name}, ...) tells the K axis"
