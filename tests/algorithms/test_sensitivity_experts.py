"""Estimates for stacked experts: their definition, one token and one expert at a time; and models of transformers."""

import copy
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algorithms.calibration_models import Model, MoEBlock, batches, losses_within_budgets
from mxquant import MXTensor, quantize, quantize_, register_experts_layout, summary
from mxquant.algorithms import Sensitivity, sensitivity

WIDTH, INNER, COUNT, TOKENS = 64, 32, 3, 12
WEIGHT_ONLY = {"weight": "mxfp4", "activation": None}


class Pairs(nn.Module):
    """Experts that are computed one token and one expert at a time."""

    router_weight = "output"

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(COUNT, 2 * INNER, WIDTH) / 8)
        self.down = nn.Parameter(torch.randn(COUNT, WIDTH, INNER) / 4)

    def pair(self, x: dict[str, Tensor], w: dict[str, Tensor], weight: Tensor) -> tuple[Tensor, Tensor]:
        """The input of the down projection, and the expert's output for one token."""
        gate, up = F.linear(x["up"] * (weight if self.router_weight == "input" else 1), w["up"]).chunk(2, -1)
        h = F.silu(gate) * up
        return h, F.linear(h, w["down"]) * (weight if self.router_weight == "output" else 1)

    def forward(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        rows = []
        for x, chosen, given in zip(hidden, ids, weights):
            pairs = zip(chosen.tolist(), given)
            rows.append(sum(self.pair({"up": x, "gate": x}, self.expert(e), weight)[1] for e, weight in pairs))
        return torch.stack(rows)  # type: ignore[arg-type]

    def expert(self, index: int) -> dict[str, Tensor]:
        return {name: parameter[index] for name, parameter in self.named_parameters(recurse=False)}


class WeighedInputs(Pairs):
    router_weight = "input"


class Separate(Pairs):
    """Separate gate and up weights [E, K, N], biases, and a norm after the experts."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("gate", "up"):
            self.register_parameter(name, nn.Parameter(torch.randn(COUNT, WIDTH, INNER) / 8))
            self.register_parameter(f"{name}_bias", nn.Parameter(torch.randn(COUNT, INNER)))
        self.down = nn.Parameter(torch.randn(COUNT, INNER, WIDTH) / 4)
        self.norm = nn.LayerNorm(WIDTH)

    def pair(self, x: dict[str, Tensor], w: dict[str, Tensor], weight: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = (x[name] @ w[name] + w[f"{name}_bias"] for name in ("gate", "up"))
        h = F.silu(gate) * up
        return h, self.norm(h @ w["down"]) * weight


register_experts_layout(Pairs, {"up": -1, "down": -1}, up="up", down="down", gate_order="halves")
register_experts_layout(
    WeighedInputs, {"up": -1, "down": -1}, up="up", down="down", gate_order="halves", router_weight="input"
)
register_experts_layout(
    Separate,
    {"gate": -2, "up": -2, "down": -2},
    biases={"gate": "gate_bias", "up": "up_bias"},
    up=("gate", "up"),
    down="down",
    gate_order="separate",
    post_norm="norm",
)


class Block(nn.Module):
    """One block of experts, with fixed routing; the last expert gets no tokens."""

    def __init__(self, experts: Pairs) -> None:
        super().__init__()
        self.experts = experts
        self.register_buffer("ids", torch.arange(2 * TOKENS).view(TOKENS, 2) % 2)
        self.register_buffer("weights", torch.rand(TOKENS, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, self.ids, self.weights)


def error_of(matrix: Tensor, axis: int, rotation: int | None) -> Tensor:
    return quantize(matrix.detach(), "mxfp4", axis=axis, rotation=rotation).dequantize() - matrix.detach()


def expected_losses(block: Any, x: Tensor, direction: Tensor, rotation: int | None) -> dict[str, tuple[float, float]]:
    """Of each weight, weight-only and with activations: half the sum of (gradient x error)^2, every pair by itself."""
    experts = block.experts
    axis = -2 if isinstance(experts, Separate) else -1
    names = [name for name, parameter in experts.named_parameters(recurse=False) if parameter.dim() == 3]
    totals = {name: [0.0, 0.0] for name in names}
    for token in range(TOKENS):
        for choice, expert in enumerate(block.ids[token].tolist()):
            w = {name: one.detach().clone().requires_grad_() for name, one in experts.expert(expert).items()}
            weight = block.weights[token, choice]
            # What a matmul quantizes is the input as it is given to it.
            given = x[token] * weight if experts.router_weight == "input" else x[token]
            inputs = {name: given.clone().requires_grad_() for name in names if name != "down"}
            undone = {name: one / weight if experts.router_weight == "input" else one for name, one in inputs.items()}
            h, y = experts.pair(undone, w, weight)
            h.retain_grad()
            (y * direction[token]).sum().backward()
            for name in names:
                source = h if name == "down" else inputs[name]
                of_weight = (w[name].grad * error_of(w[name], axis, rotation)).square().sum()  # type: ignore[operator]
                taken = quantize(source.detach()[None], "mxfp4", rotation=rotation).dequantize()[0]
                of_input = (source.grad * (taken - source)).square().sum()  # type: ignore[operator]
                totals[name][0] += 0.5 * of_weight.item()
                totals[name][1] += 0.5 * (of_weight + of_input).item()
    return {f"experts.{name}": (a, b) for name, (a, b) in totals.items()}


@pytest.mark.parametrize("rotation", [None, 32])
@pytest.mark.parametrize("make", [Pairs, WeighedInputs, Separate])
def test_estimate_of_one_block_is_its_definition(make: type[Pairs], rotation: int | None) -> None:
    block, x = Block(make()), torch.randn(TOKENS, WIDTH)
    configs = [WEIGHT_ONLY | {"rotation": rotation}, {"weight": "mxfp4", "rotation": rotation}]
    found = {layer.name: layer for layer in sensitivity(block, [x], configs, seed=3).layers}
    direction = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(3))
    expected = expected_losses(block, x, direction, rotation)
    assert found.keys() == expected.keys()
    for name, losses in expected.items():
        # Some thousand fp32 products are summed in another order. Some inputs lie within its error of a tie of MXFP4;
        # one that falls otherwise moves the sum by less than 1 %.
        assert found[name].added_loss[0] == pytest.approx(losses[0], rel=1e-4)
        assert found[name].added_loss[1] == pytest.approx(losses[1], rel=1e-2)
        assert found[name].numel == block.get_parameter(name).numel()


# Models of transformers


def tiny(family: str, chosen: int = 2) -> nn.Module:
    """With four experts, `chosen` of them for each token."""
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 64,
        "num_experts_per_tok": chosen,
        "attn_implementation": "eager",
    }
    if family == "mixtral":
        config = transformers.MixtralConfig(**sizes, num_local_experts=4)
        model = transformers.MixtralForCausalLM(config)
    else:
        config = transformers.Qwen3MoeConfig(**sizes, num_experts=4, moe_intermediate_size=96)
        model = transformers.Qwen3MoeForCausalLM(config)
    with torch.no_grad():  # so that it predicts something, and layers differ
        model.lm_head.weight *= 20
        for index, layer in enumerate(model.model.layers):
            layer.mlp.experts.down_proj *= 5 + 10 * index
            layer.mlp.experts.gate_up_proj *= 4
    return model.eval()


def ids(count: int) -> list[Tensor]:
    return [torch.randint(0, 64, (4, 16)) for _ in range(count)]


def real_loss(model: nn.Module, name: str, data: list[Tensor]) -> float:
    """The divergence of the predictions when one weight alone is quantized."""
    quantized = copy.deepcopy(model)
    quantize_(quantized, {name: WEIGHT_ONLY})
    total = 0.0
    with torch.no_grad():
        for one in data:
            log_p, log_q = (m(one).logits.log_softmax(-1) for m in (model, quantized))
            total += (log_p.exp() * (log_p - log_q)).sum().item()
    return total


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_estimate_is_close_to_the_real_loss(family: str) -> None:
    """Every token goes to all experts, so that none changes its way, which is not estimated."""
    model, data = tiny(family, chosen=4), ids(8)
    found = sensitivity(model, data, [WEIGHT_ONLY])
    estimates = {layer.name: layer.added_loss[0] for layer in found.layers}
    experts = {name for name in estimates if "experts" in name}
    assert experts == {f"model.layers.{i}.mlp.experts.{part}_proj" for i in (0, 1) for part in ("gate_up", "down")}
    assert len(estimates) == 4 + 2 * 4
    losses = {name: real_loss(model, name, data) for name in estimates}
    for name, loss in losses.items():
        # Terms of higher order are left out; seen: 0.76 to 1.17.
        assert 2 / 3 < estimates[name] / loss < 3 / 2, name
    ranks = [sorted(experts, key=values.__getitem__) for values in (estimates, losses)]
    assert ranks[0] == ranks[1]
    assert max(losses.values()) > 30 * min(losses.values())  # there is something to tell apart


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_estimate_does_not_depend_on_the_experts_implementation(family: str, implementation: str) -> None:
    model, data = tiny(family), ids(1)
    expected = {layer.name: layer.added_loss for layer in sensitivity(model, data, ["mxfp4"]).layers}
    model.set_experts_implementation(implementation)  # type: ignore[operator]
    found = {layer.name: layer.added_loss for layer in sensitivity(model, data, ["mxfp4"]).layers}
    for name, losses in expected.items():
        assert found[name] == pytest.approx(losses, rel=2e-2)  # a tie that falls otherwise


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("budget", [4.5, 5.5])
def test_the_proposal_is_a_mapping_for_quantize(family: str, budget: float) -> None:
    model, data = tiny(family), ids(2)
    found = sensitivity(model, data)
    quantize_(model, found.propose(budget))
    assert all(isinstance(model.get_parameter(layer.name), MXTensor) for layer in found.layers)
    report = summary(model)
    assert report.bits_per_weight is not None
    assert budget - 0.75 < report.bits_per_weight <= budget
    assert len({row.format for row in report.quantized}) > 1
    assert torch.isfinite(model(data[0]).logits).all()


def test_more_bits_for_the_experts_lose_less() -> None:
    losses = losses_within_budgets(tiny("mixtral"), ids(4))
    assert losses[0] > losses[1] > losses[2]


# What cannot be estimated


class Unnamed(MoEBlock):
    """Experts whose layout names only the K axes."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Bare()


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 64, 64) / 8)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return torch.einsum("tk,tn->tn", weights, torch.stack([x[i] @ self.weight[e] for i, e in enumerate(ids[:, 0])]))


