"""What users of comparable libraries stumble over: process-wide settings, wrong devices, tied and frozen weights."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from matmul_reference import quantized, quantized_linear
from safetensors.torch import load_file, save_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mxquant import MXTensor, flatten_state_dict, quantize, quantize_, unflatten_state_dict
from mxquant.reference import lookup


@pytest.mark.parametrize("activation", ["nvfp4", "fp8_e4m3", "mxfp4"])
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16, torch.float64])
def test_the_default_dtype_changes_nothing(default: torch.dtype, activation: str) -> None:
    x, w = torch.randn(8, 256) * 1e6, torch.randn(64, 256)
    weight = quantized(w, "nvfp4", activation)
    expected = F.linear(x, weight)
    torch.set_default_dtype(default)
    try:
        assert torch.equal(F.linear(x, weight), expected)
        assert torch.equal(quantize(w, "nvfp4").qdata, weight.qdata)
        quantize_(nn.Linear(32, 4, dtype=torch.float32), "nvfp4")
    finally:
        torch.set_default_dtype(torch.float32)


def test_operands_on_different_devices_are_refused() -> None:
    """Uninitialized memory would be the alternative."""
    layer = quantized_linear(64, 8, dtype=torch.float32)
    x = torch.randn(3, 64)
    with pytest.raises(ValueError, match="input is on meta"):
        F.linear(x.to("meta"), layer.weight)
    with pytest.raises(ValueError, match="bias is on meta"):
        F.linear(x, layer.weight, torch.empty(8, device="meta"))
    layer.to("meta")
    for call in (lambda: F.linear(x, layer.weight), lambda: x @ layer.weight.t()):
        with pytest.raises(ValueError, match="input is on cpu"):
            call()


def test_tables_made_under_a_fake_mode_are_real() -> None:
    layer, x = quantized_linear(64, 8, dtype=torch.float32), torch.randn(3, 64)
    expected = layer(x)
    for function in (lookup._element_table, lookup._scale_table):
        function.cache_clear()
    with FakeTensorMode(allow_non_fake_inputs=True):
        layer(x)
    assert torch.equal(layer(x), expected)


def test_loading_with_assign_leaves_weights_frozen() -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8))
    quantize_(model, "mxfp4")
    fresh = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8))
    fresh.load_state_dict(model.state_dict(), assign=True)
    fresh.requires_grad_(True)
    assert [p.requires_grad for p in fresh.parameters()] == [False, True, False, True]
    fresh(torch.randn(2, 64)).sum().backward()
    torch.optim.AdamW(fresh.parameters()).step()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 64)
        self.head = nn.Linear(64, 40, bias=False)
        self.up = nn.Linear(64, 64)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("config", ["mxfp4", {"head": "mxfp6", "up": "mxfp4"}], ids=["dense tie", "quantized tie"])
def test_tied_weights_are_written_once(config: object, tmp_path: object) -> None:
    model = Tied()
    quantize_(model, config)
    tensors, metadata = flatten_state_dict(model.state_dict())
    path = f"{tmp_path}/model.safetensors"
    save_file(tensors, path, metadata)
    state_dict = unflatten_state_dict(load_file(path), metadata)
    assert state_dict.keys() == model.state_dict().keys()
    assert state_dict["head.weight"] is state_dict["embed.weight"]
    fresh = Tied()
    fresh.load_state_dict(state_dict, assign=True)
    x = torch.randn(2, 64)
    assert torch.equal(fresh.head(x), model.head(x))


@pytest.mark.parametrize("value", [0.0, -1.0, torch.nan, torch.inf])
def test_scales_that_are_not_positive_and_finite_are_refused(value: float) -> None:
    """A missing scale that was loaded as 0 is a fault that others have had."""
    scale, weight = torch.tensor(value), quantize(torch.randn(4, 32), "nvfp4")
    with pytest.raises(ValueError, match="positive and finite"):
        weight.with_activation("fp8_e4m3", scale=scale)
    with pytest.raises(ValueError, match="positive and finite"):
        MXTensor.from_qdata(weight.qdata, weight.scale, "nvfp4", per_tensor_scale=scale)


def test_a_static_scale_of_one_element_may_have_any_shape() -> None:
    weight, x = quantize(torch.randn(4, 32), "mxfp4"), torch.randn(3, 32)
    expected = F.linear(x, weight.with_activation("fp8_e4m3", scale=torch.tensor(0.02)))
    given = torch.full((1, 1, 1), 0.02, requires_grad=True)
    assert torch.equal(F.linear(x, weight.with_activation("fp8_e4m3", scale=given)), expected)


def test_one_row_of_an_odd_number_of_bytes() -> None:
    weight, x = quantize(torch.randn(1, 98), "mxfp4")[:, :64], torch.randn(3, 64)
    assert torch.allclose(F.linear(x, weight), x @ weight.dequantize().mT, atol=1e-5)  # 64 products in another order


def test_copies_keep_the_class_and_the_backend() -> None:
    layer = nn.Linear(64, 8)
    quantize_(layer, {"weight": "mxfp4", "backend": "emulation"})
    for copied in (copy.copy(layer.weight), copy.deepcopy(layer.weight)):
        assert type(copied) is type(layer.weight)
        assert copied.backend == "emulation"
        assert isinstance(copied, nn.Parameter)


def test_squeezing_the_blocked_axis_is_refused() -> None:
    weight = quantize(torch.randn(5, 1, 1), "mxfp4")
    for call in (lambda: weight.squeeze(), lambda: weight.squeeze(-1)):
        with pytest.raises(NotImplementedError, match="squeezing the blocked axis"):
            call()
    assert weight.squeeze(1).shape == (5, 1)


def test_errors_show_no_values() -> None:
    weight, dense = quantize(torch.randn(4, 32), "mxfp4"), torch.full((4, 32), 123456.0)
    for call in (lambda: torch.cat([weight, dense]), lambda: setattr(weight, "data", dense)):
        with pytest.raises((ValueError, TypeError), match="an ordinary tensor of shape") as error:
            call()
        assert not re.search("123456", str(error.value))


def test_unflattening_without_metadata_says_what_to_pass() -> None:
    with pytest.raises(ValueError, match="metadata"):
        unflatten_state_dict({"a": torch.zeros(1)}, None)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: quantize(x, "nvfp4", per_tensor_scale=1.0),
        lambda x: quantize(x, "mxfp4", axis="0"),
        lambda x: quantize(x, "mxfp4", axis=True),
        lambda x: quantize(x, "mxfp4").with_activation("fp8_e4m3", scale=1.0),
        lambda x: MXTensor.from_qdata(x.to(torch.uint8), x.to(torch.uint8), "mxfp8", shape=64),
        lambda x: MXTensor.from_qdata(x.to(torch.uint8), x.to(torch.uint8), "mxfp8", axis="a"),
        lambda x: flatten_state_dict(None),
        lambda x: flatten_state_dict({"a": 1}),
        lambda x: unflatten_state_dict({}, "mxquant"),
    ],
)
def test_arguments_of_wrong_types_are_refused(call: object) -> None:
    with pytest.raises(TypeError):
        call(torch.randn(4, 32))  # type: ignore[operator]
