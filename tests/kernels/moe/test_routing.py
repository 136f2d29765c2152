"""To the experts and back in two kernels, and the gate between in one, against torch's operators."""

import pytest
import torch
from torch import Tensor

from mxquant.kernels.moe.gated_activation import gated_activation
from mxquant.kernels.moe.routing import combine, route
from mxquant.reference import routing
from mxquant.reference.gated_activation import GatedActivation


def ids_of(tokens: int, choices: int, experts: int) -> Tensor:
    """With ids of other ranks: one beyond, far beyond, negative."""
    ids = torch.randint(0, experts, (tokens, choices))
    ids.view(-1)[::5] = experts
    ids.view(-1)[3::11] = -1
    ids.view(-1)[4::13] = experts + 1000
    return ids


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(
    "tokens, choices, experts", [(1, 1, 1), (1, 4, 128), (37, 4, 9), (300, 8, 60), (5, 2, 3)], ids=str
)
def test_routes_are_those_of_the_twin(
    tokens: int, choices: int, experts: int, dtype: torch.dtype, device: torch.device
) -> None:
    ids = ids_of(tokens, choices, experts).to(dtype)
    expected = routing.route(ids, experts)
    for ours, theirs in zip(route(ids.to(device), experts), expected):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours.cpu(), theirs)


def test_another_order_of_equal_pairs_would_show() -> None:
    order = routing.route(torch.tensor([[1, 0], [1, 0]]), 2).order_S
    assert order.tolist() == [1, 3, 0, 2]


@pytest.mark.parametrize("weights_dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [40, 1024, 2880])
def test_sums_are_those_of_the_twin(
    width: int, dtype: torch.dtype, weights_dtype: torch.dtype | None, device: torch.device
) -> None:
    """Sums of four fp32 products in one order; torch may fuse none of them: a rounding of fp32 each. Pairs of no expert
    here count nothing, even where their weight is NaN.
    """
    ids = ids_of(9, 4, 6)
    routed = routing.route(ids, 6)
    y = torch.randn(36, width).to(dtype)
    weights = None if weights_dtype is None else torch.rand(9, 4).to(weights_dtype)
    if weights is not None:
        weights[~routed.is_local_TK] = torch.nan
    on_device = routing.Routing(*(tensor.to(device) for tensor in routed))
    there = None if weights is None else weights.to(device)
    ours = combine(y.to(device), on_device, there, torch.float32)
    expected = routing.combine(y, routed, weights, torch.float32)
    torch.testing.assert_close(ours.cpu(), expected, rtol=0, atol=8 * 2**-24 * y.float().abs().max().item())
    half = combine(y.to(device), on_device, there, torch.bfloat16)
    assert torch.equal(half.cpu(), ours.cpu().bfloat16())


@pytest.mark.parametrize(
    "known",
    [
        GatedActivation(False),
        GatedActivation(True),
        GatedActivation(True, 7.0, 1.702),
        GatedActivation(False, 0.5, 1.0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [40, 1100])
def test_gates_are_those_of_the_twin(
    width: int, dtype: torch.dtype, known: GatedActivation, device: torch.device
) -> None:
    """Each step is rounded alike; the exponential may differ in its last bit, and so each of four steps by an ulp."""
    both = (4 * torch.randn(7, 2 * width)).to(dtype)
    both[2, 3], both[3, 4] = torch.nan, torch.inf
    ours = gated_activation(both.to(device), known)
    expected = known(None, both)
    rtol = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(ours.cpu(), expected, rtol=rtol, atol=rtol * 1e-3, equal_nan=True)


def test_gate_and_up_swapped_would_show(device: torch.device) -> None:
    both = torch.randn(3, 64).bfloat16()
    ours = gated_activation(both.to(device), GatedActivation(False)).cpu()
    assert not torch.allclose(ours, GatedActivation(False)(None, both.roll(32, 1)), rtol=0.1)
    assert not torch.allclose(ours, GatedActivation(True)(None, both), rtol=0.1)
