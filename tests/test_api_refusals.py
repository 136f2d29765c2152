"""What quantize_ refuses: the message says what was given and what to do, and the model is as it was."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from small_models import Picky, WithExperts, mlp, snapshot
from torch import Tensor, nn

import mxquant
from mxquant import dequantize_, quantize_
from mxquant.backends import unregister_backend


@pytest.fixture
def picky(fixed_backends: None) -> Iterator[type[Picky]]:
    yield mxquant.register_backend(Picky)
    unregister_backend(Picky.name)


def with_weight(make: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    """A model whose last linear has a weight that cannot be quantized, behind one that can."""

    def build() -> nn.Module:
        model = mlp()
        model[2].weight = nn.Parameter(make(model[2].weight.detach()), requires_grad=False)
        return model

    return build


def spoiled(value: float, dtype: torch.dtype = torch.float32) -> Callable[[Tensor], Tensor]:
    def spoil(weight: Tensor) -> Tensor:
        weight = weight.to(dtype)
        weight[3, 5] = value
        return weight

    return spoil


class Foreign(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def foreign_model() -> nn.Module:
    model = mlp()
    weight = torch.randn(16, 64).as_subclass(Foreign)
    weight._is_param = True
    model[2]._parameters["weight"] = weight
    return model


NOT_FINITE = r"2.weight \(16, 64\) holds NaN or Inf; repair the weight, or skip it"
BAD_WEIGHTS = [
    (with_weight(spoiled(float("nan"))), ValueError, NOT_FINITE),
    (with_weight(spoiled(float("inf"))), ValueError, NOT_FINITE),
    (with_weight(spoiled(-float("inf"))), ValueError, NOT_FINITE),
    (with_weight(spoiled(float("nan"), torch.bfloat16)), ValueError, NOT_FINITE),
    (with_weight(spoiled(1e39, torch.float64)), ValueError, "2.weight .* holds values beyond fp32's range"),
    (with_weight(lambda w: w.int()), TypeError, "2.weight is torch.int32; only bfloat16, float16, .* convert it"),
    (with_weight(lambda w: w.to(torch.complex64)), TypeError, "2.weight is torch.complex64; only bfloat16"),
    (with_weight(lambda w: w.to(torch.float8_e4m3fn)), TypeError, "2.weight is torch.float8_e4m3fn; only bfloat16"),
    (with_weight(lambda w: w.to("meta")), NotImplementedError, r"2.weight \(16, 64\) is on the meta device .* load"),
    (with_weight(lambda w: w[:0]), ValueError, r"2.weight \(0, 64\) is empty: there is nothing to quantize; skip it"),
    (foreign_model, NotImplementedError, "2.weight is a Foreign of layout .*; only ordinary, dense tensors can be"),
    (
        with_weight(lambda w: w.to_sparse()),
        NotImplementedError,
        "2.weight is a Parameter of layout torch.sparse_coo",
    ),
]


@pytest.mark.parametrize("build, error, message", BAD_WEIGHTS)
def test_bad_weights_are_refused_before_any_change(build: Any, error: type[Exception], message: str) -> None:
    model = build()
    before = snapshot(model)
    with pytest.raises(error, match=message):
        quantize_(model, "mxfp4")
    assert snapshot(model) == before


def test_uninitialized_weights_are_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LazyLinear(8))
    with pytest.raises(ValueError, match=r"1.weight is not initialized yet; run the model once"):
        quantize_(model, "mxfp4")
    assert type(model[0].weight) is nn.Parameter


@pytest.mark.parametrize(
    "config, options, error, message",
    [
        ("mxpf4", {}, ValueError, "'mxpf4' is not a config; .* did you mean 'mxfp4'"),
        ({"weight": "mxfp4", "scale_mode": "up"}, {}, ValueError, "scale_mode='up'.*; use one of floor"),
        ({"liner": "mxfp4"}, {}, ValueError, "key 'liner' matches no .* did you mean 'linear'"),
        ({"linear": "mxfp4", "*.q_proj": "mxfp8"}, {}, ValueError, r"'\*.q_proj' matches no module"),
        (
            {"moe": "mxfp4"},
            {},
            NotImplementedError,
            r"experts.w1 \(asked for by 'moe'\) \(2, 32, 32\): .*; leave",
        ),
        (
            mxquant.mxfp4(backend="typo"),
            {},
            ValueError,
            r"fc.weight \(32, 32\): backend 'typo' is unknown; reg",
        ),
        (None, {}, TypeError, "config is None"),
        ("mxfp4", {"filter_fn": "fc"}, TypeError, "filter_fn must be a function .*; got 'fc'"),
        ("mxfp4", {"device": "gpu"}, ValueError, "device='gpu' cannot be used here: "),
        ("mxfp4", {"device": "meta"}, ValueError, "device='meta' holds no values"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_before_any_change(
    config: object, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = WithExperts()
    before = snapshot(model)
    with pytest.raises(error, match=message):
        quantize_(model, config, **options)
    assert snapshot(model) == before


def test_backend_that_rejects_the_config_is_refused_before_any_change(picky: type[Picky]) -> None:
    model = mlp()
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"2.weight \(16, 64\): backend 'picky' cannot .*: only mxfp4"):
        quantize_(model, {"0": mxquant.mxfp4(activation=None, backend="picky"), "2": mxquant.nvfp4(backend="picky")})
    assert snapshot(model) == before


def test_filter_that_selects_nothing_warns(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    quantize_(model, "mxfp4", filter_fn=lambda module, name: name == "linear")
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
    (record,) = caplog.records
    assert record.getMessage() == (
        "nothing is quantized: filter_fn is false for all 2 weights that the config selects, such as 0.weight. It is "
        "given (module, name), with names such as '0'"
    )


def test_filter_that_skips_only_quantized_weights_does_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    quantize_(model, "mxfp4")
    quantize_(model, "mxfp4", filter_fn=lambda module, name: False)
    quantize_(mlp(), "mxfp4", filter_fn=lambda module, name: name == "0")
    assert caplog.text == ""


def test_model_without_linears_is_refused_with_a_remedy() -> None:
    model = nn.Sequential(nn.Conv2d(3, 32, 4))
    with pytest.raises(
        ValueError, match=r"neither nn\.Linear .* nor experts\. An nn\.Embedding .* where a mapping names"
    ):
        quantize_(model, "mxfp4")


@pytest.mark.parametrize("function", [lambda m: quantize_(m, "mxfp4"), dequantize_, mxquant.summary])
def test_only_modules_are_taken(function: Any) -> None:
    with pytest.raises(TypeError, match=r"_? takes an nn.Module; got Tensor. For a tensor, use mxquant.quantize"):
        function(torch.randn(4, 4))
