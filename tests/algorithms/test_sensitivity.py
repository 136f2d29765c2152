"""sensitivity: estimates against their definition and against the real loss; proposals within a budget."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from small_models import snapshot
from torch import Tensor, nn

from algorithms.calibration_models import Model, batches, losses_within_budgets
from mxquant import MXFP4Config, MXFP8Config, quantize, quantize_, summary
from mxquant.algorithms import LayerSensitivity, Sensitivity, sensitivity

WEIGHT_ONLY = {"weight": "mxfp4", "activation": None}


class LanguageModel(Model):
    """Its head is sharp, so that it predicts something."""

    def forward(self, ids: Tensor, scale: float = 1.0) -> Any:
        return SimpleNamespace(logits=8 * super().forward(ids, scale))


@pytest.mark.parametrize("rotation", [None, 32])
def test_estimate_of_one_layer_is_its_definition(rotation: int | None) -> None:
    """Half the sum over tokens of (gradient x error)^2, where the gradient is the random direction itself."""
    linear, x = nn.Linear(64, 32), torch.randn(20, 64)
    configs = [WEIGHT_ONLY | {"rotation": rotation}, {"weight": "mxfp4", "rotation": rotation}]
    (layer,) = sensitivity(linear, [x], configs, seed=3).layers
    gradient = torch.randn(20, 32, generator=torch.Generator().manual_seed(3))
    error = quantize(linear.weight, "mxfp4", rotation=rotation).dequantize() - linear.weight
    of_weight = 0.5 * torch.einsum("tn,tk,nk->tnk", gradient, x, error).square().sum()
    taken = quantize(x, "mxfp4", rotation=rotation).dequantize()
    of_input = 0.5 * ((gradient @ linear.weight) * (taken - x)).square().sum()
    assert layer.name == "weight"
    assert layer.added_loss == pytest.approx((of_weight.item(), (of_weight + of_input).item()), rel=1e-4)


def test_inputs_changed_in_place_count_as_they_were() -> None:
    """A sum in place after a layer changes what it was given, before the backward runs."""

    class Residual(nn.Module):
        def __init__(self, in_place: bool) -> None:
            super().__init__()
            self.in_place = in_place
            self.fc, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            x = x * 0.1
            if self.in_place:
                x += 20 * self.fc(x)
            else:
                x = x + 20 * self.fc(x)
            return self.last(x)

    plain, in_place = Residual(False), Residual(True)
    in_place.load_state_dict(plain.state_dict())
    data = [torch.randn(20, 64)]
    assert sensitivity(in_place, data).layers == sensitivity(plain, data).layers


def test_batches_are_not_changed_in_place() -> None:
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(64, 64))
    x = torch.randn(20, 64)
    before = x.clone()
    sensitivity(model, [x])
    assert torch.equal(x, before)


def test_tied_layers_count_with_the_inputs_of_all() -> None:
    """As one layer that runs twice does."""
    tied, shared = (nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)) for _ in range(2))
    tied[2].weight, tied[2].bias = tied[0].weight, tied[0].bias
    shared[0].load_state_dict(tied[0].state_dict())
    shared[2] = shared[0]
    x = torch.randn(20, 64)
    assert sensitivity(tied, [x]).layers == sensitivity(shared, [x]).layers


def real_loss(model: LanguageModel, name: str, data: list[Tensor]) -> float:
    """The divergence of the predictions when one layer alone is quantized."""
    quantized = copy.deepcopy(model)
    quantize_(quantized, {name: WEIGHT_ONLY})
    total = 0.0
    with torch.no_grad():
        for ids in data:
            log_p, log_q = (m(ids).logits.log_softmax(-1) for m in (model, quantized))
            total += (log_p.exp() * (log_p - log_q)).sum().item()
    return total


def test_ranking_follows_the_real_loss() -> None:
    model, data = LanguageModel().eval(), batches(4)
    with torch.no_grad():
        model.blocks[1].down.weight *= 6
        model.blocks[2].gate.weight *= 0.05
    found = sensitivity(model, data, [WEIGHT_ONLY])
    estimates = {layer.name: layer.added_loss[0] for layer in found.layers}
    losses = {name: real_loss(model, name, data) for name in estimates}
    ranks = [sorted(estimates, key=values.__getitem__) for values in (estimates, losses)]
    assert ranks[0][0] == ranks[1][0] == "blocks.2.gate.weight"
    assert ranks[0][-1] == ranks[1][-1]
    pairs = torch.tensor([[estimates[name], losses[name]] for name in estimates]).log()
    assert torch.corrcoef(pairs.T)[0, 1] > 0.9  # seen: 0.99
    assert found.layers[0].name == ranks[0][-1]


def test_sensitivity_does_not_change_the_model() -> None:
    model = Model().train()
    model.lm_head.weight.requires_grad_(False)
    before, modes = snapshot(model), [module.training for module in model.modules()]
    sensitivity(model, batches(1))
    assert snapshot(model) == before
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_the_same_seed_gives_the_same_estimates() -> None:
    model, data = LanguageModel(), batches(1)
    assert sensitivity(model, data).layers == sensitivity(model, data).layers
    assert sensitivity(model, data).layers != sensitivity(model, data, seed=1).layers


# Budgets

FOUR, EIGHT = MXFP4Config(), MXFP8Config()


def example() -> Sensitivity:
    rows = [("a", 100, (10.0, 1.0)), ("b", 100, (8.0, 1.0)), ("c", 300, (9.0, 1.0)), ("d", 100, (0.1, 0.2))]
    return Sensitivity((FOUR, EIGHT), [LayerSensitivity(*row) for row in rows])


@pytest.mark.parametrize(
    "budget, wide",
    [
        (4.25, ""),
        (4.9, ""),
        (4.92, "a"),  # 4 bits more for 100 of 600 weights
        ("5.6 bits", "ab"),
        ("7 bits", "ab"),  # c would be as good a step, but takes three times as many bits
        (7.6, "abc"),
        (16, "abc"),  # d is no better in more bits
    ],
)
def test_propose_takes_the_most_loss_per_bit_first(budget: float | str, wide: str) -> None:
    mapping = example().propose(budget)
    assert "".join(name for name, config in mapping.items() if config == EIGHT) == wide
    assert set(mapping) == set("abcd")


@pytest.mark.parametrize("budget", [8.25, 9])
def test_propose_takes_the_better_of_equal_sizes(budget: float) -> None:
    """In any order of the configs, whether they are the smallest or not."""
    five = MXFP8Config(element="e5m2")
    for configs in ((five, EIGHT), (EIGHT, five), (FOUR, five, EIGHT), (FOUR, EIGHT, five)):
        for better, other in ((EIGHT, five), (five, EIGHT)):
            losses = {FOUR: 9.0, better: 1.0, other: 2.0}
            found = Sensitivity(configs, [LayerSensitivity("a", 100, tuple(losses[config] for config in configs))])
            assert found.propose(budget) == {"a": better}


@pytest.mark.parametrize("budget, message", [(4, "below"), ("few", "no number"), (None, "no number")])
def test_impossible_budgets_are_refused(budget: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        example().propose(budget)


@pytest.mark.parametrize("budget", [4.5, 5.0, 6.25])
def test_the_proposal_is_a_mapping_for_quantize(budget: float) -> None:
    model, data = LanguageModel().eval(), batches(2)
    quantize_(model, sensitivity(model, data).propose(budget))
    found = summary(model)
    assert found.bits_per_weight is not None
    assert budget - 0.6 < found.bits_per_weight <= budget
    assert len(found.quantized) == 10


def test_more_bits_lose_less() -> None:
    losses = losses_within_budgets(LanguageModel().eval(), batches(4))
    assert losses[0] > losses[1] > losses[2]


def test_prints_a_table() -> None:
    """Configs of one format are labelled by their settings."""
    configs = (FOUR, MXFP4Config(activation=None, rotation=32), MXFP8Config(element="e5m2"))
    found = Sensitivity(configs, [LayerSensitivity("a", 1000, (1.0, 0.25, 0.125))])
    assert_expected_inline(
        str(found),
        """\
