"""quantize_ and dequantize_ on whole models."""

import copy
import io
import logging
import pickle
import textwrap
import weakref
from collections.abc import Iterator

import pytest
import torch
from expecttest import assert_expected_inline
from small_models import Picky, Tied, WithExperts, mlp, snapshot
from torch import Tensor, nn

import mxquant
from mxquant import EmulatedMXTensor, MXFP4Config, MXTensor, dequantize_, quantize_
from mxquant.backends import Layout, unregister_backend
from mxquant.formats import WEIGHT_FORMATS
from mxquant.formats.spec import Format


def assert_equal_bytes(a: Tensor, b: Tensor) -> None:
    assert isinstance(a, MXTensor)
    assert isinstance(b, MXTensor)
    assert (a.metadata.scheme.weight, a.shape, a.dtype) == (b.metadata.scheme.weight, b.shape, b.dtype)
    for left, right in zip(a.canonical().operand, b.canonical().operand, strict=True):
        assert (left is None) == (right is None)
        assert left is None or torch.equal(left, right)


@pytest.fixture
def picky(fixed_backends: None) -> Iterator[type[Picky]]:
    yield mxquant.register_backend(Picky)
    unregister_backend(Picky.name)


@pytest.mark.parametrize("format", WEIGHT_FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_quantize_model_gives_the_bytes_of_quantize(format: str, dtype: torch.dtype) -> None:
    model = mlp(dtype=dtype)
    original = copy.deepcopy(model)
    assert quantize_(model, format) is None
    for layer, before in ((model[0], original[0]), (model[2], original[2])):
        assert isinstance(layer.weight, nn.Parameter)
        assert isinstance(layer.weight, EmulatedMXTensor)
        assert not layer.weight.requires_grad
        assert_equal_bytes(layer.weight, mxquant.quantize(before.weight, format))
    assert torch.equal(model[0].bias, original[0].bias)
    assert model(torch.randn(3, 40, dtype=dtype)).shape == (3, 16)


@pytest.mark.parametrize(
    "config",
    [
        MXFP4Config(),
        mxquant.mxfp4(),
        {"weight": "mxfp4"},
        {"linear": "mxfp4"},
        {"*": MXFP4Config()},
        {"0": "mxfp4", "2": "mxfp4"},
    ],
    ids=str,
)
def test_equivalent_configs_give_equal_weights(config: object) -> None:
    model = mlp()
    reference = copy.deepcopy(model)
    quantize_(model, config)
    quantize_(reference, "mxfp4")
    for name, parameter in reference.named_parameters():
        other = model.get_parameter(name)
        assert type(other) is type(parameter)
        if isinstance(parameter, MXTensor):
            assert_equal_bytes(other, parameter)
            assert (other.activation, other.backend) == ("mxfp4", "auto")


def test_the_config_reaches_the_weight() -> None:
    model = mlp()
    original = copy.deepcopy(model)
    config = {"weight": "mxfp8", "activation": "mxfp4", "scale_mode": "floor", "activation_scale_mode": "ceil"}
    quantize_(model, {"0": config, "2": {"weight": "mxfp6", "activation": None, "backend": "emulation"}})
    first, second = model[0].weight, model[2].weight
    assert_equal_bytes(first, mxquant.quantize(original[0].weight, "mxfp8", scale_mode="floor"))
    assert (first.metadata.scheme.activation, first.metadata.scheme.activation_scale_mode) == ("mxfp4", "ceil")
    assert (second.format, second.activation, second.backend) == ("mxfp6_e2m3", None, "emulation")


def test_a_bare_linear() -> None:
    linear = nn.Linear(40, 1)
    quantize_(linear, "mxfp4")
    assert isinstance(linear.weight, MXTensor)
    assert linear(torch.randn(2, 3, 40)).shape == (2, 3, 1)


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
def test_torch_transformer_layer_in_eval(format: str) -> None:
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True).eval()
    quantize_(layer, {"linear": {"weight": format, "activation": None}})
    reference = copy.deepcopy(layer)
    dequantize_(reference)
    x = torch.randn(2, 5, 32)
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), reference(x), rtol=1e-4, atol=1e-5)


