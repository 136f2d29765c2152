"""Modules with quantized weights under what people do with modules: conversions, state dicts, meta, ties, attention."""

import copy

import pytest
import torch
from matmul_reference import FORMATS, activation64, assert_product, decode64, quantized_linear, same_bytes
from torch import nn

from mxquant import EmulatedMXTensor, MXFP4Config, MXFP6Config, MXFP8Config, MXTensor, NVFP4Config, quantize_
from mxquant.modules.quantize_target import Target, dequantized_parameter, quantized_parameter
from mxquant.modules.sites import Site

CONFIGS = {
    "mxfp4": MXFP4Config(),
    "mxfp6_e2m3": MXFP6Config("e2m3"),
    "mxfp6_e3m2": MXFP6Config("e3m2"),
    "mxfp8_e4m3": MXFP8Config("e4m3"),
    "mxfp8_e5m2": MXFP8Config("e5m2"),
    "nvfp4": NVFP4Config(),
}
WEIGHT_ONLY = MXFP4Config(activation=None)


def quantized(parameter: nn.Parameter, config: object) -> nn.Parameter:
    site = Site(nn.Linear(1, 1), "linear", "weight", parameter, kind="linear")
    return quantized_parameter(Target((site,), config))


def quantize_linears(model: nn.Module, config: object = WEIGHT_ONLY) -> nn.Module:
    """Swap the weights of all linears (attention's input projection too, which is a bare parameter), ties kept."""
    swapped: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name in ("weight", "in_proj_weight"):
            parameter = getattr(module, name, None)
            if isinstance(module, nn.Linear | nn.MultiheadAttention) and parameter is not None:
                if parameter not in swapped:
                    swapped[parameter] = quantized(parameter, config)
                setattr(module, name, swapped[parameter])
    return model


# The swap itself


@pytest.mark.parametrize("format", FORMATS)
def test_quantized_parameter_computes_with_the_decoded_weight(format: str) -> None:
    linear = nn.Linear(40, 8, dtype=torch.bfloat16)
    original = linear.weight.detach().clone()
    new = quantized(linear.weight, CONFIGS[format])
    assert isinstance(new, nn.Parameter)
    assert isinstance(new, EmulatedMXTensor)
    assert not new.requires_grad
    assert (new.format, new.activation, new.shape, new.dtype) == (format, format, (8, 40), torch.bfloat16)
    # The caller's parameter is as it was: the swap is theirs to make.
    assert torch.equal(linear.weight, original)
    assert linear.weight.requires_grad
    linear.weight = new
    x = torch.randn(3, 40)
    assert_product(linear(x.bfloat16()), activation64(x.bfloat16(), format), decode64(new), linear.bias)


def test_quantized_parameter_keeps_attributes() -> None:
    linear = nn.Linear(40, 8)
    loader = object()
    linear.weight.weight_loader = loader
    linear.weight.tensor_model_parallel = True
    new = quantized(linear.weight, WEIGHT_ONLY)
    assert new.weight_loader is loader
    assert new.tensor_model_parallel is True
    back = dequantized_parameter(new)
    assert back.weight_loader is loader
    assert type(back) is nn.Parameter


def test_dequantized_parameter_gives_the_decoded_values() -> None:
    new = quantized(nn.Linear(40, 8, dtype=torch.float16).weight, WEIGHT_ONLY)
    back = dequantized_parameter(new)
    assert back.dtype == torch.float16
    assert torch.equal(back, new.dequantize())


# Conversions


CONVERSIONS = {
    "half": (lambda m: m.half(), torch.float16),
    "float": (lambda m: m.float(), torch.float32),
    "double": (lambda m: m.double(), torch.float64),
    "bfloat16": (lambda m: m.bfloat16(), torch.bfloat16),
    "to(dtype)": (lambda m: m.to(torch.float16), torch.float16),
    "to(device)": (lambda m: m.to("cpu"), torch.bfloat16),
    "cpu": (lambda m: m.cpu(), torch.bfloat16),
    "to(device, dtype)": (lambda m: m.to("cpu", torch.float16), torch.float16),
}


@pytest.mark.parametrize("conversion", CONVERSIONS)
@pytest.mark.parametrize("format", ["mxfp4", "mxfp6_e3m2", "nvfp4"])
def test_module_conversions_keep_bytes_attributes_and_identity(format: str, conversion: str) -> None:
    """`module.to` swaps tensors in place: the parameter stays the object that an optimizer or a tie holds."""
    convert, dtype = CONVERSIONS[conversion]
    linear = quantized_linear(40, 8, format, format)
    loader = object()
    linear.weight.weight_loader = loader
    identity, before = id(linear.weight), linear.weight.detach().clone()
    assert convert(linear) is linear
    assert linear.weight.dtype == dtype
    assert id(linear.weight) == identity
    assert isinstance(linear.weight, nn.Parameter)
    assert isinstance(linear.weight, EmulatedMXTensor)
    assert linear.weight.weight_loader is loader
    assert torch.equal(linear.weight.qdata, before.qdata)
    assert torch.equal(linear.weight.scale, before.scale)
    x = torch.randn(3, 40, dtype=dtype)
    assert_product(linear(x), activation64(x, format), decode64(linear.weight), linear.bias)


