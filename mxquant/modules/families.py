"""The expert blocks of models whose classes say nothing of their layout: one entry a class.

Keyed by the package and the class, since a name alone may be anybody's. Where a class had other parameter names in
another release, the first layout whose parameters a module has is its own. Without `up` and `down` a block's own
forward multiplies, through operators. Read from transformers 5.17 to 5.24 and torchtitan 0.2.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from mxquant.modules.experts import ExpertsLayout
from mxquant.modules.gates import default_gate


def _llama4_gate(module: Any, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return up * module.act_fn(gate)


FAMILIES: dict[tuple[str, str], tuple[ExpertsLayout, ...]] = {
    ("transformers", "Llama4TextExperts"): (
        ExpertsLayout(
            k_axis={"gate_up_proj": -2, "down_proj": -2},
            up=("gate_up_proj",),
            down="down_proj",
            gate_order="halves",
            gate=_llama4_gate,
            router_weight="input",
        ),
    ),
    # Ids beyond the experts of down_proj are identity experts; gate_up_proj has rows for them that are never used.
    ("transformers", "LongcatFlashExperts"): (
        ExpertsLayout(k_axis={"gate_up_proj": -1, "down_proj": -1}, gate_order="halves"),
    ),
    ("transformers", "Step3p7Experts"): (
        ExpertsLayout(
            k_axis={"gate_up_proj": -1, "down_proj": -1},
            up=("gate_up_proj",),
            down="down_proj",
            gate_order="halves",
            gate=lambda module, gate_up: module._apply_gate(gate_up),
        ),
    ),
    # Half a block each: two of them, with the gate between, are one.
    ("transformers", "JetMoeParallelExperts"): (ExpertsLayout(k_axis={"weight": -1}),),
    ("transformers", "InklingSharedExperts"): (
        ExpertsLayout(k_axis={"gate_proj": -1, "up_proj": -1, "down_proj": -1}, gate_order="separate"),
    ),
    ("transformers", "DbrxExpertGLU"): (
        ExpertsLayout(
            k_axis={"w1": -1, "v1": -1, "w2": -2},
            up=("w1", "v1"),
            down="w2",
            gate_order="separate",
            gate=lambda module, gate, up: module.activation_fn(gate) * up,
            num_experts="moe_num_experts",
        ),
    ),
    ("torchtitan", "GroupedExperts"): tuple(
        ExpertsLayout(
            k_axis={w1: -1, w3: -1, w2: -1},
            up=(w1, w3),
            down=w2,
            gate_order="separate",
            gate=default_gate("separate"),
        )
        for w1, w3, w2 in (("w1", "w3", "w2"), ("w1_EFD", "w3_EFD", "w2_EDF"))
    ),
    ("torchtitan", "GptOssGroupedExperts"): (
        ExpertsLayout(
            k_axis={"mlp1_weight": -1, "mlp2_weight": -1},
            biases={"mlp1_weight": "mlp1_bias", "mlp2_weight": "mlp2_bias"},
            gate_order="interleaved",
        ),
    ),
}


def family_layout(module: nn.Module) -> ExpertsLayout | None:
    """The layout of a module whose class, or one that it derives from, is in the table."""
    for cls in type(module).__mro__:
        layouts = FAMILIES.get((cls.__module__.partition(".")[0], cls.__name__), ())
        for layout in layouts:
            if layout.fits(module):
                return layout
    return None
