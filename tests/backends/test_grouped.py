"""The protocol of grouped matmuls: who is asked, what a backend gets, and what the default makes of `matmul` alone."""

from typing import Any

import pytest
import torch
from matmul_reference import FORMATS, activation64, assert_product, decode64, quantized
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from mxquant import EmulatedMXTensor, MXTensor, quantize, register_backend
from mxquant.backends import Backend, Groups, Operand, Problem, candidates
from mxquant.backends.emulation import Emulation
from mxquant.reference.gated_activation import GatedActivation
from mxquant.tensor import as_weight, describe, grouped_product

E, N, K = 3, 10, 72
OFFSETS = torch.tensor([2, 2, 5], dtype=torch.int32)
ROWS = torch.tensor([3, 0, 1, 3, 2, 0])
EXPERT_OF = [0, 0, 2, 2, 2, None]


pytestmark = pytest.mark.usefixtures("fixed_backends")


class OneByOne(Backend):
    """Has no grouped kernel: multiplies what it is given, and counts."""

    name = "one_by_one"
    calls: list[tuple[int, ...]] = []  # noqa: RUF012, one list on purpose

    def reject(self, problem: Problem) -> str | None:
        return None

    def matmul(self, x: Tensor, weight: Operand, bias: Tensor | None, problem: Problem) -> Tensor:
        OneByOne.calls.append((*x.shape, *weight.qdata.shape))
        return Emulation().matmul(x, weight, bias, problem)


class GroupedOnly(Backend):
    """Has only a grouped kernel."""

    name = "grouped_only"
    given: list[tuple[Operand, Groups, Problem]] = []  # noqa: RUF012, one list on purpose

    def reject(self, problem: Problem) -> str | None:
        return None if problem.experts else "multiplies stacks of experts only"

    def matmul(self, x: Tensor, weight: Operand, bias: Tensor | None, problem: Problem) -> Tensor:
        raise AssertionError("it said that it does not take this")

    def grouped_matmul(
        self, x: Tensor, weights: Operand, bias: Tensor | None, groups: Groups, problem: Problem
    ) -> Tensor:
        GroupedOnly.given.append((weights, groups, problem))
        return Emulation().grouped_matmul(x, weights, bias, groups, problem)


class Gating(GroupedOnly):
    """Gates the input itself."""

    name = "gating"
    gates = True
    rows: list[Tensor] = []  # noqa: RUF012, one list on purpose

    def reject(self, problem: Problem) -> str | None:
        assert problem.gate is None
        return None

    def grouped_matmul(
        self, x: Tensor, weights: Operand, bias: Tensor | None, groups: Groups, problem: Problem
    ) -> Tensor:
        Gating.rows.append(x)
        x = x if problem.gate is None else problem.gate(None, x)
        return super().grouped_matmul(x, weights, bias, groups, problem)


def assert_grouped(y: Tensor, x: Tensor, weight: MXTensor, bias: Tensor | None, activation: str | None) -> None:
    x64, w64 = activation64(x, activation), decode64(weight)
    for place, (row, expert) in enumerate(zip(ROWS.tolist(), EXPERT_OF)):
        if expert is None:
            assert not y[place].any()
        else:
            added = None if bias is None else bias[expert]
            assert_product(y[place : place + 1], x64[row : row + 1], w64[expert], added)


@pytest.mark.parametrize("backend", ["emulation", "one_by_one"])
@pytest.mark.parametrize("activation", [None, "mxfp4", "nvfp4", "fp8_e4m3"])
@pytest.mark.parametrize("format", FORMATS)
def test_rows_are_gathered_and_multiplied_with_their_own_matrix(
    format: str, activation: str | None, backend: str
) -> None:
    if backend == "one_by_one":
        register_backend(OneByOne)
    x, bias = torch.randn(4, K), torch.randn(E, N)
    weight = quantized(torch.randn(E, N, K), format, activation)
    for added in (bias, None):
        y = grouped_product(x, weight, -1, Groups(OFFSETS, ROWS), added)
        assert_grouped(y, x, weight, added, activation)
        assert torch.equal(grouped_product(x[ROWS], weight, -1, Groups(OFFSETS), added), y)
    if activation is None:  # as for the gradient of the input
        z = torch.randn(6, N)
        across = grouped_product(z, weight, -2, Groups(OFFSETS))
        assert_product(across[2:5], z[2:5].double(), decode64(weight)[2].mT)
        assert not across[5].any()


