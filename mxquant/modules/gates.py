"""Gate functions of expert blocks, and which of them kernels compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from mxquant.reference.gated_activation import GatedActivation

GATE_ORDERS = ("halves", "interleaved", "separate")
"""All gates before all ups in one weight; gate, up, gate, up, ...; two weights."""


def transformers_gate(module: Any, gate_up: Tensor) -> Tensor:
    """The gate of a block that transformers decorates."""
    return module._apply_gate(gate_up)


def default_gate(gate_order: str | None) -> Callable[..., Tensor]:
    """silu(gate) * up, or silu(up) without gates: `(module, *outputs of up) -> input of down`."""
    if gate_order is not None and gate_order not in GATE_ORDERS:
        accepted = ", ".join(map(repr, GATE_ORDERS))
        raise ValueError(f"gate_order={gate_order!r} is unknown; use one of {accepted}, or None without gates")
    if gate_order is None:
        return lambda module, up: F.silu(up)
    if gate_order == "separate":
        return lambda module, gate, up: F.silu(gate) * up
    return GatedActivation(gate_order == "interleaved")


def known_gate(gate: Callable[..., Tensor], module: Any) -> GatedActivation | None:
    """The gate as data if kernels compute it, else None.

    A block of transformers is known by its class's gate function, unless the instance has a gate of its own.
    """
    if isinstance(gate, GatedActivation):
        return gate
    if gate is not transformers_gate or "_apply_gate" in vars(module):
        return None
    name = getattr(type(module)._apply_gate, "__qualname__", "")
    if name == "GptOssExperts._apply_gate":
        return GatedActivation(True, float(module.limit), float(module.alpha))
    if name == "_default_apply_gate" and _is_silu(module.act_fn):
        return GatedActivation(False)
    return None


def _is_silu(activation: Any) -> bool:
    """Whether a module computes silu and nothing else. Newer releases of transformers have a class of their own."""
    cls = type(activation)
    if not isinstance(activation, nn.Module) or "forward" in vars(activation):
        return False
    if activation._forward_hooks or activation._forward_pre_hooks:
        return False
    return cls is nn.SiLU or (cls.__module__, cls.__name__) == ("transformers.activations", "SiLUActivation")
