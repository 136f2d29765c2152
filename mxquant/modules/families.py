"""The layouts of expert blocks that transformers' decorator does not describe: one entry a class.

The key is the package and the class, since two packages may have classes of one name. A class whose parameter names
differ between releases has several layouts; a module's is the first whose parameters it has. A layout without `up` and
`down` leaves the computation to the block's own forward. Read from transformers 5.17 to 5.24 and torchtitan 0.2.
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
            gate=_llama4_gate,
            router_weight="input",
        ),
    ),
    # Ids beyond the experts of down_proj are identity experts; gate_up_proj has rows for them that are never used.
    ("transformers", "LongcatFlashExperts"): (ExpertsLayout(k_axis={"gate_up_proj": -1, "down_proj": -1}),),
    ("transformers", "Step3p7Experts"): (
        ExpertsLayout(
            k_axis={"gate_up_proj": -1, "down_proj": -1},
            up=("gate_up_proj",),
            down="down_proj",
            gate=lambda module, gate_up: module._apply_gate(gate_up),
        ),
    ),
    # Half a block each: two of them, with the gate between, are one.
    ("transformers", "JetMoeParallelExperts"): (ExpertsLayout(k_axis={"weight": -1}),),
    ("transformers", "InklingSharedExperts"): (
        ExpertsLayout(k_axis={"gate_proj": -1, "up_proj": -1, "down_proj": -1}),
    ),
    ("transformers", "DbrxExpertGLU"): (
        ExpertsLayout(
            k_axis={"w1": -1, "v1": -1, "w2": -2},
            up=("w1", "v1"),
            down="w2",
            gate=lambda module, gate, up: module.activation_fn(gate) * up,
            num_experts="moe_num_experts",
        ),
    ),
    ("torchtitan", "GroupedExperts"): tuple(
        ExpertsLayout(
            k_axis={w1: -1, w3: -1, w2: -1},
            up=(w1, w3),
            down=w2,
            gate=default_gate("separate"),
        )
        for w1, w3, w2 in (("w1", "w3", "w2"), ("w1_EFD", "w3_EFD", "w2_EDF"))
    ),
    ("torchtitan", "GptOssGroupedExperts"): (
        ExpertsLayout(
            k_axis={"mlp1_weight": -1, "mlp2_weight": -1},
            biases={"mlp1_weight": "mlp1_bias", "mlp2_weight": "mlp2_bias"},
        ),
    ),
}


def family_layouts(cls: type[nn.Module]) -> tuple[ExpertsLayout, ...]:
    """The layouts in the table of a class and of those that it derives from, the nearest first."""
    keys = ((base.__module__.partition(".")[0], base.__name__) for base in cls.__mro__)
    return tuple(layout for key in keys for layout in FAMILIES.get(key, ()))