register_experts_layout(Bare, {"weight": -2})


def test_experts_of_unknown_computation_are_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "mxquant"):
        found = sensitivity(Model(Unnamed, 2), batches(1), ["mxfp4"])
    assert [layer.name for layer in found.layers] == ["pooler.weight"]
    assert "lacks up, down or gate: blocks.0.experts.weight, blocks.1.experts.weight; name them" in caplog.text
    with pytest.raises(ValueError, match=r"nothing to estimate: .* multiply: experts\.weight"):
        sensitivity(Unnamed(), [torch.randn(1, 8, 64)], ["mxfp4"])


def test_experts_that_no_batch_reaches_are_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = Model(MoEBlock, 2)
    model.unused = MoEBlock()
    with caplog.at_level(logging.WARNING, "mxquant"):
        found: Sensitivity = sensitivity(model, batches(1), ["mxfp4"])
    assert "unused.experts.up, unused.experts.down; name them beside the proposal" in caplog.text
    assert {layer.name for layer in found.layers} == {
        "pooler.weight",
        *(f"blocks.{i}.experts.{part}" for i in (0, 1) for part in ("up", "down")),
    }
    quantize_(model, found.propose(4.25) | {"unused": "mxfp8"})
    assert model.unused.experts.up.format == "mxfp8_e4m3"