def test_torch_attention() -> None:
    attention = nn.MultiheadAttention(32, 2, batch_first=True).eval()
    quantize_(attention, {"out_proj": {"weight": "mxfp8", "activation": None}})
    reference = copy.deepcopy(attention)
    dequantize_(reference)
    x = torch.randn(2, 5, 32)
    torch.testing.assert_close(attention(x, x, x), reference(x, x, x), rtol=1e-4, atol=1e-5)


def test_tied_weights_stay_tied() -> None:
    model = Tied()
    values = model.embed.weight.detach().clone()
    quantize_(model, {"linear": "mxfp8", "lm_head": "mxfp8"})
    assert model.lm_head.weight is model.embed.weight
    assert_equal_bytes(model.embed.weight, mxquant.quantize(values, "mxfp8"))
    assert model(torch.tensor([[1, 2, 3]])).shape == (1, 3, 48)
    dequantize_(model)
    assert model.lm_head.weight is model.embed.weight
    assert type(model.embed.weight) is nn.Parameter


def test_a_named_embedding_looks_up_quantized_rows() -> None:
    model = Tied()
    quantize_(model, {"embed": "mxfp6"})
    ids = torch.tensor([[3, 0], [3, 47]])
    assert torch.equal(model.embed(ids), model.embed.weight.dequantize()[ids])


def test_embedding_is_weight_only() -> None:
    """W8A16, whatever the config says of activations; tied to a linear, the weight multiplies and keeps the rule."""
    model = nn.Sequential(nn.Embedding(40, 32), nn.Linear(32, 40, bias=False))
    quantize_(model, {"0": "mxfp8"})
    assert [row.precision for row in mxquant.summary(model).quantized] == ["W8A16"]
    model = nn.Sequential(nn.Embedding(40, 32), nn.Linear(32, 40, bias=False))
    model[1].weight = model[0].weight
    quantize_(model, {"0": "mxfp8"})
    assert [row.precision for row in mxquant.summary(model).quantized] == ["W8A8"]


def test_attributes_of_parameters_are_kept() -> None:
    model = mlp()
    model[0].weight.weight_loader = "loader"
    quantize_(model, "mxfp4")
    assert model[0].weight.weight_loader == "loader"
    dequantize_(model)
    assert model[0].weight.weight_loader == "loader"


