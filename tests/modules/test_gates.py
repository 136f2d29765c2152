"""Which gates kernels stand in for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from experts_classes import build

from mxquant.modules.gates import known_gate, transformers_gate

MIXTRAL = ("transformers.models.mixtral.modeling_mixtral", "MixtralExperts")


def hooked(block: Any) -> None:
    block.act_fn.register_forward_hook(lambda module, given, output: output * 0.5)


def own_activation(block: Any) -> None:
    block.act_fn.forward = torch.tanh


def own_gate(block: Any) -> None:
    block._apply_gate = lambda both: both.chunk(2, -1)[1]


@pytest.mark.parametrize("change", [hooked, own_activation, own_gate])
def test_changed_gate_is_not_replaced_by_a_kernel(change: Callable[[Any], None]) -> None:
    """Not the one that kernels know by the block's class."""
    block = build(*MIXTRAL)
    assert known_gate(transformers_gate, block) is not None
    change(block)
    assert known_gate(transformers_gate, block) is None
