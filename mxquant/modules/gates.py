"""Gate functions: those that a kernel knows, as data, and how a block's own is applied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from mxquant.modules.routing import runs_kernels


@dataclass(frozen=True)
class KnownGate:
    """silu(gate) * up; with `limit` and `alpha` the clamped gate of gpt-oss, (up + 1) * gate * sigmoid(alpha * gate).

    Called as any gate, `(module, gate and up [S, 2F]) -> [S, F]`: gates then ups, or gate, up, gate, up where
    `interleaved`.
    """

    interleaved: bool
    limit: float | None = None
    alpha: float | None = None

    def __call__(self, module: Any, both_S2F: Tensor) -> Tensor:
        if self.interleaved:
            gate, up = both_S2F[..., ::2], both_S2F[..., 1::2]
        else:
            gate, up = both_S2F.chunk(2, -1)
        if self.limit is None or self.alpha is None:
            return F.silu(gate) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * (gate * (gate * self.alpha).sigmoid())


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
    return KnownGate(gate_order == "interleaved")


def apply_gate(gate: Callable[..., Tensor], module: nn.Module, outputs: list[Tensor]) -> Tensor:
    """`gate(module, *outputs)`, in one kernel on a GPU where it is one that the kernel knows."""
    known = _known(gate, module)
    if known is None or not runs_kernels(*outputs) or not outputs[0].is_contiguous():
        return gate(module, *outputs)
    from mxquant.kernels.gate import gate as gate_kernel

    return gate_kernel(outputs[0], known.interleaved, known.limit, known.alpha)


def _known(gate: Callable[..., Tensor], module: Any) -> KnownGate | None:
    """The gate as data. Of a block of transformers, told by the function that its class has for it."""
    if isinstance(gate, KnownGate):
        return gate
    if gate is not transformers_gate:
        return None
    name = getattr(type(module)._apply_gate, "__qualname__", "")
    if name == "GptOssExperts._apply_gate":
        return KnownGate(True, float(module.limit), float(module.alpha))
    if name == "_default_apply_gate" and isinstance(module.act_fn, nn.SiLU):
        return KnownGate(False)
    return None
