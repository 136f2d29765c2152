"""Experts whose weights are rotated compute what their dequantized selves do."""

import copy

import pytest
import torch
from torch import Tensor, nn

from mxquant import MXTensor, dequantize_, experts_forward, quantize_, register_experts_layout

EXPERTS, HIDDEN, WIDTH = 3, 64, 96


class Experts(nn.Module):
    """[E, N, K] or, transposed, [E, K, N]."""

    def __init__(self, transposed: bool = False, width: int = WIDTH) -> None:
        super().__init__()
        up, down = torch.randn(EXPERTS, 2 * width, HIDDEN), torch.randn(EXPERTS, HIDDEN, width)
        self.up = nn.Parameter((up.mT if transposed else up).contiguous())
        self.down = nn.Parameter((down.mT if transposed else down).contiguous())
        self.up_bias = nn.Parameter(torch.randn(EXPERTS, 2 * width))


class TransposedExperts(Experts):
    def __init__(self) -> None:
        super().__init__(transposed=True)


LAYOUT = {"up": "up", "down": "down", "gate_order": "halves", "biases": {"up": "up_bias"}}
register_experts_layout(Experts, {"up": -1, "down": -1}, **LAYOUT)  # type: ignore[arg-type]
register_experts_layout(TransposedExperts, {"up": -2, "down": -2}, **LAYOUT)  # type: ignore[arg-type]


def tokens() -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.tensor([[0, 1], [2, 0], [1, 2], [0, 2]])
    return torch.randn(4, HIDDEN), ids, torch.rand(4, 2)


@pytest.mark.parametrize("make", [Experts, TransposedExperts])
@pytest.mark.parametrize("format, rotation", [("mxfp4", 32), ("nvfp4", 16)])
def test_weight_only(make: type[Experts], format: str, rotation: int) -> None:
    experts = make()
    original = copy.deepcopy(experts)
    quantize_(experts, {"moe": {"weight": format, "activation": None, "rotation": rotation}})
    ordinary = copy.deepcopy(experts)
    dequantize_(ordinary)
    assert (ordinary.up - original.up).norm() < 0.15 * original.up.norm()  # not the rotated values
    arguments = tokens()
    y, expected = experts_forward(experts, *arguments), experts_forward(ordinary, *arguments)
    assert (y - expected).norm() < 1e-5 * y.norm()  # fp32 sums in another order
    assert (y - experts_forward(original, *arguments)).norm() > 0.05 * y.norm()  # four bits cost something


def test_activations_are_rotated_before_they_are_quantized() -> None:
    """Outliers in one place of the input, which ruin their blocks' neighbours, are spread."""
    experts = Experts()
    x, ids, weights = tokens()
    x[:, 7] *= 100
    exact = experts_forward(experts, x, ids, weights)
    error = {}
    for rotation in (None, 32):
        quantized = copy.deepcopy(experts)
        quantize_(quantized, {"moe": {"weight": "mxfp8", "activation": "mxfp4", "rotation": rotation}})
        error[rotation] = (experts_forward(quantized, x, ids, weights) - exact).norm() / exact.norm()
    assert error[32] < 0.7 * error[None]  # seen: 0.16 and 0.31


def test_width_that_the_rotation_does_not_divide_is_refused_before_any_change() -> None:
    experts = Experts(width=40)
    with pytest.raises(ValueError, match=r"down \(3, 64, 40\): rotation=32 needs"):
        quantize_(experts, {"moe": {"weight": "mxfp4", "rotation": 32}})
    assert not isinstance(experts.up, MXTensor)
