"""Grouped matmuls of a stack of weights on tensor cores, against float64, group by group."""

import pytest
import torch
from matmul_reference import activation64, assert_product, decode64
from native_cases import TENSOR_CORE_CASES, Case, needs_gpu
from poison import POISONS, poisoned_workspaces
from torch import Tensor

from mxquant import MXTensor, explain, quantize
from mxquant.backends import Groups
from mxquant.ops import route
from mxquant.reference.gated_activation import GatedActivation
from mxquant.tensor import as_weight, grouped_product

pytestmark = needs_gpu

# Experts, their N and K, tokens, choices: few rows and many, an odd number of tiles, every rest of K after 256 columns.
SIZES = [(8, 128, 288, 40, 2), (5, 192, 512, 7, 1), (16, 64, 2880, 130, 4), (3, 128, 768, 300, 2), (4, 64, 256, 1, 1),
         (2, 64, 448, 250, 2), (6, 64, 416, 64, 3), (2, 320, 480, 9, 1)]  # fmt: skip


def stack(case: Case, experts: int, n: int, k: int, device: torch.device) -> MXTensor:
    w = torch.randn(experts, n, k, device=device).bfloat16()
    return as_weight(quantize(w, case.format).with_activation(case.activation))


def check(y: Tensor, x: Tensor, weights: MXTensor, bias: Tensor | None, groups: Groups, case: Case) -> None:
    """Each group against its own matrix; rows of no expert are zero."""
    assert groups.rows is not None
    w64, x64 = decode64(weights.canonical()), activation64(x, case.activation)
    for expert, places in groups.on_host():
        rows = groups.rows[places]
        assert_product(y[places], x64[rows], w64[expert], None if bias is None else bias[expert])
    assert not y[int(groups.offsets[-1]) :].any()


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("case", TENSOR_CORE_CASES)
def test_groups(case: Case, size: tuple[int, ...], device: torch.device) -> None:
    """With experts that get nothing, ids of other ranks, and a row out of range."""
    experts, n, k, tokens, choices = size
    weights = stack(case, experts, n, k, device)
    assert explain(weights).chosen == case.backend
    x = torch.randn(tokens, k, device=device).bfloat16()
    x[tokens // 2, :32] *= 2.0**-60
    x[tokens // 2, 40] = 2.0**-90
    ids = torch.randint(0, experts + 1, (tokens, choices), device=device)
    ids[ids == 1] = experts
    routing = route(ids, experts)
    groups = Groups(routing.offsets_E, routing.token_S)
    bias = (k / 32 * torch.randn(experts, n, device=device)).bfloat16()  # above what is granted to a sum of K products
    check(grouped_product(x, weights, -1, groups), x, weights, None, groups, case)
    y = grouped_product(x, weights, -1, groups, bias)
    check(y, x, weights, bias, groups, case)
    assert torch.equal(grouped_product(x, weights, -1, groups, bias), y)
    if routing.offsets_E[-1] > 0:
        with pytest.raises(AssertionError):  # the control: a bias left out
            check(grouped_product(x, weights, -1, groups), x, weights, bias, groups, case)


@pytest.mark.parametrize("case", TENSOR_CORE_CASES)
def test_all_rows_in_one_group_and_none_at_all(case: Case, device: torch.device) -> None:
    weights = stack(case, 4, 128, 512, device)
    x = torch.randn(70, 512, device=device).bfloat16()
    for expert in (0, 3, 4):
        routing = route(torch.full((70, 1), expert, device=device), 4)
        groups = Groups(routing.offsets_E, routing.token_S)
        check(grouped_product(x, weights, -1, groups), x, weights, None, groups, case)
    nothing = grouped_product(x[:0], weights, -1, Groups(routing.offsets_E * 0, routing.token_S[:0]))
    assert nothing.shape == (0, 128)


@pytest.mark.parametrize("case", TENSOR_CORE_CASES)
def test_sorted_rows_need_no_gathering(case: Case, device: torch.device) -> None:
    weights = stack(case, 4, 128, 512, device)
    x = torch.randn(70, 512, device=device).bfloat16()
    offsets = torch.tensor([10, 10, 40, 60], dtype=torch.int32, device=device)
    rows = torch.arange(70, device=device)
    y = grouped_product(x, weights, -1, Groups(offsets))
    assert torch.equal(y, grouped_product(x, weights, -1, Groups(offsets, rows)))


# Experts, tokens, N and width inside an expert: one row and many, groups of one and more tiles, odd rests of columns.
GATED_SIZES = [
    (4, 1, 64, 256),
    (8, 40, 128, 288),
    (8, 16, 2880, 2880),
    (3, 500, 128, 704),
    (4, 2100, 64, 2880),
    (2, 70, 64, 16640),
]


@pytest.mark.parametrize("rotation", [None, 32])
@pytest.mark.parametrize("gate", [GatedActivation(False), GatedActivation(True), GatedActivation(True, 7.0, 1.702)])
@pytest.mark.parametrize("size", GATED_SIZES, ids=str)
@pytest.mark.parametrize("case", TENSOR_CORE_CASES)
def test_gated_groups(
    case: Case, size: tuple[int, ...], gate: GatedActivation, rotation: int | None, device: torch.device
) -> None:
    """Bit by bit what the gate's own kernel and the product of its rows give, amid poison; with rows out of range,
    NaN and Inf, and rows of no expert. Another gate shows.
    """
    from mxquant.kernels.moe.gated_activation import gated_activation  # imports triton, which is not everywhere

    experts, places, n, k = size
    w = quantize(torch.randn(experts, n, k, device=device).bfloat16(), case.format, rotation=rotation)
    weights = as_weight(w.with_activation(case.activation))
    assert explain(weights).chosen == case.backend
    both = 3 * torch.randn(places, 2 * k, device=device).bfloat16()
    both[places // 2, :64] *= 2.0**-60
    both[places // 2, k : k + 64] *= 2.0**-60
    both[places // 3, 5] = torch.nan if places > 1 else 1.0
    both[places // 4, 3 : 2 * k : k] = torch.inf if places > 1 else 1.0
    end = max(1, places - 3)
    ends = torch.randint(0, end + 1, (experts,), device=device).sort().values.to(torch.int32)
    ends[-1] = end
    groups = Groups(ends)
    expected = grouped_product(gated_activation(both, gate), weights, -1, groups)
    for byte in POISONS:
        with poisoned_workspaces(byte):
            y = grouped_product(both, weights, -1, groups, gate=gate)
        assert torch.equal(y.nan_to_num(), expected.nan_to_num())
        assert torch.equal(y.isnan(), expected.isnan())
    other = GatedActivation(not gate.interleaved, gate.limit, gate.alpha)
    assert not torch.equal(grouped_product(both, weights, -1, groups, gate=other).nan_to_num(), expected.nan_to_num())
