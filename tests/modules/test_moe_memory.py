"""What an emulated block of experts takes beyond its weights: never more than a few experts dequantized."""

import copy
from typing import Any

import pytest
import torch
from allocations import allocations
from torch import nn

pytest.importorskip("transformers")

from moe_reference import routing
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import mxquant.integrations.transformers  # noqa: F401, registers the implementation
from mxquant import dequantize_, quantize_

E, H, F = 16, 768, 768
EXPERT = 3 * F * H * 2
"""Bytes of one expert's weights in bf16."""
BOUND = max(2 * EXPERT, E * EXPERT // 20)


def experts(implementation: str) -> Any:
    config = MixtralConfig(hidden_size=H, intermediate_size=F, num_local_experts=E)
    config._experts_implementation = implementation
    block = MixtralExperts(config).to(torch.bfloat16).requires_grad_(False)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.05)
    return block


@pytest.mark.usefixtures("fixed_backends")
@pytest.mark.parametrize("tokens", [1, 16])
@pytest.mark.parametrize("implementation", ["mxquant", "grouped_mm", "eager"])
@pytest.mark.parametrize("weight, activation", [("mxfp4", "mxfp4"), ("mxfp4", None), ("nvfp4", "nvfp4")])
def test_experts_are_never_dequantized_all_at_once(
    weight: str, activation: str | None, implementation: str, tokens: int
) -> None:
    """Every expert is hit by 16 tokens of 4 experts each, or nearly."""
    block = experts(implementation)
    quantize_(block, {"moe": {"weight": weight, "activation": activation}})
    x = torch.randn(tokens, H, dtype=torch.bfloat16)
    ids, weights = routing(tokens, E, 4)
    weights = weights.to(torch.bfloat16)
    with torch.no_grad():
        block(x, ids, weights)  # tables that are made once
        used = allocations(lambda: block(x, ids, weights))
    assert used.peak <= BOUND
    assert used.largest <= EXPERT


def test_memory_check_notices_dequantizing() -> None:
    """The control of the test above."""
    block = experts("grouped_mm")
    quantize_(block, "mxfp4")
    assert allocations(lambda: dequantize_(copy.copy(block))).peak > E * EXPERT // 2


def test_quantizing_a_stack_needs_little_extra_memory() -> None:
    """The result and the temporaries of one expert, whichever axis is K."""
    block = experts("eager")
    used = allocations(lambda: quantize_(copy.copy(block), "mxfp4"))
    packed = E * EXPERT * 17 // 64
    assert used.peak < packed + 8 * EXPERT
