"""GPTQ of whole models: outputs closer to the original's than by rounding, each weight once, nothing else changed.

That every layer is calibrated on its own inputs is seen by solving one of them apart, on inputs that hooks recorded.
"""

import copy
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from algorithms.calibration_models import Model, MoEBlock, TupleBlock, Unchained, batches, routing
from mxquant import GPTQ, MXFP4Config, MXTensor, NVFP4Config, quantize_, summary
from mxquant.algorithms.blockwise import block_stages, calibration_mode, model_stage
from mxquant.algorithms.gptq import Grid, gptq, rotated_hessian
from mxquant.formats import get_format
from mxquant.reference.hadamard import hadamard

PARALLEL = GPTQ(sequential=False)
ROTATED = MXFP4Config(rotation=32, algorithm="gptq")
MODELS = [Model, lambda: Model(TupleBlock), Unchained, lambda: Model(MoEBlock)]


def error(model: nn.Module, original: nn.Module, data: list[Tensor]) -> float:
    with torch.no_grad():
        pairs = [(model(ids), original(ids)) for ids in data]
    return (sum((a - b).norm() for a, b in pairs) / sum(b.norm() for _, b in pairs)).item()  # type: ignore[union-attr]


def inputs_of(model: nn.Module, name: str, data: list[Tensor]) -> Tensor:
    """A layer's inputs as a matrix."""
    seen: list[Tensor] = []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, -2)))
    with torch.no_grad():
        for ids in data:
            model(ids)
    handle.remove()
    return torch.cat(seen)


@pytest.mark.parametrize("sequential", [True, False])
@pytest.mark.parametrize("make", MODELS)
def test_gptq_outputs_are_closer_than_rounded_ones(make: Any, sequential: bool) -> None:
    original, data = make().eval(), batches(4)
    found = {}
    for algorithm in ("rtn", GPTQ(sequential=sequential, min_tokens=32)):
        model = copy.deepcopy(original)
        config = MXFP4Config(rotation=32, activation=None, algorithm=algorithm)
        quantize_(model, config, calibration=None if algorithm == "rtn" else data)
        assert all(
            isinstance(p, MXTensor)
            for n, p in model.named_parameters()
            if "blocks" in n and p.dim() > 1 and p.shape[0] > 1
        )
        found[algorithm] = error(model, original, data)
    rounded, calibrated = found.values()
    assert calibrated < 0.8 * rounded  # seen: 0.5 to 0.7


@pytest.mark.parametrize("make", [Model, lambda: Model(TupleBlock), Unchained])
@pytest.mark.parametrize("sequential", [True, False])
def test_each_layer_is_calibrated_on_its_own_inputs(make: Any, sequential: bool) -> None:
    """Sequential: inputs from quantized predecessors. Parallel: inputs of the original model."""
    original, data = make().eval(), batches()
    model = copy.deepcopy(original)
    config = MXFP4Config(rotation=32, algorithm=GPTQ(sequential=sequential))
    quantize_(model, config, calibration=data)
    grid, both = Grid(get_format("mxfp4"), "even", None), []
    for name in ("blocks.0.up", "blocks.1.gate", "blocks.2.down", "pooler"):
        if name == "pooler" and not sequential and make is not Unchained:
            continue  # outside of the blocks, it comes after them in either mode
        weight = hadamard(original.get_submodule(name).weight.detach(), 32)
        for source, is_expected in ((model, sequential), (original, not sequential)):
            x = inputs_of(source, name, data)
            solved = gptq(weight, rotated_hessian(x.T @ x, 32), grid, GPTQ())
            quantized = model.get_submodule(name).weight
            is_same = (solved[0] == quantized.qdata).float().mean() > 0.99  # sums in another order
            if name != "blocks.0.up":  # which sees the same either way
                assert bool(is_same) == is_expected, (name, is_expected)
            both.append(bool(is_same))
    assert set(both) == {True, False}