def test_the_default_grouped_matmul_calls_matmul_for_each_matrix_with_rows() -> None:
    register_backend(OneByOne)
    weight = quantized(torch.randn(E, N, K), "mxfp4", "mxfp4")
    OneByOne.calls.clear()
    grouped_product(torch.randn(4, K), weight, -1, Groups(OFFSETS, ROWS))
    assert OneByOne.calls == [(2, K, N, K // 2), (3, K, N, K // 2)]


def test_a_grouped_kernel_gets_the_stack_and_tensors_on_the_device() -> None:
    register_backend(GroupedOnly)
    stack, matrix = quantized(torch.randn(E, N, K), "nvfp4", "mxfp8"), quantized(torch.randn(N, K), "nvfp4")
    assert type(stack) is MXTensor
    assert type(matrix) is EmulatedMXTensor
    assert dict(candidates(describe(stack)))["grouped_only"] is None
    assert dict(candidates(describe(matrix)))["grouped_only"] == "multiplies stacks of experts only"
    GroupedOnly.given.clear()
    x = torch.randn(4, K)
    grouped_product(x, stack, -1, Groups(OFFSETS, ROWS))
    torch._grouped_mm(x[ROWS], stack.transpose(-2, -1), offs=OFFSETS)
    for (weights, groups, problem), rows in zip(GroupedOnly.given, (ROWS, None)):
        assert weights.qdata.shape == stack.qdata.shape
        assert (problem.experts, problem.out_features, problem.in_features) == (E, N, K)
        assert torch.equal(groups.offsets, OFFSETS)
        assert (groups.rows is None) if rows is None else torch.equal(groups.rows, rows)
    # One matrix of the stack, or several one at a time, are another problem.
    assert_product(torch.bmm(torch.randn(E, 1, K) * 0, stack.mT), torch.zeros(E, 1, K).double(), decode64(stack))
    assert len(GroupedOnly.given) == 2


def test_different_scales_for_the_rows_of_a_matrix_are_refused() -> None:
    """A matmul multiplies its sum with one per-tensor scale; a stack has one for each matrix."""
    parts = [quantize(torch.randn(E, N, K) * size, "nvfp4") for size in (1.0, 100.0)]
    weight = as_weight(torch.cat(parts, 1))
    with pytest.raises(NotImplementedError, match="different per-tensor scales"):
        grouped_product(torch.randn(4, K), weight, -1, Groups(OFFSETS, ROWS))
    alike = [quantize(torch.randn(E, N, K), "nvfp4", per_tensor_scale=torch.ones(E, 1, 1)) for _ in range(2)]
    weight = as_weight(torch.cat(alike, 1))
    assert weight.per_tensor_scale is not None
    grouped_product(torch.randn(4, K), weight, -1, Groups(OFFSETS, ROWS))


@pytest.mark.parametrize(
    "x, groups",
    [
        (torch.randn(4, K), Groups(OFFSETS[:2])),
        (torch.randn(1, 4, K), Groups(OFFSETS)),
        (torch.randn(4, K + 1), Groups(OFFSETS)),
    ],
    ids=["too few offsets", "a batch", "too wide"],
)
def test_operands_that_do_not_fit_are_refused(x: Tensor, groups: Groups) -> None:
    weight = quantized(torch.randn(E, N, K), "mxfp4")
    with pytest.raises(ValueError, match=r"takes an input \[S, K\]|does not fit"):
        grouped_product(x, weight, -1, groups)


@pytest.mark.parametrize("gate", [GatedActivation(False), GatedActivation(True, 7.0, 1.702)])
@pytest.mark.parametrize("rotation", [None, 32])
def test_a_backend_that_sets_gates_applies_the_gate(gate: GatedActivation, rotation: int | None) -> None:
    """Not where it would have to come before a rotation that the backend leaves to others, nor across the blocks."""
    register_backend(Gating)
    k = 96
    weight = as_weight(quantize(torch.randn(E, N, k), "mxfp4", rotation=rotation).with_activation("mxfp4"))
    both, bias = torch.randn(6, 2 * k), torch.randn(E, N)
    expected = grouped_product(gate(None, both), weight, -1, Groups(OFFSETS), bias)
    Gating.rows.clear()
    GroupedOnly.given.clear()
    assert torch.equal(grouped_product(both, weight, -1, Groups(OFFSETS), bias, gate), expected)
    (_, _, problem), (x,) = GroupedOnly.given[0], Gating.rows
    assert problem.gate == (gate if rotation is None else None)
    assert x.shape[1] == (2 * k if rotation is None else k)
    others = as_weight(weight.canonical(), "emulation")
    assert torch.equal(grouped_product(both, others, -1, Groups(OFFSETS), bias, gate), expected)
    assert len(Gating.rows) == 1
    with pytest.raises(ValueError, match=f"its last axis must be {2 * k}, gates and ups"):
        grouped_product(both[:, :k], weight, -1, Groups(OFFSETS), bias, gate)
    across = both[:, : 2 * N].contiguous()
    y = grouped_product(across, weight.with_activation(None), -2, Groups(OFFSETS), None, gate)
    assert torch.equal(y, grouped_product(gate(None, across), weight.with_activation(None), -2, Groups(OFFSETS)))
    assert Gating.rows[-1].shape[1] == N


@pytest.mark.parametrize(
    "gate", [GatedActivation(False), GatedActivation(True, 7.0, 1.702), GatedActivation(True, 7.0, 1.5)]
)
def test_a_gate_compiles_into_the_operator_or_before_it(gate: GatedActivation) -> None:
    """Of the operator where the backend applies it, else of torch's operators before it."""
    register_backend(Gating)
    weight = as_weight(quantize(torch.randn(E, N, K), "mxfp4").with_activation("mxfp4"))
    both = torch.randn(6, 2 * K)
    for stack in (weight, as_weight(weight.canonical(), "emulation")):
        graphs: list[torch.fx.GraphModule] = []

        def keep(graph: torch.fx.GraphModule, inputs: list[Tensor], kept: list[torch.fx.GraphModule] = graphs) -> Any:
            kept.append(graph)
            return graph.forward

        torch._dynamo.reset()
        compiled = torch.compile(
            lambda x, stack=stack: grouped_product(x, stack, -1, Groups(OFFSETS), None, gate),
            fullgraph=True,
            backend=aot_autograd(fw_compiler=keep),
        )
        with torch.no_grad():
            assert torch.equal(compiled(both), grouped_product(both, stack, -1, Groups(OFFSETS), None, gate))
        targets = [str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
        (product,) = [node for graph in graphs for node in graph.graph.nodes if "mxquant.matmul" in str(node.target)]
        fused = stack is weight
        assert product.args[-3:] == ((gate.interleaved, gate.limit, gate.alpha) if fused else (None, None, None))
        assert ("aten.mul.Tensor" in targets) is not fused
