"""The fused forward of an expert block: every pair of formats, every routing, and what must not go unnoticed."""

import copy
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from matmul_reference import ACTIVATIONS, FORMATS
from torch import Tensor, nn

pytest.importorskip("transformers")

import transformers
from experts_classes import EXPERTS, HIDDEN, build, fill
from moe_reference import assert_block, block64, relative_error, routing, run

import mxquant.integrations.transformers  # noqa: F401, registers the implementation
from mxquant import dequantize_, experts_forward, quantize_, register_backend
from mxquant.backends import Backend, Groups, Operand, Problem, emulation, unregister_backend
from mxquant.ops import route
from mxquant.reference.gated_activation import GatedActivation
from mxquant.tensor import as_weight

GPT_OSS = ("transformers.models.gpt_oss.modeling_gpt_oss", "GptOssExperts")
MIXTRAL = ("transformers.models.mixtral.modeling_mixtral", "MixtralExperts")
IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm", "mxquant")
BOUND = 1e-6
"""In float64: what a wrong step does is a thousand times more."""


def block(which: tuple[str, str], weight: str = "mxfp4", activation: str | None = "mxfp4") -> Any:
    experts = build(*which).double()
    quantize_(experts, {"moe": {"weight": weight, "activation": activation}})
    return experts


def tokens(count: int = 6, k: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    ids, weights = routing(count, EXPERTS, k)
    return torch.randn(count, HIDDEN, dtype=torch.float64), ids, weights.double()


# Formats


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("weight", FORMATS)
def test_every_pair_of_formats(weight: str, activation: str | None) -> None:
    experts, arguments = block(GPT_OSS, weight, activation), tokens()
    expected = block64(experts, *arguments, activation)
    y = experts_forward(experts, *arguments)
    assert y.dtype == torch.float64
    assert_block(y, expected, BOUND)
    other = "mxfp8_e4m3" if activation != "mxfp8_e4m3" else None
    with pytest.raises(AssertionError):
        assert_block(y, block64(experts, *arguments, other), BOUND)


@pytest.mark.parametrize("activation", [a for a in ACTIVATIONS if a is not None])
@pytest.mark.parametrize("weight", FORMATS)
def test_activations_are_quantized_once_for_each_matmul(
    monkeypatch: pytest.MonkeyPatch, weight: str, activation: str
) -> None:
    """Each token once, before it is handed to its experts; each token and expert once, after the gate."""
    experts, (x, ids, weights) = block(MIXTRAL, weight, activation), tokens(5)
    quantized = []

    def spy(x: Tensor, *arguments: Any) -> Any:
        quantized.append((tuple(x.shape), arguments[0].name))
        return original(x, *arguments)

    original = emulation.fake_quantize
    monkeypatch.setattr(emulation, "fake_quantize", spy)
    experts_forward(experts, x, ids, weights)
    assert quantized == [((5, HIDDEN), activation), ((10, experts.down_proj.shape[-1]), activation)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("weight, activation", [("mxfp4", None), ("nvfp4", "nvfp4"), ("mxfp8_e4m3", "fp8_e4m3")])
def test_other_dtypes(weight: str, activation: str | None, dtype: torch.dtype) -> None:
    """Inputs that a dtype holds exactly; what comes between is rounded, and may then be quantized to the next code."""
    experts, (x, ids, weights) = block(GPT_OSS, weight, activation), tokens()
    experts, x = experts.to(dtype), x.to(dtype)
    y = experts_forward(experts, x, ids, weights)
    assert y.dtype == dtype
    expected = block64(copy.deepcopy(experts).double(), x, ids, weights, activation)
    half = 1e-2 if activation is None else 5e-2
    assert relative_error(y, expected) < (half if dtype != torch.float32 else half / 100)


def test_nvfp4_has_a_scale_for_each_expert() -> None:
    experts = build(*MIXTRAL)
    loudness = torch.tensor([1.0, 1e3, 1e-3, 1.0]).view(-1, 1, 1)
    experts.gate_up_proj.data *= loudness
    original = experts.gate_up_proj.detach().clone()
    quantize_(experts, "nvfp4")
    scales = experts.gate_up_proj.per_tensor_scale
    assert scales.shape == (EXPERTS, 1, 1)
    assert torch.equal(scales, original.abs().amax((1, 2), keepdim=True) / 2688)
    error = (experts.gate_up_proj.dequantize() - original).norm(dim=(1, 2)) / original.norm(dim=(1, 2))
    assert (error < 0.12).all()


# Static activation scales


def static(experts: nn.Module, scale: Tensor) -> None:
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(experts, name).with_activation("nvfp4", scale=scale)
        setattr(experts, name, nn.Parameter(weight, requires_grad=False))


def test_a_static_activation_scale_for_each_expert(caplog: pytest.LogCaptureFixture) -> None:
    """As if each expert were a linear of its own, with its own scale."""
    experts, (x, _, _) = block(MIXTRAL, "nvfp4", "nvfp4"), tokens()
    scales = torch.tensor([2e-4, 1e-3, 5e-3, 2e-2])
    static(experts, scales)
    assert not caplog.records
    weights = torch.ones(6, 1, dtype=torch.float64)
    for expert in range(EXPERTS):
        alone = block(MIXTRAL, "nvfp4", "nvfp4")
        for name in ("gate_up_proj", "down_proj"):
            setattr(alone, name, nn.Parameter(getattr(experts, name)[expert : expert + 1], requires_grad=False))
        assert alone.down_proj.activation_scale.shape == ()
        assert alone.down_proj.activation_scale == scales[expert]
        expected = experts_forward(alone, x, torch.zeros(6, 1, dtype=torch.int64), weights)
        ids = torch.full((6, 1), expert)
        for implementation in IMPLEMENTATIONS:
            assert_block(run(experts, implementation, x, ids, weights), expected, BOUND)


def test_a_shared_activation_scale_is_taken_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    experts, arguments = block(MIXTRAL, "nvfp4", "nvfp4"), tokens()
    static(experts, torch.tensor(1e-3))
    assert "one static activation scale for 4 experts" in caplog.text
    expected = run(experts, "eager", *arguments)
    assert_block(experts_forward(experts, *arguments), expected, BOUND)


# Routing


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("which", [MIXTRAL, GPT_OSS], ids=lambda which: which[1])
@pytest.mark.parametrize(
    "ids",
    [[[2, 0]], [[1, 3]] * 7, [[0, 1], [1, 0], [0, 1]], [[3, 2], [0, 1]]],
    ids=["one token", "all on one pair", "two experts without", "each once"],
)
def test_routings(which: tuple[str, str], ids: list[list[int]], implementation: str) -> None:
    experts = block(which)
    x, _, weights = tokens(len(ids))
    expected = block64(experts, x, torch.tensor(ids), weights, "mxfp4")
    assert_block(run(experts, implementation, x, torch.tensor(ids), weights), expected, BOUND)


@pytest.mark.parametrize("k", [1, 4])
def test_one_expert_a_token_and_all(k: int) -> None:
    experts, arguments = block(GPT_OSS), tokens(5, k)
    assert_block(experts_forward(experts, *arguments), block64(experts, *arguments, "mxfp4"), BOUND)


def test_no_tokens() -> None:
    experts, (x, ids, weights) = block(GPT_OSS), tokens()
    assert experts_forward(experts, x[:0], ids[:0], weights[:0]).shape == (0, HIDDEN)


@pytest.mark.parametrize("outside", [4, 5, 100, -1])
@pytest.mark.parametrize("which", [MIXTRAL, GPT_OSS], ids=lambda which: which[1])
def test_experts_of_other_ranks_are_left_out(which: tuple[str, str], outside: int) -> None:
    """With gradients and without, whatever their weight; a token may have no expert here at all."""
    experts, (x, ids, weights) = block(which), tokens()
    ids[0, 1] = ids[3, 0] = ids[4, 0] = ids[4, 1] = outside
    expected = block64(experts, x, ids, weights, "mxfp4")
    assert_block(experts_forward(experts, x, ids, weights), expected, BOUND)
    assert_block(experts_forward(experts, x.requires_grad_(), ids, weights).detach(), expected, BOUND)
    assert not expected[4].any()
    weights[0, 1] = torch.nan
    assert_block(experts_forward(experts, x.detach(), ids, weights), expected, BOUND)


def test_two_ranks_add_up_to_one() -> None:
    """Each holds half of the experts, and gets the other half's ids as something beyond its own."""
    experts, (x, ids, weights) = block(GPT_OSS), tokens(9)
    parts = []
    for rank in range(2):
        local = copy.deepcopy(experts)
        for name, parameter in experts.named_parameters():
            half = parameter[2 * rank : 2 * rank + 2]
            setattr(local, name, nn.Parameter(half, requires_grad=False))
        mine = (ids // 2) == rank
        parts.append(experts_forward(local, x, torch.where(mine, ids % 2, 2), weights))
    assert_block(parts[0] + parts[1], block64(experts, x, ids, weights, "mxfp4"), BOUND)


def test_sorting_is_stable_and_offsets_are_ends() -> None:
    routed = route(torch.tensor([[2, 0], [7, 2], [0, -1]]), 4)
    assert routed.offsets_E.tolist() == [2, 2, 4, 4]
    assert routed.offsets_E.dtype == torch.int32
    assert routed.order_S[:4].tolist() == [1, 4, 0, 3]
    assert routed.token_S[:4].tolist() == [0, 2, 0, 1]


def test_result_is_deterministic_and_independent_of_token_order() -> None:
    experts, (x, ids, weights) = block(GPT_OSS), tokens(16)
    y = experts_forward(experts, x, ids, weights)
    assert torch.equal(experts_forward(experts, x, ids, weights), y)
    order = torch.randperm(16)
    assert_block(experts_forward(experts, x[order], ids[order], weights[order]), y[order], BOUND)


def test_many_experts_of_odd_number() -> None:
    """The sizes of Qwen1.5-MoE, but for the width: 60 experts, 4 a token, 1408 = 44 blocks."""
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeExperts

    config = transformers.Qwen2MoeConfig(hidden_size=32, moe_intermediate_size=1408, num_experts=60)
    experts = fill(Qwen2MoeExperts(config)).double()
    quantize_(experts, "mxfp4")
    x, (ids, weights) = torch.randn(3, 32, dtype=torch.float64), routing(3, 60, 4)
    expected = block64(experts, x, ids, weights, "mxfp4")
    for implementation in IMPLEMENTATIONS:
        assert_block(run(experts, implementation, x, ids, weights.double()), expected, BOUND)


@pytest.mark.parametrize("limit, alpha", [(0.5, 1.0), (10.0, 1.702)])
def test_the_blocks_own_clamp_and_alpha_are_used(limit: float, alpha: float) -> None:
    experts, (x, ids, weights) = block(GPT_OSS), tokens()
    x = 10 * x
    usual = experts_forward(experts, x, ids, weights)
    experts.limit, experts.alpha = limit, alpha
    y = experts_forward(experts, x, ids, weights)
    assert_block(y, block64(experts, x, ids, weights, "mxfp4"), BOUND)
    assert relative_error(y, usual) > 1000 * BOUND


class Gating(Backend):
    """Applies gates itself, and keeps them."""

    name = "gating"
    gates = True
    seen: ClassVar[list[tuple[GatedActivation | None, int]]] = []

    def reject(self, problem: Problem) -> str | None:
        return None

    def matmul(self, x: Tensor, weight: Operand, bias: Tensor | None, problem: Problem) -> Tensor:
        return emulation.Emulation().matmul(x, weight, bias, problem)

    def grouped_matmul(
        self, x: Tensor, weights: Operand, bias: Tensor | None, groups: Groups, problem: Problem
    ) -> Tensor:
        Gating.seen.append((problem.gate, x.shape[1]))
        x = x if problem.gate is None else problem.gate(None, x)
        return emulation.Emulation().grouped_matmul(x, weights, bias, groups, problem)


@pytest.mark.parametrize(
    "which, gate",
    [(MIXTRAL, GatedActivation(False)), (GPT_OSS, GatedActivation(True, 7.0, 1.702))],
    ids=lambda one: str(one)[:60],
)
def test_the_gate_is_left_to_a_backend_that_applies_it(which: tuple[str, str], gate: GatedActivation) -> None:
    """But not where the hidden states need a gradient."""
    experts, arguments = block(which), tokens()
    expected = experts_forward(experts, *arguments)
    width = experts.down_proj.shape[-2 if which == GPT_OSS else -1]
    register_backend(Gating)
    try:
        for name in ("gate_up_proj", "down_proj"):
            weight = as_weight(getattr(experts, name).canonical(), "gating")
            setattr(experts, name, nn.Parameter(weight, requires_grad=False))
        Gating.seen.clear()
        assert torch.equal(experts_forward(experts, *arguments), expected)
        assert Gating.seen == [(None, HIDDEN), (gate, 2 * width)]
        Gating.seen.clear()
        x = arguments[0].requires_grad_()
        assert_block(experts_forward(experts, x, *arguments[1:]).detach(), expected, BOUND)
        assert Gating.seen == [(None, HIDDEN), (None, width)]
    finally:
        unregister_backend("gating")


# Gradients


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("which", [MIXTRAL, GPT_OSS], ids=lambda which: which[1])
def test_gradients_are_those_of_the_dequantized_block(which: tuple[str, str], implementation: str) -> None:
    quantized = block(which, activation=None)
    dense = copy.deepcopy(quantized)
    dequantize_(dense)
    gradients = []
    for experts in (quantized, dense):
        experts.config._experts_implementation = implementation if experts is quantized else "eager"
        torch.manual_seed(1)
        x, ids, weights = tokens()
        biases = [p.requires_grad_() for name, p in experts.named_parameters() if name.endswith("bias")]
        given = (x.requires_grad_(), weights.requires_grad_(), *biases)
        gradients.append(torch.autograd.grad(experts(x, ids, weights).square().sum(), given))
    for ours, expected in zip(*gradients):
        assert relative_error(ours, expected) < BOUND


# Negative controls: each breaks one step of the reference, which the block must then no longer match


def swapped(experts: Any, gate_up: Tensor) -> Tensor:
    gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    return experts._apply_gate(torch.stack([up, gate], -1).flatten(-2))


def halves(experts: Any, gate_up: Tensor) -> Tensor:
    return experts._apply_gate(torch.stack(gate_up.chunk(2, -1), -1).flatten(-2))


def other_constants(experts: Any, gate_up: Tensor, **constants: float) -> Tensor:
    other = copy.copy(experts)
    vars(other).update(constants)
    return other._apply_gate(gate_up)


BROKEN = {
    "gate and up swapped": lambda e: {"gate": lambda h: swapped(e, h)},
    "interleaved taken for halves": lambda e: {"gate": lambda h: halves(e, h)},
    "another clamp": lambda e: {"gate": lambda h: other_constants(e, h, limit=10.0)},
    "no clamp": lambda e: {"gate": lambda h: other_constants(e, h, limit=torch.inf)},
    "another alpha": lambda e: {"gate": lambda h: other_constants(e, h, alpha=1.0)},
    "biases dropped": lambda e: {"has_bias": False},
    "second quantization skipped": lambda e: {"quantizes_twice": False},
    "router weight on the input": lambda e: {"router_weight": "input"},
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", BROKEN)
def test_reference_with_a_broken_step_does_not_match(name: str, implementation: str) -> None:
    """With inputs that reach the clamp (7) on both sides, and a top-k in which no weight is 1."""
    experts, (x, ids, weights) = block(GPT_OSS), tokens()
    x = 10 * x
    y = run(experts, implementation, x, ids, weights)
    assert_block(y, block64(experts, x, ids, weights, "mxfp4"), BOUND)
    with pytest.raises(AssertionError):
        assert_block(y, block64(experts, x, ids, weights, "mxfp4", **BROKEN[name](experts)), 1000 * BOUND)


@pytest.mark.parametrize("name", ["gate_up_proj_bias", "down_proj_bias"])
def test_each_bias_counts(name: str) -> None:
    experts, arguments = block(GPT_OSS), tokens()
    y = experts_forward(experts, *arguments)
    getattr(experts, name).data.zero_()
    assert relative_error(experts_forward(experts, *arguments), y) > 1000 * BOUND


# Bad input


@pytest.mark.parametrize(
    "change",
    [
        lambda x, ids, weights: (x, ids[:5], weights[:5]),
        lambda x, ids, weights: (x[:3], ids, weights),
        lambda x, ids, weights: (x, ids, weights[:, :1]),
        lambda x, ids, weights: (x, ids, weights[:1]),
        lambda x, ids, weights: (x, ids[:, 0], weights[:, 0]),
        lambda x, ids, weights: (x.unsqueeze(0), ids, weights),
    ],
)
def test_mismatched_shapes_are_refused(change: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> None:
    experts, arguments = block(GPT_OSS), tokens(7)
    with pytest.raises(
        ValueError, match=r"hidden_states \[T, H\], top_k_index \[T, k\] and top_k_weights \[T, k\]; got"
    ):
        experts_forward(experts, *change(*arguments))


def test_ids_are_of_any_integer_dtype_only() -> None:
    experts, (x, ids, weights) = block(GPT_OSS), tokens()
    expected = experts_forward(experts, x, ids, weights)
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32):
        assert torch.equal(experts_forward(experts, x, ids.to(dtype), weights), expected)
    for wrong in (ids.float(), ids.bool()):
        with pytest.raises(TypeError, match="top_k_index is a tensor of integers"):
            experts_forward(experts, x, wrong, weights)


def test_a_bias_of_another_shape_is_refused() -> None:
    experts, arguments = block(GPT_OSS), tokens()
    bias = experts.gate_up_proj_bias
    for wrong in (bias[:, :-1], bias[:1], bias[:-1], torch.cat([bias, bias], 1)):
        experts.gate_up_proj_bias = nn.Parameter(wrong.clone(), requires_grad=False)
        with pytest.raises(ValueError, match="bias of shape"):
            experts_forward(experts, *arguments)
