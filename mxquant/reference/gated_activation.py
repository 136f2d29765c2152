"""The gated activations that kernels know, as data: between the two matmuls of an expert.

Kernels: `mxquant.kernels.moe.gated_activation` alone, and the activation prologue of the second matmul.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class GatedActivation:
    """silu(gate) * up; with `limit` and `alpha` gpt-oss's clamped (up + 1) * gate * sigmoid(alpha * gate).

    Called as any gate of a block: `(module, gates and ups [S, 2F]) -> [S, F]`. Gates come before ups, or alternate with
    them if `interleaved`. Each step is rounded to the input's dtype.
    """

    interleaved: bool
    limit: float | None = None
    alpha: float | None = None

    def __call__(self, module: Any, gate_up_S2F: Tensor) -> Tensor:
        if self.interleaved:
            gate, up = gate_up_S2F[..., ::2], gate_up_S2F[..., 1::2]
        else:
            gate, up = gate_up_S2F.chunk(2, -1)
        if self.limit is None or self.alpha is None:
            return F.silu(gate) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * (gate * (gate * self.alpha).sigmoid())