def test_conversion_after_a_forward_and_backward() -> None:
    """A swap is refused while something else holds the tensor; a finished forward holds nothing."""
    model = nn.Sequential(quantized_linear(40, 40, activation="mxfp4", dtype=torch.float32), nn.ReLU())
    x = torch.randn(2, 40, requires_grad=True)
    model(x).sum().backward()
    model.bfloat16()
    assert model(x.detach().bfloat16()).dtype == torch.bfloat16
    model.float()
    assert model(x).dtype == torch.float32


def test_tied_weights_stay_tied() -> None:
    model = nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(64, 64)})
    model["b"].weight = model["a"].weight
    quantize_linears(model)
    assert model["a"].weight is model["b"].weight
    for convert in (
        lambda: model.to(torch.bfloat16),
        lambda: model.half(),
        lambda: model.to("cpu"),
        model.share_memory,
    ):
        convert()
        assert model["a"].weight is model["b"].weight
    twin = copy.deepcopy(model)
    assert twin["a"].weight is twin["b"].weight


def test_train_eval_requires_grad_and_zero_grad() -> None:
    model = quantized_linear(40, 8)
    model.train().eval().requires_grad_(False)
    model.zero_grad()
    assert [n for n, p in model.named_parameters()] == ["weight", "bias"]
    assert sum(p.numel() for p in model.parameters()) == 8 * 40 + 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_a_bf16_layer_takes_input_of_another_dtype_which_a_plain_one_refuses(dtype: torch.dtype) -> None:
    layer, x = nn.Linear(64, 8, dtype=torch.bfloat16), torch.randn(3, 64).to(dtype)
    with pytest.raises(RuntimeError, match="same dtype"):
        layer(x)
    quantize_(layer, {"linear": {"weight": "mxfp4", "activation": None}})
    y = layer(x)
    assert y.dtype == dtype
    expected = x.double() @ layer.weight.dequantize(torch.float64).mT + layer.bias.double()
    torch.testing.assert_close(y, expected.to(dtype))


# Meta


@pytest.mark.parametrize("format", FORMATS)
def test_to_meta_to_empty_and_load(format: str) -> None:
    """The way of large checkpoints: build on meta, make room, load."""
    model = quantized_linear(40, 8, format, format)
    skeleton = copy.deepcopy(model).to("meta")
    assert isinstance(skeleton.weight, MXTensor)
    assert skeleton.weight.qdata.is_meta
    skeleton.to_empty(device="cpu")
    assert isinstance(skeleton.weight, MXTensor)
    assert not skeleton.weight.qdata.is_meta
    skeleton.load_state_dict(model.state_dict())
    assert same_bytes(skeleton.weight, model.weight)
    x = torch.randn(2, 40, dtype=torch.bfloat16)
    assert torch.equal(skeleton(x), model(x))


def test_to_meta_to_empty_and_load_with_a_static_activation_scale() -> None:
    model = quantized_linear(40, 8, "nvfp4")
    static = model.weight.detach().with_activation("nvfp4", scale=torch.tensor(0.25))
    model.weight = nn.Parameter(static, requires_grad=False)
    skeleton = copy.deepcopy(model).to("meta").to_empty(device="cpu")
    skeleton.load_state_dict(model.state_dict())
    assert skeleton.weight.activation_scale.item() == 0.25


@pytest.mark.usefixtures("fixed_backends")
def test_class_is_chosen_when_a_meta_weight_gets_a_device() -> None:
    skeleton = copy.deepcopy(quantized_linear(40, 8)).to("meta").to_empty(device="cpu")
    assert type(skeleton.weight) is EmulatedMXTensor


# State dicts


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_load_state_dict_between_quantized_models(format: str, assign: bool) -> None:
    model, other = quantized_linear(40, 8, format, format), quantized_linear(40, 8, format, format)
    other.load_state_dict(model.state_dict(), assign=assign)
    assert same_bytes(other.weight, model.weight)
    assert isinstance(other.weight, nn.Parameter)
    assert not other.weight.requires_grad
    x = torch.randn(2, 40, dtype=torch.bfloat16)
    assert torch.equal(other(x), model(x))


def test_loading_copies_into_the_same_storage() -> None:
    model, other = quantized_linear(40, 8), quantized_linear(40, 8)
    pointer = other.weight.qdata.data_ptr()
    other.load_state_dict(model.state_dict())
    assert other.weight.qdata.data_ptr() == pointer


def test_loading_dense_weights_into_a_quantized_model_says_why_not() -> None:
    model = quantized_linear(40, 8)
    before = model.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"(?s)weight.*quantize"):
        model.load_state_dict(nn.Linear(40, 8, dtype=torch.bfloat16).state_dict())
    assert same_bytes(model.weight.detach(), before)


