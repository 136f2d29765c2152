"""Blocks are calibrated on the inputs that they have in the model, also if they work in place, pass tensors or cache.

Each such model is compared with one of the same weights that does the same without: their codes have to be equal.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from algorithms.calibration_models import WIDTH, Model, batches
from mxquant import GPTQ, MXFP4Config, MXTensor, quantize_
from mxquant.algorithms.blockwise import block_stages, calibration_mode, model_stage
from mxquant.algorithms.gptq import Grid, gptq
from mxquant.formats import get_format

WEIGHTS = [f"blocks.{i}.{name}.weight" for i in range(3) for name in ("first", "second")]


def config(sequential: bool = True) -> MXFP4Config:
    return MXFP4Config(activation=None, algorithm=GPTQ(sequential=sequential))


def codes_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.qdata for name, p in model.named_parameters() if isinstance(p, MXTensor)}


def assert_same_codes(model: nn.Module, other: nn.Module) -> None:
    one, two = codes_of(model), codes_of(other)
    assert one.keys() == two.keys() != set()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []


class Projections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)


class Plain(Projections):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        return x + self.second(x).relu()


class InPlace(Projections):
    def forward(self, x: Tensor) -> Tensor:
        x += self.first(x)
        x += self.second(x).relu()
        return x


class Chain(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class HalvedBetween(Chain):
    """The change is in place: the input of a block is still the output tensor of the block before."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).mul_(0.5)
        return x


def vectors() -> list[Tensor]:
    mixing = torch.randn(WIDTH, WIDTH)
    return [torch.randn(128, WIDTH) @ mixing for _ in range(2)]