| layer | mxfp4 | mxfp4 activation=None rotation=32 | mxfp8_e5m2 | weights |
|-------|-------|-----------------------------------|------------|---------|
| a     | 1     | 0.25                              | 0.125      | 1,000   |""",
    )


# Refusals


@pytest.mark.parametrize(
    "data, configs, message", [([], ["mxfp4"], "0 batches"), ([torch.zeros(1, 64)], [], r"configs=\[\]")]
)
def test_nothing_to_estimate_is_refused(data: list[Tensor], configs: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sensitivity(nn.Linear(64, 64), data, configs)


def test_a_single_config_is_accepted() -> None:
    data = [torch.randn(4, 64)]
    for config in ("mxfp4", {"weight": "mxfp4"}, FOUR):
        assert sensitivity(nn.Linear(64, 64), data, config).configs == (FOUR,)


def test_a_quantized_model_is_refused() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    quantize_(model, {"1": "mxfp4"})
    with pytest.raises(
        ValueError, match=r"1 weights are quantized already, such as 1\.weight; estimate on the model as"
    ):
        sensitivity(model, [torch.randn(2, 64)])


def test_outputs_without_gradients_are_refused() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Softmax(-1))
    model.register_forward_hook(lambda module, args, output: output.argmax(-1))
    with pytest.raises(ValueError, match="no gradients"):
        sensitivity(model, [torch.randn(2, 64)])
