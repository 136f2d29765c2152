"""Gate functions of expert blocks, and which of them kernels know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from mxquant.reference.gated_activation import GatedActivation


def transformers_gate(module: Any, gate_up: Tensor) -> Tensor:
    """The gate of a block that transformers decorates."""
    return module._apply_gate(gate_up)


def transformers_activation(module: Any, up: Tensor) -> Tensor:
    """What stands for the gate in a decorated block without gates."""
    return module.act_fn(up)


def default_gate(gate_order: str | None) -> Callable[..., Tensor]:
    """silu(gate) * up, or silu(up) without gates: `(module, *outputs of up) -> input of down`."""
    if gate_order is None:
        return lambda module, up: F.silu(up)
    if gate_order == "separate":
        return lambda module, gate, up: F.silu(gate) * up
    return GatedActivation(gate_order == "interleaved")


def known_gate(gate: Callable[..., Tensor], module: Any) -> GatedActivation | None:
    """The gate as data, where kernels know it, else None. Of a block of transformers, told by the function that its
    class has for it, unless the block has one of its own.
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
    """Whether it is that and no more. Newer versions of transformers have a class of their own for it."""
    cls = type(activation)
    if not isinstance(activation, nn.Module) or "forward" in vars(activation):
        return False
    if activation._forward_hooks or activation._forward_pre_hooks:
        return False
    return cls is nn.SiLU or (cls.__module__, cls.__name__) == ("transformers.activations", "SiLUActivation")
