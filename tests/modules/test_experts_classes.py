"""Every class of expert blocks that the installed transformers decorates, enumerated from its sources.

Each is built small from its own config, quantized, and compared: weight-only in fp32 with its dequantized self under
transformers' own code, and W4A4 in float64 with a reference that knows only the flags. float64, because a value that
another order of sums moves across a tie would be another code.
"""

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from experts_classes import EXPERTS, build, decorated_classes, width_of
from moe_reference import assert_block, block64, routing, run

import mxquant.integrations.transformers  # noqa: F401, registers the implementation
from mxquant import MXTensor, dequantize_, quantize_, register_experts_layout, summary
from mxquant.modules.experts_layouts import experts_layout

CLASSES = decorated_classes()
SKIPPED: dict[str, str] = {}
"""Class to the reason why it is not quantized. There is none."""
IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm", "mxquant")
NAMES = [name for _, name in CLASSES]


def stacks(experts: nn.Module) -> list[str]:
    return [name for name, parameter in experts.named_parameters() if parameter.dim() == 3]


def test_the_classes_are_found() -> None:
    """Fewer would mean that the decorator is called or written otherwise, not that there are none."""
    assert len(CLASSES) >= 55
    assert {"MixtralExperts", "Qwen3MoeExperts", "GptOssExperts", "NemotronHExperts"} <= set(NAMES)
    assert not SKIPPED.keys() - set(NAMES)


@pytest.mark.parametrize("module, name", CLASSES, ids=NAMES)
def test_quantized_block_matches_its_dequantized_block(module: str, name: str) -> None:
    if name in SKIPPED:
        pytest.skip(SKIPPED[name])
    experts = build(module, name)
    quantize_(experts, {"moe": {"weight": "mxfp4", "activation": None}})
    rows = summary(experts).quantized
    assert [(row.name, row.kind) for row in rows] == [(name, "moe") for name in stacks(experts)]
    assert len(rows) == 2

    dense = copy.deepcopy(experts)
    dequantize_(dense)
    assert not [p for p in dense.parameters() if isinstance(p, MXTensor)]
    x = torch.randn(6, width_of(dense))
    ids, weights = routing(6, EXPERTS)
    expected = run(dense, "eager", x, ids, weights).double()
    for implementation in IMPLEMENTATIONS:
        assert_block(run(experts, implementation, x, ids, weights), expected, 1e-5)


@pytest.mark.parametrize("module, name", CLASSES, ids=NAMES)
def test_both_matmuls_quantize_their_activations(module: str, name: str) -> None:
    if name in SKIPPED:
        pytest.skip(SKIPPED[name])
    experts = build(module, name).double()
    quantize_(experts, "mxfp4")
    x = torch.randn(6, width_of(experts), dtype=torch.float64)
    ids, weights = routing(6, EXPERTS)
    expected = block64(experts, x, ids, weights, "mxfp4")
    # Some blocks go through fp32 on their way: Beam and Inkling in their gates, the privacy filter throughout "eager".
    for implementation in IMPLEMENTATIONS:
        assert_block(run(experts, implementation, x, ids, weights.double()), expected, 1e-5)
    assert not torch.allclose(block64(experts, x, ids, weights, "mxfp4", quantizes_twice=False), expected, rtol=1e-2)


def test_the_layout_follows_a_changed_instance() -> None:
    experts = build("transformers.models.gpt_oss.modeling_gpt_oss", "GptOssExperts")
    before = experts_layout(experts)
    assert before is not None
    assert before.k_axis == {"gate_up_proj": -2, "down_proj": -2}
    assert before.biases == {"gate_up_proj": "gate_up_proj_bias", "down_proj": "down_proj_bias"}
    experts.has_bias = False
    without = experts_layout(experts)
    assert without is not None
    assert without.biases == {}
    experts.is_transposed = False
    turned = experts_layout(experts)
    assert turned is not None
    assert turned.k_axis == {"gate_up_proj": -1, "down_proj": -1}
    experts.has_gate = False  # its weight would be called up_proj
    assert experts_layout(experts) is None
    experts.has_gate, experts.is_transposed, experts.has_bias = True, True, True
    assert experts_layout(experts) == before
    del experts.down_proj
    assert experts_layout(experts) is None


def test_a_layout_that_is_registered_later_counts() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(2, 32, 32))

    class Derived(Block):
        pass

    block = Derived()
    assert experts_layout(block) is None
    register_experts_layout(Block, {"w": -1})
    assert experts_layout(block).k_axis == {"w": -1}  # type: ignore[union-attr]
    register_experts_layout(Derived, {"w": -2})
    assert experts_layout(block).k_axis == {"w": -2}  # type: ignore[union-attr]
