"""register_experts_layout: expert blocks of a user's own classes."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from moe_reference import assert_block
from torch import nn

from mxquant import MXTensor, experts_forward, quantize_, register_experts_layout, summary
from mxquant.modules.experts_layouts import experts_layout

EXPERTS = 4


class Mine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, 32, 90) / 9)
        self.down = nn.Parameter(torch.randn(EXPERTS, 64, 32) / 9)
        self.up_bias = nn.Parameter(torch.randn(EXPERTS, 90))


def test_an_unknown_stack_says_what_to_do() -> None:
    class Unknown(Mine):
        pass

    model = nn.ModuleDict({"experts": Unknown(), "fc": nn.Linear(32, 32)})
    quantize_(model, "mxfp4")
    reasons = {row.name: row.reason for row in summary(model).skipped}
    reason = "stacked experts of unknown layout: register_experts_layout(Unknown, ...) tells the K axis"
    assert reasons["experts.up"] == reasons["experts.down"] == reason
    with pytest.raises(NotImplementedError, match=re.escape(reason)):
        quantize_(Unknown(), {"moe": "mxfp4"})

    register_experts_layout(Unknown, {"up": -2, "down": -1}, biases={"up": "up_bias"})
    quantize_(model, {"moe": "mxfp4"})
    assert {row.name: row.shape for row in summary(model).quantized if row.kind == "moe"} == {
        "experts.up": (EXPERTS, 32, 90),
        "experts.down": (EXPERTS, 64, 32),
    }
    assert (model.experts.up.axis, model.experts.down.axis) == (-2, -1)
    assert {row.name: row.reason for row in summary(model).skipped}["experts.up_bias"] == "bias of experts"
    with pytest.raises(ValueError, match="does not name its up, down and gate; call register_experts_layout"):
        experts_forward(model.experts, *[torch.zeros(1, 1)] * 3)


GATES = {
    None: lambda h: F.silu(h),
    "halves": lambda h: F.silu(h[..., :45]) * h[..., 45:],
    "interleaved": lambda h: F.silu(h[..., ::2]) * h[..., 1::2],
}


@pytest.mark.parametrize("gate_order", GATES)
def test_the_default_gate_follows_the_order(gate_order: str | None) -> None:
    class Ordered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(EXPERTS, 90, 32) / 9)
            self.down = nn.Parameter(torch.randn(EXPERTS, 64, 90 if gate_order is None else 45) / 9)

    register_experts_layout(Ordered, {"up": -1, "down": -1}, up="up", down="down", gate_order=gate_order)
    block = Ordered().double()
    quantize_(block, {"moe": {"weight": "mxfp8", "activation": None}})
    x, ids = torch.randn(5, 32, dtype=torch.float64), torch.tensor([[0], [1], [1], [3], [2]])
    up, down = block.up.dequantize(), block.down.dequantize()
    expected = torch.stack(
        [down[e] @ GATES[gate_order](up[e] @ row) for row, (e,) in zip(x, ids.tolist(), strict=True)]
    )
    assert_block(experts_forward(block, x, ids, torch.ones(5, 1)), expected, 1e-6)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"k_axis": {"up": 1}}, ValueError, r"k_axis of 'up' is 1; -1 for \[experts, N, K\]"),
        ({"k_axis": {}}, ValueError, "k_axis is empty"),
        ({"k_axis": {"up": -1}, "down": "w2"}, ValueError, r"down names \['w2'\], which k_axis lacks; it has up"),
        ({"k_axis": {"up": -1}, "biases": {"w2": "b2"}}, ValueError, r"biases names \['w2'\]"),
        ({"k_axis": {"up": -1}, "gate_order": "swapped"}, ValueError, "gate_order='swapped' is unknown; use one of"),
        ({"k_axis": {"up": -1}, "router_weight": "before"}, ValueError, "router_weight='before' is unknown; use"),
        ({"k_axis": {"up": -2.0}}, ValueError, "k_axis of 'up' is -2.0"),
        ({"k_axis": ["up"]}, TypeError, r"k_axis is a dict by the names of weights; got \['up'\]"),
        ({"k_axis": {"up": -1}, "num_experts": 4}, TypeError, "num_experts is an attribute's name"),
        ({"k_axis": {"up": -1}, "up": "up", "gate": "silu"}, TypeError, "gate is a function .*; got 'silu'"),
        (
            {"k_axis": {"up": -1}, "up": "up", "gate_order": "separate"},
            ValueError,
            r"gate_order='separate' goes with 2 of the weights in up, not \['up'\]",
        ),
        ({"cls": Mine(), "k_axis": {"up": -1}}, TypeError, "takes a subclass of torch.nn.Module; got Mine"),
    ],
    ids=str,
)
def test_a_wrong_layout_is_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        register_experts_layout(**{"cls": Mine, **options})
    assert experts_layout(Mine()) is None


def test_a_layout_that_does_not_fit_the_module_is_refused() -> None:
    class Misnamed(Mine):
        pass

    register_experts_layout(Misnamed, {"w1": -1})
    with pytest.raises(ValueError, match=r"registered for Misnamed names \['w1'\]; this Misnamed has the parameters"):
        quantize_(Misnamed(), "mxfp4")


def test_rows_that_num_experts_does_not_divide_are_refused_before_any_change() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count, self.fc = 3, nn.Linear(32, 32)
            self.w1 = nn.Parameter(torch.randn(64, 32))

    register_experts_layout(Flat, {"w1": -1}, num_experts="count")
    block = Flat()
    with pytest.raises(
        ValueError, match=r"w1: shape \(64, 32\) is no stack of 3 .*; see register_experts_layout, or s"
    ):
        quantize_(block, "mxfp4")
    assert not isinstance(block.fc.weight, MXTensor)
    block.count = 4
    quantize_(block, "mxfp4")
    assert block.w1.shape == (4, 16, 32)


def test_tied_stacks_with_different_k_axes_are_skipped() -> None:
    class AlongLast(Mine):
        pass

    class AlongMiddle(Mine):
        pass

    register_experts_layout(AlongLast, {"up": -1})
    register_experts_layout(AlongMiddle, {"up": -2})
    model = nn.ModuleList([AlongLast(), AlongMiddle(), nn.Linear(32, 32)])
    model[1].up = model[0].up
    quantize_(model, "mxfp4")
    assert {row.name: row.reason for row in summary(model).skipped}[
        "0.up"
    ] == "tied weights that are not multiplied alike"