class Projected(Model):
    """Layers before the blocks, of which one runs after them as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.both = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        hidden = self.both(torch.tanh(self.first(self.embed(ids))))
        for block in self.blocks:
            hidden = block(hidden, scale=scale)
        return self.pooler(self.both(hidden))


def test_layers_before_the_blocks_are_quantized_before_them(tmp_path: Path) -> None:
    """The last layers see quantized blocks. The layer that runs before and after them is calibrated on both inputs."""
    original, data = Projected().eval(), batches()
    model, again = copy.deepcopy(original), copy.deepcopy(original)
    config = MXFP4Config(rotation=32, algorithm="gptq")
    quantize_(model, config, calibration=data, resume=tmp_path)
    assert len(list(tmp_path.iterdir())) == 5  # before, three blocks, after
    quantize_(again, config, calibration=data, resume=tmp_path)
    assert torch.equal(again.pooler.weight.qdata, model.pooler.weight.qdata)
    halfway = copy.deepcopy(original)
    grid = Grid(get_format("mxfp4"), "even", None)
    for done, name in (("first", "blocks.0.up"), ("blocks", "both"), ("both", "pooler")):
        halfway.set_submodule(done, model.get_submodule(done))
        x = inputs_of(halfway, name, data)
        solved = gptq(
            hadamard(original.get_submodule(name).weight.detach(), 32), rotated_hessian(x.T @ x, 32), grid, GPTQ()
        )
        assert (solved[0] == model.get_submodule(name).weight.qdata).float().mean() > 0.99, (
            name
        )  # another order of sums
    x = inputs_of(original, "blocks.0.up", data)
    solved = gptq(hadamard(original.blocks[0].up.weight.detach(), 32), rotated_hessian(x.T @ x, 32), grid, GPTQ())
    assert (solved[0] == model.blocks[0].up.weight.qdata).float().mean() < 0.95


def test_calibration_does_not_see_dropout_and_leaves_the_mode() -> None:
    model, data = Model().train(), batches()
    modes = {name: module.training for name, module in model.named_modules()}
    other = copy.deepcopy(model).eval()
    for one in (model, other):
        quantize_(one, {"linear": ROTATED}, calibration=data)
    assert torch.equal(model.pooler.weight.qdata, other.pooler.weight.qdata)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("algorithm", [GPTQ(), PARALLEL, GPTQ(act_order=True)])
def test_the_same_call_gives_the_same_codes(algorithm: GPTQ) -> None:
    original, data = Model(), batches()
    one, other = copy.deepcopy(original), copy.deepcopy(original)
    for model in (one, other):
        quantize_(model, MXFP4Config(algorithm=algorithm), calibration=iter(data))
    for a, b in zip(one.parameters(), other.parameters()):
        assert torch.equal(a.qdata, b.qdata) if isinstance(a, MXTensor) else torch.equal(a, b)


def as_tuples(data: list[Tensor]) -> Iterator[Any]:
    return ((ids, 1.0) for ids in data)


def as_dicts(data: list[Tensor]) -> Iterator[Any]:
    return ({"ids": ids, "scale": 1.0} for ids in data)


@pytest.mark.parametrize("convert", [as_tuples, as_dicts])
def test_batches_may_be_tuples_or_dicts(convert: Any) -> None:
    original, data = Model(), batches()
    expected, model = copy.deepcopy(original), copy.deepcopy(original)
    quantize_(expected, ROTATED, calibration=data)
    quantize_(model, ROTATED, calibration=convert(data))
    assert torch.equal(model.blocks[1].down.weight.qdata, expected.blocks[1].down.weight.qdata)


def test_a_mapping_mixes_formats_and_algorithms() -> None:
    model, data = Model(), batches()
    mapping = {
        "linear": ROTATED,
        "*.gate": NVFP4Config(rotation=16, algorithm="gptq"),
        "*.down": "mxfp6",
        "lm_head": "mxfp8",
    }
    quantize_(model, mapping, calibration=data)
    formats = {row.name: (row.format, row.rotation) for row in summary(model).quantized}
    assert formats["blocks.0.up.weight"] == ("mxfp4", 32)
    assert formats["blocks.0.gate.weight"] == ("nvfp4", 16)
    assert formats["blocks.0.down.weight"] == ("mxfp6_e2m3", None)
    assert formats["lm_head.weight"] == ("mxfp8_e4m3", None)


def test_a_model_without_blocks() -> None:
    original = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))
    mixing = torch.randn(64, 64)
    data = [torch.randn(64, 64) @ mixing for _ in range(4)]
    found = []
    for algorithm in ("rtn", "gptq"):
        model = copy.deepcopy(original)
        calibration = data if algorithm == "gptq" else None
        quantize_(model, MXFP4Config(activation=None, algorithm=algorithm), calibration=calibration)
        found.append(error(model, original, data))
    assert found[1] < 0.7 * found[0]


# Experts


def test_experts_see_the_tokens_that_are_routed_to_them(caplog: pytest.LogCaptureFixture) -> None:
    """Each expert has its own Hessian. One that gets no tokens is rounded to nearest, with a warning."""
    original, data = Model(MoEBlock, 1).eval(), batches(6)
    model = copy.deepcopy(original)
    config = MXFP4Config(rotation=32, activation=None, algorithm=GPTQ(sequential=False, min_tokens=16))
    with caplog.at_level(logging.WARNING, "mxquant"):
        quantize_(model, {"moe": config}, calibration=data)
    (record,) = [record for record in caplog.records if "fewer tokens" in record.getMessage()]
    assert record.getMessage() == (
        "2 matrices saw fewer tokens than GPTQ's min_tokens, so they are rounded to nearest; calibrate on more: "
        "blocks.0.experts.up matrix 3 of its stack (0 of 16), blocks.0.experts.down matrix 3 of its stack (0 of 16)"
    )
    rounded = copy.deepcopy(original)
    quantize_(rounded, {"moe": MXFP4Config(rotation=32, activation=None)})
    up, rounded_up = model.blocks[0].experts.up, rounded.blocks[0].experts.up
    assert torch.equal(up.qdata[3], rounded_up.qdata[3])
    assert not torch.equal(up.qdata[1], rounded_up.qdata[1])

    arguments: list[Any] = []
    experts = original.blocks[0].experts
    handle = experts.register_forward_pre_hook(lambda _, args: arguments.append(args))
    with torch.no_grad():
        for ids in data:
            original(ids)
    handle.remove()
    # A token may choose the expert twice.
    x = torch.cat([hidden.repeat_interleave((ids == 1).sum(1), 0) for hidden, ids, _ in arguments])
    first, second = (x @ experts.up[1].detach().T).chunk(2, -1)
    h = torch.nn.functional.silu(first) * second
    grid = Grid(get_format("mxfp4"), "even", None)
    for weight, rows, quantized in ((experts.up[1], x, up[1]), (experts.down[1], h, model.blocks[0].experts.down[1])):
        hessian = rotated_hessian(rows.T @ rows, 32)
        solved = gptq(hadamard(weight.detach(), 32), hessian, grid, GPTQ())
        assert (solved[0] == quantized.qdata).float().mean() > 0.99


def test_experts_and_a_linear_of_one_input_are_told_apart() -> None:
    class Shared(MoEBlock):
        def __init__(self) -> None:
            super().__init__()
            self.shared = nn.Linear(64, 64)

        def forward(self, hidden_states: Tensor, scale: float = 1.0) -> Tensor:
            x = self.norm(hidden_states).flatten(0, -2)
            ids = routing(x.shape[0])
            y = self.shared(x) + self.experts(x, ids, x[:, 2:4].sigmoid())
            return hidden_states + y.view(hidden_states.shape)

    model, data = Model(Shared, 1), batches()
    x = inputs_of(model.eval(), "blocks.0.shared", data)
    weight = model.blocks[0].shared.weight.detach().clone()
    quantize_(model, MXFP4Config(algorithm=PARALLEL), calibration=data)
    solved = gptq(weight, x.T @ x, Grid(get_format("mxfp4"), "even", None), GPTQ())
    assert (solved[0] == model.blocks[0].shared.weight.qdata).float().mean() > 0.99


@pytest.mark.parametrize("sequential", [True, False])
def test_a_layer_that_runs_twice_is_calibrated_on_both_inputs(sequential: bool) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.mix(torch.relu(self.mix(x)))

    model, data = Twice(), [torch.randn(64, 64) for _ in range(4)]
    x = inputs_of(model, "mix", data)
    assert x.shape[0] == 2 * 256
    weight = model.mix.weight.detach().clone()
    quantize_(model, MXFP4Config(algorithm=GPTQ(sequential=sequential)), calibration=data)
    grid = Grid(get_format("mxfp4"), "even", None)
    solved = gptq(weight, x.T @ x, grid, GPTQ())
    assert (solved[0] == model.mix.weight.qdata).float().mean() > 0.99
    first = torch.cat(data)
    of_one = gptq(weight, first.T @ first, grid, GPTQ())
    assert (of_one[0] == model.mix.weight.qdata).float().mean() < 0.9


def test_a_block_that_is_listed_twice_is_no_chain() -> None:
    model, data = Model(), batches()
    model.blocks[2] = model.blocks[0]
    quantize_(model, ROTATED, calibration=data)
    assert not any("forward" in vars(module) for module in model.modules())
    assert model.blocks[2].up.weight is model.blocks[0].up.weight
    assert isinstance(model.blocks[0].up.weight, MXTensor)


def test_a_forward_that_another_library_set_is_kept() -> None:
    model = Model()
    wrapped = model.blocks[1].forward

    def forward(hidden_states: Tensor, scale: float = 1.0) -> Tensor:
        return wrapped(hidden_states, scale)

    model.blocks[1].forward = forward
    quantize_(model, ROTATED, calibration=batches())
    assert model.blocks[1].forward is forward


def test_a_layer_that_never_runs_is_rounded_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    model.unused = nn.Linear(64, 64)
    weight = model.unused.weight.detach().clone()
    with caplog.at_level(logging.WARNING, "mxquant"):
        quantize_(model, ROTATED, calibration=batches())
    assert "unused.weight: no input was seen" in caplog.text
    assert (model.unused.weight.dequantize() - weight).norm() < 0.15 * weight.norm()


def test_too_few_tokens_are_counted_in_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    data = batches(1)
    with caplog.at_level(logging.WARNING, "mxquant"):
        quantize_(Model(), MXFP4Config(algorithm=GPTQ(min_tokens=10_000)), calibration=data)
    (record,) = caplog.records
    assert record.getMessage().startswith("10 matrices saw fewer tokens than GPTQ's min_tokens")
    assert f"blocks.0.down.weight ({data[0].numel()} of 10000)" in record.getMessage()
    assert record.getMessage().endswith("10000), ...")


# Stages


def test_block_stages_capture_the_models_calls() -> None:
    model, data = Model().eval(), batches()
    names = [name for name, _ in model.named_parameters()]
    with calibration_mode(model):
        stages = block_stages(model, model_stage(model, data), names)
        assert [stage.name for stage in stages] == ["blocks.0", "blocks.1", "blocks.2"]
        hidden = model.embed(data[1])
        assert torch.equal(stages[0].calls[1][0][0], hidden)
        assert stages[2].calls[1][1] == {"scale": 1.0}
    assert block_stages(Unchained(), model_stage(Unchained(), data), names) == []
    assert block_stages(nn.Linear(64, 64), model_stage(nn.Linear(64, 64), data), ["weight"]) == []


def test_compiled_blocks_give_the_codes_of_eager_ones() -> None:
    """They run eagerly meanwhile, since compiled modules call no hooks."""
    model = Model()
    expected = copy.deepcopy(model)
    for block in model.blocks:
        block.compile(backend="eager")
    data = batches()
    for one in (model, expected):
        quantize_(one, ROTATED, calibration=data)
    for (name, weight), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        if isinstance(weight, MXTensor):
            assert torch.equal(weight.qdata, other.qdata), name  # type: ignore[attr-defined]