def test_replaced_weights_are_freed_one_by_one() -> None:
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])
    originals = [weakref.ref(layer.weight) for layer in model]
    alive = []

    class Counting(Layout):
        name = "counting"

        def pack(self, qdata: Tensor, scale: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
            alive.append(sum(original() is not None for original in originals))
            return qdata, scale

        def unpack(self, qdata: Tensor, scale: Tensor, fmt: Format, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
            return qdata, scale

    class Packing(Picky):
        name = "packing"
        layout = Counting()

    mxquant.register_backend(Packing)
    try:
        quantize_(model, mxquant.mxfp4(activation=None, backend="packing"))
    finally:
        unregister_backend("packing")
    assert alive == [4, 3, 2, 1]
    assert all(original() is None for original in originals)


@pytest.mark.parametrize("clock_step, shown", [(0.0, False), (2.0, True)])
def test_progress_bar_appears_when_it_takes_long(
    clock_step: float, shown: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ticks = iter(range(10**6))
    monkeypatch.setattr("tqdm.std.time", lambda: next(ticks) * clock_step)
    quantize_(mlp(), "mxfp4")
    assert ("quantizing" in capsys.readouterr().err) == shown


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_device_moves_what_is_quantized() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
    original = copy.deepcopy(model)
    quantize_(model, "mxfp4", device="cuda")
    assert model[0].weight.device.type == model[0].bias.device.type == "cuda"
    assert model[1].weight.device.type == "cpu"
    model.cpu()
    assert_equal_bytes(model[0].weight, mxquant.quantize(original[0].weight, "mxfp4"))


def test_device_of_the_model_moves_nothing() -> None:
    model = mlp()
    bias = model[0].bias
    quantize_(model, "mxfp4", device="cpu")
    assert model[0].bias is bias
    assert model[0].weight.device == torch.device("cpu")


def test_a_named_backend_is_used(picky: type[Picky]) -> None:
    model, x = mlp(), torch.randn(2, 40)
    quantize_(model, {"0": mxquant.mxfp4(activation=None, backend="picky"), "2": "mxfp8"})
    assert type(model[0].weight) is MXTensor
    assert type(model[2].weight) is EmulatedMXTensor
    assert torch.equal(model[0](x), torch.full((2, 64), 1000.0))


def test_quantizing_twice_is_refused() -> None:
    model = mlp()
    quantize_(model, {"0": "mxfp4"})
    before = dict(model.named_parameters())
    with pytest.raises(ValueError, match=r"0.weight is quantized already \(.*mxfp4.*\); call dequantize_\(model\)"):
        quantize_(model, "mxfp8")
    assert all(model.get_parameter(name) is parameter for name, parameter in before.items())
    quantize_(model, {"2": "mxfp8"})
    assert (model[0].weight.format, model[2].weight.format) == ("mxfp4", "mxfp8_e4m3")
    dequantize_(model)
    quantize_(model, "mxfp8")
    assert model[0].weight.format == "mxfp8_e4m3"


def test_skip_reasons_stay_with_the_modules() -> None:
    model = Tied()
    model.norm = nn.LayerNorm(32)
    quantize_(model, "mxfp4")
    for again in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert again.embed._mxquant_skipped == again.lm_head._mxquant_skipped == {"weight": "embedding"}
        assert not hasattr(again.fc, "_mxquant_skipped")
        assert not hasattr(again.norm, "_mxquant_skipped")
    quantize_(model, {"lm_head": "mxfp4"})
    assert not hasattr(model.embed, "_mxquant_skipped")
    quantize_(mlp(), "mxfp4", filter_fn=lambda module, name: name == "0")


def test_dequantize_removes_the_skip_reasons() -> None:
    model = mlp()
    quantize_(model, "mxfp4", filter_fn=lambda module, name: name == "0")
    assert model[2]._mxquant_skipped == {"weight": "filter_fn"}
    dequantize_(model)
    assert not hasattr(model[2], "_mxquant_skipped")


def test_filter_fn_is_given_modules_and_names() -> None:
    model = nn.Sequential(mlp(), nn.Linear(16, 16))
    quantize_(model, "mxfp4", filter_fn=lambda module, name: module.out_features == 16 and name != "1")
    assert [name for name, p in model.named_parameters() if isinstance(p, MXTensor)] == ["0.2.weight"]


@pytest.mark.parametrize("format", WEIGHT_FORMATS)
def test_dequantize_gives_ordinary_parameters(format: str) -> None:
    model = mlp(dtype=torch.bfloat16)
    quantize_(model, format)
    values = model[0].weight.dequantize()
    assert dequantize_(model) is None
    assert type(model[0].weight) is nn.Parameter
    assert model[0].weight.dtype == torch.bfloat16
    assert torch.equal(model[0].weight, values)


def test_dequantize_leaves_others_alone() -> None:
    model = mlp()
    before = snapshot(model)
    dequantize_(model)
    assert snapshot(model) == before


def test_experts_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    model = WithExperts()
    quantize_(model, "mxfp4")
    assert isinstance(model.fc.weight, MXTensor)
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("mxquant", logging.WARNING)
    assert_expected_inline(
        textwrap.fill(record.getMessage(), 100),
        """\
2 expert parameters (16,384 bytes) stay as they are (stacked experts in a bare ParameterDict: a
class of their own can have a layout, with register_experts_layout): experts.w1 (2, 32, 32),
experts.w2 (2, 32, 32). summary(model) lists all; map 'moe' to None to leave them out without this
warning""",
    )


def test_experts_left_out_on_purpose_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    quantize_(WithExperts(), {"linear": "mxfp4", "moe": None})
    assert not caplog.records


def test_a_quantized_model_is_saved_and_loaded() -> None:
    model = mlp()
    quantize_(model, "mxfp4", filter_fn=lambda module, name: name == "0")
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    x = torch.randn(2, 40)
    assert torch.equal(loaded(x), model(x))
    assert loaded[2]._mxquant_skipped == {"weight": "filter_fn"}
