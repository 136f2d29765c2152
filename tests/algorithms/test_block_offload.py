"""Block offload: GPTQ on another device gives the codes of GPTQ on the model's device, with one block moved at a time.

The device is simulated (`second_device`). It computes on the CPU, so codes are equal to the last bit, and an operation
that mixes devices is an error. `tests/gpu/test_calibration.py` has a real one.
"""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from second_device import CPU, DEVICE, SecondDevice
from torch import Tensor, nn

from algorithms.calibration_models import (
    VOCABULARY,
    WIDTH,
    Block,
    Model,
    MoEBlock,
    Stopped,
    TupleBlock,
    Unchained,
    batches,
    stop_after,
)
from mxquant import GPTQ, MXFP4Config, MXTensor, NVFP4Config, quantize_
from mxquant.algorithms import calibrate
from mxquant.algorithms.block_offload import BlockOffload
from mxquant.algorithms.forward_calls import clone_call

ROTATED = MXFP4Config(rotation=32, algorithm="gptq")


@pytest.fixture(autouse=True)
def device() -> Iterator[SecondDevice]:
    with SecondDevice() as entered:
        yield entered


def config(**settings: Any) -> MXFP4Config:
    return MXFP4Config(rotation=32, algorithm=GPTQ(min_tokens=16, **settings))


