"""explain: every backend in order, with "chosen" or its reason."""

from collections.abc import Iterator

import pytest
import torch
from expecttest import assert_expected_inline
from small_models import Picky, mlp
from torch import nn

import mxquant
from mxquant import explain, quantize_
from mxquant.backends import unregister_backend


@pytest.fixture
def picky(fixed_backends: None) -> Iterator[type[Picky]]:
    yield mxquant.register_backend(Picky)
    unregister_backend(Picky.name)


def test_explain_a_layer(picky: type[Picky]) -> None:
    model = mlp()
    quantize_(model, "mxfp4")
    explanation = explain(model[0], input_shape=(7, 40))
    assert explanation.chosen == "emulation"
    assert_expected_inline(
        str(explanation),
        """\
W4A4: mxfp4 input [7, 40] times mxfp4 weight [64, 40] on cpu; requested backend: auto
| backend   | verdict                               |
|-----------|---------------------------------------|
| fp8       | needs an NVIDIA GPU, this is cpu      |
| fp16      | needs an NVIDIA GPU, this is cpu      |
| triton    | needs a CUDA or ROCm GPU, this is cpu |
| picky     | weight-only                           |
| emulation | chosen                                |""",
    )


def test_explain_what_was_asked_for(picky: type[Picky]) -> None:
    model = mlp()
    quantize_(model, {"0": mxquant.mxfp4(activation=None), "2": mxquant.mxfp4(activation=None, backend="emulation")})
    assert explain(model[0]).backends[-2:] == [("picky", "chosen"), ("emulation", "could compute it too")]
    assert explain(model[2].weight).backends[-2:] == [("picky", "could compute it too"), ("emulation", "chosen")]
    assert explain(model[2]).requested == "emulation"


def test_explain_another_device(picky: type[Picky]) -> None:
    weight = mxquant.quantize(torch.randn(16, 32), "mxfp4")
    absent = "" if torch.cuda.is_available() else ", which is not here"
    assert explain(weight, device="cuda").matmul.endswith(f"on cuda{absent}")
    assert explain(weight, device="cpu").matmul.endswith("on cpu")
    layer = nn.Linear(32, 16)
    quantize_(layer, {"linear": mxquant.mxfp4(activation=None)})
    assert explain(layer, device="cuda").chosen == "picky"


def test_explain_in_html(picky: type[Picky]) -> None:
    layer = nn.Linear(32, 16)
    quantize_(layer, "nvfp4")
    text = explain(layer)._repr_html_()
    assert "<td>picky</td><td>only mxfp4, not nvfp4</td>" in text
    assert "<td>emulation</td><td>chosen</td>" in text


@pytest.mark.parametrize("shape", [(), (40, 3), (2, 64), (-1, 40)])
def test_explain_checks_the_input(shape: tuple[int, ...]) -> None:
    model = mlp()
    quantize_(model, "mxfp4")
    fits_not = r"input_shape \(.*\) does not fit .* \(64, 40\): no size is negative, .* in_features, 40"
    with pytest.raises(ValueError, match=fits_not):
        explain(model[0], shape)


def test_explain_refuses_what_is_not_quantized() -> None:
    model = mlp()
    with pytest.raises(ValueError, match="Sequential has no quantized weight of its own; quantize it"):
        explain(model)
    quantize_(model, {"2": "mxfp4"})
    with pytest.raises(
        ValueError, match=r"has no quantized weight of its own; pass one of its layers, such as model.get_submodule"
    ):
        explain(model)
    with pytest.raises(ValueError, match=r"Tensor of shape \(4, 4\) is no quantized weight; pass a matrix that"):
        explain(torch.randn(4, 4))
    with pytest.raises(TypeError, match="takes a module or a tensor; got str"):
        explain("0.weight")