def test_assigning_dense_weights_makes_the_model_dense() -> None:
    model, plain = quantized_linear(40, 8), nn.Linear(40, 8, dtype=torch.bfloat16)
    model.load_state_dict(plain.state_dict(), assign=True)
    assert type(model.weight) is nn.Parameter
    x = torch.randn(2, 40, dtype=torch.bfloat16)
    assert torch.equal(model(x), plain(x))


def test_loading_quantized_weights_into_a_dense_model_says_why_not() -> None:
    plain = nn.Linear(40, 8, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"(?s)weight.*dequantize\(\)"):
        plain.load_state_dict(quantized_linear(40, 8).state_dict())


def test_assigning_quantized_weights_makes_the_model_quantized() -> None:
    model, plain = quantized_linear(40, 8, activation="mxfp4"), nn.Linear(40, 8, dtype=torch.bfloat16)
    plain.requires_grad_(False)
    plain.load_state_dict(model.state_dict(), assign=True)
    x = torch.randn(2, 40, dtype=torch.bfloat16)
    assert torch.equal(plain(x), model(x))


def test_loading_another_format_is_refused() -> None:
    model = quantized_linear(64, 8, "mxfp4")
    with pytest.raises(RuntimeError, match=r"(?s)mxfp4.*nvfp4|nvfp4.*mxfp4"):
        model.load_state_dict(quantized_linear(64, 8, "nvfp4").state_dict())


@pytest.mark.parametrize("swap", [False, True])
def test_load_state_dict_with_swapping(swap: bool) -> None:
    model, other = quantized_linear(40, 8), quantized_linear(40, 8)
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        other.load_state_dict(model.state_dict())
        other.half()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert torch.equal(other.weight.qdata, model.weight.qdata)
    assert other.weight.dtype == torch.float16


# Modules of torch that use their linears in ways of their own


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_bare_linear_as_the_root(config: object) -> None:
    linear = quantize_linears(nn.Linear(40, 8), config)
    x = torch.randn(3, 40)
    assert isinstance(linear.weight, MXTensor)
    assert_product(linear(x), activation64(x, config.format), decode64(linear.weight), linear.bias)  # type: ignore[attr-defined]


def dequantized_twin(model: nn.Module) -> nn.Module:
    """The same model with the decoded weights as dense ones."""
    twin = copy.deepcopy(model)
    for module in twin.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, MXTensor):
                setattr(module, name, dequantized_parameter(parameter))
    return twin


@pytest.mark.parametrize("mode", ["train", "eval", "inference_mode"])
@pytest.mark.parametrize("norm_first", [False, True])
def test_transformer_encoder_layer(mode: str, norm_first: bool) -> None:
    """In eval its fused fast path would read the packed weights as if they were plain ones."""
    layer = nn.TransformerEncoderLayer(64, 4, 96, dropout=0.0, batch_first=True, norm_first=norm_first)
    quantize_linears(layer)
    layer.train(mode == "train")
    x = torch.randn(2, 5, 64)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    twin = dequantized_twin(layer)
    with torch.inference_mode(mode == "inference_mode"):
        torch.testing.assert_close(layer(x), twin(x), rtol=1e-4, atol=1e-5)
        kept = ~mask
        result, expected = (m(x, src_key_padding_mask=mask)[kept] for m in (layer, twin))
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def test_transformer_encoder() -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 96, dropout=0.0, batch_first=True)
    model = quantize_linears(nn.TransformerEncoder(layer, 2)).eval()
    x = torch.randn(2, 5, 64)
    with torch.no_grad():
        torch.testing.assert_close(model(x), dequantized_twin(model)(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["train", "eval", "inference_mode"])
@pytest.mark.parametrize("kdim", [None, 40])
def test_multihead_attention(mode: str, kdim: int | None) -> None:
    """Its packed projection is sliced into three by rows, its output projection is used through `.weight` alone."""
    attention = quantize_linears(nn.MultiheadAttention(64, 4, batch_first=True, kdim=kdim, vdim=kdim))
    attention.train(mode == "train")
    x, memory = torch.randn(2, 5, 64), torch.randn(2, 7, kdim or 64)
    twin = dequantized_twin(attention)
    with torch.inference_mode(mode == "inference_mode"):
        for need_weights in (False, True):
            for query, key in ((x, x), (x, memory)):
                if key is x and kdim:
                    continue
                result, weights = attention(query, key, key, need_weights=need_weights)
                expected, expected_weights = twin(query, key, key, need_weights=need_weights)
                torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
                if need_weights:
                    torch.testing.assert_close(weights, expected_weights, rtol=1e-4, atol=1e-5)


def test_activation_quantization_inside_attention() -> None:
    """W4A4 differs from weight-only: the projections did quantize their inputs."""
    attention = nn.MultiheadAttention(64, 4, batch_first=True).eval()
    weight_only, both = (quantize_linears(copy.deepcopy(attention), c) for c in (WEIGHT_ONLY, CONFIGS["mxfp4"]))
    x = torch.randn(2, 5, 64)
    with torch.no_grad():
        assert not torch.allclose(weight_only(x, x, x)[0], both(x, x, x)[0], atol=1e-4)