class BufferBlock(Block):
    """Buffers that the forward reads, changes in place, replaces and creates."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.ones(WIDTH))
        self.register_buffer("runs", torch.zeros(1))
        self.register_buffer("last", torch.zeros(1))

    def forward(self, hidden_states: Tensor, scale: float = 1.0) -> Tensor:
        self.runs += 1
        self.last = hidden_states[0, 0, :1] + self.shift[:1]
        self.register_buffer("made", self.last * 2)
        return super().forward(hidden_states + self.shift, scale)


class Around(Model):
    """Layers before the blocks, of which one runs after them as well, and a head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__(blocks=2)
        self.first, self.both = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.lm_head.weight = self.embed.weight

    def forward(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        hidden = self.both(torch.tanh(self.first(self.embed(ids))))
        for block in self.blocks:
            hidden = block(hidden, scale=scale)
        return self.lm_head(self.pooler(self.both(hidden)))


class Turn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("by", torch.randn(WIDTH))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states * self.by


class TurningBlock(Block):
    def forward(self, hidden_states: Tensor, device: torch.device, scale: float = 1.0) -> Tensor:  # type: ignore[override]
        return super().forward(self.turn(hidden_states) + torch.ones(WIDTH, device=device), scale)


class Shared(Model):
    """Blocks that share a parameter and a module with the layers around them, and that get a device as argument."""

    def __init__(self) -> None:
        super().__init__(TurningBlock, blocks=2)
        self.turn, self.final = Turn(), nn.LayerNorm(WIDTH)
        self.final.weight = self.blocks[-1].norm.weight
        for block in self.blocks:
            block.turn = self.turn

    def forward(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        hidden = self.turn(self.embed(ids))
        for block in self.blocks:
            hidden = block(hidden, device=hidden.device, scale=scale)
        return self.lm_head(torch.tanh(self.pooler(self.turn(self.final(hidden)))))


class TiedBlocks(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.blocks[2].norm.weight = self.blocks[0].norm.weight


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    config: Callable[[bool], object]
    """Makes the config; its argument: whether it is sequential."""


CASES = {
    "dense": Case(lambda: Model(blocks=2), lambda sequential: config(sequential=sequential)),
    "tuples, columns in another order": Case(
        lambda: Model(TupleBlock, 2), lambda sequential: config(sequential=sequential, act_order=True)
    ),
    "no chain of blocks": Case(lambda: Unchained(blocks=2), lambda sequential: config(sequential=sequential)),
    "experts": Case(lambda: Model(MoEBlock, 2), lambda sequential: config(sequential=sequential)),
    "buffers": Case(lambda: Model(BufferBlock, 2), lambda sequential: config(sequential=sequential)),
    "shared with what is around": Case(Shared, lambda sequential: config(sequential=sequential)),
    "tied blocks": Case(TiedBlocks, lambda sequential: config(sequential=sequential)),
    "formats, some rounded": Case(
        lambda: Model(blocks=2),
        lambda sequential: {
            "linear": NVFP4Config(algorithm=GPTQ(sequential=sequential), rotation=16),
            "*.gate": "mxfp8",
            "blocks.1": config(sequential=sequential),
            "lm_head": "mxfp6",
            "pooler": None,
        },
    ),
    "around the blocks": Case(
        Around, lambda sequential: {"linear": config(sequential=sequential), "lm_head": config(sequential=sequential)}
    ),
    "around the blocks, rounded": Case(
        Around,
        lambda sequential: {"blocks": config(sequential=sequential), "both": "mxfp8", "lm_head": "mxfp8"},
    ),
}


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    return named


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    """Equal values and classes; devices may differ."""
    found, wanted = tensors_of(model), tensors_of(expected)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        if isinstance(tensor, MXTensor):
            assert isinstance(found[name], MXTensor), name
            assert torch.equal(found[name].qdata.cpu(), tensor.qdata), name
            assert torch.equal(found[name].scale.cpu(), tensor.scale), name
            assert found[name].metadata == tensor.metadata, name
        else:
            assert torch.equal(found[name].cpu(), tensor), name


def assert_in_place(model: nn.Module, before: dict[str, tuple[Tensor, int]], *, partly: bool = False) -> None:
    """Quantized weights and their biases are on the device, all else is in its original memory on the CPU."""
    for name, tensor in tensors_of(model).items():
        module = model.get_submodule(name.rpartition(".")[0])
        beside = [one for one in module.parameters(recurse=False) if isinstance(one, MXTensor)]
        if beside and (isinstance(tensor, MXTensor) or name.endswith(".bias")):
            assert tensor.device == DEVICE, name
            continue
        assert tensor.device == CPU, name
        if isinstance(module, BufferBlock) and name.rpartition(".")[2] in ("last", "made"):
            continue
        was, address = before[name]
        assert tensor is was, name
        assert tensor.data_ptr() == address, name
    quantized = [isinstance(one, MXTensor) for one in model.parameters()]
    assert any(quantized) or partly


def places(model: nn.Module) -> dict[str, tuple[Tensor, int]]:
    return {name: (tensor, tensor.data_ptr()) for name, tensor in tensors_of(model).items()}


@pytest.mark.parametrize("sequential", [True, False], ids=["sequential", "parallel"])
@pytest.mark.parametrize("name", CASES)
def test_offloaded_calibration_gives_the_codes_of_the_models_own_device(name: str, sequential: bool) -> None:
    case = CASES[name]
    expected = case.make().eval()
    model, data = copy.deepcopy(expected), batches()
    before = places(model)
    quantize_(expected, case.config(sequential), calibration=data)
    quantize_(model, case.config(sequential), calibration=data, device=DEVICE)
    assert_same(model, expected)
    assert_in_place(model, before)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    model.to(DEVICE)
    assert model(data[0].to(DEVICE)).device == DEVICE


@pytest.mark.parametrize("kind", ["llama", "tied", "mixtral"])
def test_offloaded_calibration_of_transformers_models(kind: str) -> None:
    """Blocks also get a mask, positions and a cache; the cache must not change."""
    transformers = pytest.importorskip("transformers")
    from small_transformers import IDS, MODELS

    expected = MODELS[kind]().eval()
    expected.set_experts_implementation("eager")  # others ask the device's type for what it can do
    cache = transformers.DynamicCache(config=expected.config)
    with torch.no_grad():
        expected(IDS, past_key_values=cache)
    keys = cache.layers[1].keys.clone()
    data = [{"input_ids": IDS, "attention_mask": torch.ones_like(IDS).tril(4)}]
    data.append({"input_ids": IDS + 8, "past_key_values": cache})
    model = copy.deepcopy(expected)
    before = places(model)
    settings = config() if kind == "mixtral" else {"linear": config(), "lm_head": config()}
    quantize_(expected, settings, calibration=data)
    quantize_(model, settings, calibration=data, device=DEVICE)
    assert_same(model, expected)
    assert_in_place(model, before)
    assert torch.equal(cache.layers[1].keys, keys)
    assert cache.layers[1].keys.device == CPU


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class Mask:
    """A mask that is not a tensor but has a `to` method, as FlexAttention's."""

    def __init__(self, blocks: Tensor) -> None:
        self.blocks = blocks

    def to(self, device: torch.device) -> "Mask":
        return Mask(self.blocks.to(device))


def test_clone_call_moves_all_arguments() -> None:
    x = torch.randn(4)
    args, kwargs = clone_call(((x, Pair(x, x), [x, 1.5], torch.Size([2])), {"mask": Mask(x), "dtype": x.dtype}), DEVICE)
    assert all(one.device == DEVICE for one in (args[0], *args[1], args[2][0], kwargs["mask"].blocks))
    assert args[0] is args[1].first is args[1].second is args[2][0]
    assert isinstance(args[1], Pair)
    assert args[2][1] == 1.5
    assert type(args[3]) is torch.Size
    assert kwargs["dtype"] is x.dtype
    assert x.device == CPU


# Memory


@pytest.mark.parametrize("sequential", [True, False], ids=["sequential", "parallel"])
def test_the_device_holds_one_block_and_one_batch(device: SecondDevice, sequential: bool) -> None:
    """The peak does not grow with blocks or batches, but for the weights that stay."""

    def peak(blocks: int, count: int, kind: type[Model] = Model) -> int:
        model = kind(blocks=blocks)
        quantize_(Model(blocks=1), config(sequential=sequential), calibration=batches(1), device=DEVICE)  # tables
        already, device.peak = device.live(), 0
        quantize_(model, {"blocks": config(sequential=sequential)}, calibration=batches(count), device=DEVICE)
        return device.peak - device.live() if kind is Model else device.peak - already

    few = peak(1, 1)
    assert peak(4, 1) <= few
    assert peak(2, 4) <= few
    block = sum(one.nbytes for one in Block().parameters())
    hessian, batch = 4 * 96 * 96, 4 * 8 * 16 * 96
    # Of the widest layer: its Hessian, one in another order, and four copies in fp64 for its factor; its weights
    # rotated and transposed; and some of what a block computes of one batch.
    assert few < 3 * block + 2 * hessian + 4 * 2 * hessian + 4 * batch
    assert peak(4, 1, Unchained) > peak(1, 1, Unchained) + 2 * block  # moved as a whole


# Stop and resume


@pytest.mark.parametrize("sequential", [True, False], ids=["sequential", "parallel"])
@pytest.mark.parametrize("name", ["experts", "around the blocks", "no chain of blocks"])
def test_resume_of_an_offloaded_calibration(
    name: str, sequential: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a stop only quantized weights are on the device; the resumed call ends as one that was not stopped."""
    case, data = CASES[name], batches()
    original = case.make()
    expected = copy.deepcopy(original)
    with monkeypatch.context() as patch:
        solved = stop_after(patch, calibrate, "gptq", None)
        quantize_(expected, case.config(sequential), calibration=data)
    model = copy.deepcopy(original)
    before = places(model)
    with monkeypatch.context() as patch:
        stop_after(patch, calibrate, "gptq", len(solved) - 1)
        with pytest.raises(Stopped):
            quantize_(model, case.config(sequential), calibration=data, device=DEVICE, resume=tmp_path)
    assert_in_place(model, before, partly=True)
    again = copy.deepcopy(original)
    before = places(again)
    with monkeypatch.context() as patch:
        left = stop_after(patch, calibrate, "gptq", None)
        quantize_(again, case.config(sequential), calibration=data, device=DEVICE, resume=tmp_path)
    assert_same(again, expected)
    assert_in_place(again, before)
    assert len(left) < len(solved) or name == "no chain of blocks"


@pytest.mark.parametrize("count", [0, 1, 2, 9, 30])
def test_out_of_memory_leaves_the_model_unchanged(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever transfer fails: a block's or its inputs'."""
    model = Model(BufferBlock, 2)
    before = places(model)
    values = copy.deepcopy(model.state_dict())
    send, sent = Tensor.to, list[None]()

    def full(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if DEVICE in args:
            sent.append(None)
            if len(sent) > count:
                raise torch.OutOfMemoryError("the device is full")
        return send(tensor, *args, **kwargs)

    monkeypatch.setattr(Tensor, "to", full)
    with pytest.raises(torch.OutOfMemoryError):
        quantize_(model, ROTATED, calibration=batches(), device=DEVICE)
    monkeypatch.undo()
    for name, (tensor, address) in before.items():
        now = tensors_of(model)[name]
        if not name.endswith(("runs", "last")):  # which a forward has changed
            assert now is tensor
            assert now.data_ptr() == address
            assert torch.equal(now, values[name])
        assert now.device == CPU


# What stays


def test_a_model_that_is_on_the_device_is_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = Model().to(DEVICE), batches()
    monkeypatch.setattr(BlockOffload, "_load", None)  # nothing is moved
    quantize_(model, ROTATED, calibration=data, device=DEVICE)
    assert {tensor.device for tensor in tensors_of(model).values()} == {DEVICE}


def test_already_quantized_weights_stay_on_the_models_device() -> None:
    """They are used on the device only during a call."""
    model, data = Model(), batches()
    quantize_(model, {"*.gate": "mxfp4", "lm_head": "mxfp8"})
    gates = [block.gate.weight for block in model.blocks]
    quantize_(model, {"*.up": ROTATED, "*.down": ROTATED}, calibration=data, device=DEVICE)
    assert all(block.gate.weight is gate for block, gate in zip(model.blocks, gates, strict=True))
    assert {gate.device for gate in gates} == {model.lm_head.weight.device} == {CPU}
    assert model.blocks[0].up.weight.device == DEVICE


def test_batches_stay_on_their_device() -> None:
    model, data = Model(), batches()
    there = [one.to(DEVICE) for one in data]
    expected = copy.deepcopy(model)
    quantize_(expected, ROTATED, calibration=data)
    quantize_(model, ROTATED, calibration=there, device=DEVICE)
    assert_same(model, expected)
    assert {one.device for one in there} == {DEVICE}
    assert int(max(one.max() for one in data)) < VOCABULARY


def test_accelerates_hooks_are_refused() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = Model()
    accelerate.hooks.add_hook_to_module(model.blocks[1], accelerate.hooks.AlignDevicesHook("cpu"))
    with pytest.raises(ValueError, match=r"^blocks\.1 has a hook of accelerate's .* load the model without device_map"):
        quantize_(model, ROTATED, calibration=batches(), device=DEVICE)
    assert not any(isinstance(one, MXTensor) for one in model.parameters())
    quantize_(model, ROTATED, calibration=batches())
