"""What happens to activations before a product, as data. `activation` does it."""

from __future__ import annotations

from typing import NamedTuple

from mxquant.reference.gated_activation import GatedActivation


class Prologue(NamedTuple):
    scale_mode: str | None
    """They are quantized to MXFP4 in this scale mode, and rescaled to FP8. None: not quantized, rescaled to FP16."""
    rotated: bool = False
    """bf16 rows that are quantized are rotated first, in blocks of 32 columns: in fp32, rounded to bf16."""
    gate: GatedActivation | None = None
    """Rows, bf16 [M, 2K], go through this before all else. The result is rounded to bf16."""