@pytest.mark.parametrize("sequential", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_blocks_may_work_in_place(whole: bool, sequential: bool) -> None:
    """`whole`: a single block, which runs as a whole model."""
    plain, in_place = (block() if whole else Chain(block) for block in (Plain, InPlace))
    in_place.load_state_dict(plain.state_dict())
    data = vectors()
    given = copy.deepcopy(data)
    for model in (plain, in_place):
        quantize_(model, config(sequential), calibration=given)
    assert_same_codes(in_place, plain)
    assert all(torch.equal(one, other) for one, other in zip(given, data, strict=True))


def test_changes_between_blocks_break_the_chain() -> None:
    model, data = HalvedBetween(Plain), vectors()
    with calibration_mode(model):
        assert block_stages(model, model_stage(model, data), WEIGHTS) == []
        assert len(block_stages(Chain(Plain), model_stage(Chain(Plain), data), WEIGHTS)) == 3


# A second tensor that goes along


class PairBlock(Projections):
    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        residual = x if residual is None else x + residual
        return self.second(torch.relu(self.first(residual))), residual


class Pairs(Chain):
    def __init__(self, by_keyword: bool = False, chained: bool = True) -> None:
        super().__init__(PairBlock)
        self.by_keyword, self.chained = by_keyword, chained

    def forward(self, x: Tensor) -> Tensor:
        residual = None
        for block in self.blocks:
            given = x if self.chained else x * 1
            x, residual = block(given, residual=residual) if self.by_keyword else block(given, residual)
        return x + residual


@pytest.mark.parametrize("sequential", [True, False])
@pytest.mark.parametrize("by_keyword", [True, False])
def test_a_second_output_is_passed_to_the_next_block(by_keyword: bool, sequential: bool) -> None:
    model, unchained = Pairs(by_keyword), Pairs(chained=False)
    unchained.load_state_dict(model.state_dict())
    data = vectors()
    with calibration_mode(model):
        assert len(block_stages(model, model_stage(model, data), WEIGHTS)) == 3
        assert block_stages(unchained, model_stage(unchained, data), WEIGHTS) == []
    for one in (model, unchained):
        quantize_(one, config(sequential), calibration=data)
    assert_same_codes(model, unchained)


# Caches


class Wrapped(nn.Module):
    """Without a config of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **batch: Any) -> Any:
        return self.inner(**batch).logits


def test_caches_do_not_grow_from_run_to_run() -> None:
    pytest.importorskip("transformers")
    from small_transformers import IDS, MODELS

    original = MODELS["llama"]()
    settings = MXFP4Config(activation=None, algorithm=GPTQ(min_tokens=1))
    expected, asked, wrapped = copy.deepcopy(original), copy.deepcopy(original), Wrapped(copy.deepcopy(original))
    quantize_(expected, settings, calibration=[{"input_ids": IDS, "use_cache": False}] * 2)
    quantize_(asked, settings, calibration=[{"input_ids": IDS, "use_cache": True}] * 2)
    quantize_(wrapped, settings, calibration=[{"input_ids": IDS}] * 2)
    assert_same_codes(asked, expected)
    assert_same_codes(wrapped.inner, expected)
    assert wrapped.inner.config.use_cache is True


def test_a_cache_in_a_batch_is_not_changed() -> None:
    """The codes are those of a model that is not run block by block."""
    transformers = pytest.importorskip("transformers")
    from small_transformers import IDS, MODELS

    model = MODELS["llama"]().eval()
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(IDS, past_key_values=cache)
    keys = cache.layers[1].keys.clone()
    settings = MXFP4Config(activation=None, algorithm=GPTQ(min_tokens=1))
    whole = copy.deepcopy(model)
    whole.model.layers[0].register_forward_hook(lambda module, args, output: output * 1)
    whole.model.layers[1].register_forward_pre_hook(lambda module, args: (args[0] * 1, *args[1:]))
    for one in (model, whole):
        quantize_(one, settings, calibration=[{"input_ids": IDS + 8, "past_key_values": cache}])
    assert torch.equal(cache.layers[1].keys, keys)
    assert_same_codes(model, whole)


def test_use_cache_of_nested_configs_is_restored() -> None:
    class Config:
        use_cache = True

    model = Model()
    model.blocks[0].config = model.blocks[1].config = config = Config()
    seen: list[bool] = []
    model.blocks[1].register_forward_hook(lambda *_: seen.append(config.use_cache))
    quantize_(model, MXFP4Config(algorithm="gptq"), calibration=batches(1))
    assert config.use_cache is True
    assert set(seen) == {False}


# Tied weights


def inputs_of(modules: list[nn.Module], run: nn.Module, data: list[Tensor]) -> list[Tensor]:
    """The inputs of each layer, as a matrix."""
    seen: list[list[Tensor]] = [[] for _ in modules]
    handles = [
        module.register_forward_pre_hook(lambda _, args, index=index: seen[index].append(args[0]))
        for index, module in enumerate(modules)
    ]
    with torch.no_grad():
        for x in data:
            run(x)
    for handle in handles:
        handle.remove()
    return [torch.cat(rows) for rows in seen]


@pytest.mark.parametrize("sequential", [True, False])
@pytest.mark.parametrize("other", ["blocks.1.second", "blocks.2.first"])
def test_tied_layers_are_calibrated_on_the_inputs_of_all(other: str, sequential: bool) -> None:
    """Tied layers of one block and of two. The inputs of one layer alone give other codes."""
    model, data = Chain(Plain), vectors()
    layers = [model.blocks[1].first, model.get_submodule(other)]
    layers[1].weight = layers[0].weight
    first, second = inputs_of(layers, model, data)
    weight, grid = layers[0].weight.detach().clone(), Grid(get_format("mxfp4"), "even", None)
    quantize_(model, {"blocks.1.first": config(sequential)}, calibration=data)
    assert layers[1].weight is layers[0].weight
    same = []
    for x in (torch.cat([first, second]), first, second):
        solved = gptq(weight, x.T @ x, grid, GPTQ())
        same.append((solved[0] == layers[0].weight.qdata).float().mean().item())
    assert same[0] > 0.99  # sums in another order
    assert max(same[1:]) < 0.95
