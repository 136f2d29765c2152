"""torchao's own quantize_ takes mxquant's configs."""

import copy
import importlib
import subprocess
import sys
from typing import Any

import pytest
import torch
import torchao
from small_models import mlp
from torch import nn

import mxquant
from mxquant import MXFP4Config, MXFP6Config, MXFP8Config, MXTensor, NVFP4Config


@pytest.mark.parametrize(
    "config",
    [MXFP4Config(), MXFP6Config("e3m2"), MXFP8Config(activation=None), NVFP4Config(activation="mxfp8")],
    ids=repr,
)
def test_the_same_bytes_as_mxquant(config: Any) -> None:
    model = mlp()
    reference = copy.deepcopy(model)
    torchao.quantization.quantize_(model, config)
    mxquant.quantize_(reference, config)
    x = torch.randn(3, 40)
    for index in (0, 2):
        weight, expected = model[index].weight, reference[index].weight
        assert isinstance(weight, MXTensor)
        assert weight.metadata == expected.metadata
        assert torch.equal(weight.qdata, expected.qdata)
        assert torch.equal(weight.scale, expected.scale)
    assert torch.equal(model(x), reference(x))


def test_torchaos_filter_decides() -> None:
    model = nn.ModuleDict({"lm_head": nn.Linear(32, 32), "embed": nn.Embedding(8, 32), "fc": nn.Linear(32, 32)})
    torchao.quantization.quantize_(model, MXFP4Config(), filter_fn=lambda module, name: name in ("lm_head", "embed"))
    assert {name for name, p in model.named_parameters() if isinstance(p, MXTensor)} == {
        "lm_head.weight",
        "embed.weight",
    }


def test_modules_that_cannot_be_quantized_are_refused() -> None:
    model = nn.Sequential(nn.Conv1d(4, 4, 1))
    with pytest.raises(ValueError, match=r"Conv1d\(.*\) cannot be quantized, only nn.Linear, .* can; .* filter_fn"):
        torchao.quantization.quantize_(model, MXFP4Config(), filter_fn=lambda module, name: name == "0")


def test_linears_with_their_own_forward_and_unfit_embeddings_are_refused() -> None:
    class Doubling(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    for module, why in ((Doubling(32, 32), "a forward of its own"), (nn.Embedding(8, 32, max_norm=1.0), "max_norm")):
        with pytest.raises(ValueError, match=rf"cannot be quantized \(.*{why}.*; give torchao's quantize_ a filter_fn"):
            torchao.quantization.quantize_(nn.Sequential(module), MXFP4Config(), filter_fn=lambda *_: _[1] == "0")


def test_an_embedding_quantizes_no_activations() -> None:
    model = nn.Sequential(nn.Embedding(8, 32))
    reference = copy.deepcopy(model)
    torchao.quantization.quantize_(model, MXFP4Config(), filter_fn=lambda module, name: name == "0")
    mxquant.quantize_(reference, {"0": MXFP4Config()})
    assert model[0].weight.metadata == reference[0].weight.metadata
    assert model[0].weight.activation is None


def test_bad_weights_are_refused() -> None:
    model = mlp()
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"Linear\(.*\).weight \(64, 40\) holds NaN or Inf"):
        torchao.quantization.quantize_(model, MXFP4Config())


def test_quantizing_twice_is_refused() -> None:
    model = mlp()
    torchao.quantization.quantize_(model, MXFP4Config())
    with pytest.raises(ValueError, match="is quantized already"):
        torchao.quantization.quantize_(model, MXFP4Config())


def test_importing_again_is_harmless() -> None:
    import mxquant.integrations.torchao as integration

    importlib.reload(integration)
    model = mlp()
    torchao.quantization.quantize_(model, MXFP4Config())
    assert isinstance(model[0].weight, MXTensor)


def test_importing_mxquant_is_enough() -> None:
    script = (
        "import torch, mxquant\n"
        "from torchao.quantization import quantize_\n"
        "model = torch.nn.Linear(32, 32)\n"
        "quantize_(model, mxquant.MXFP4Config())\n"
        "assert isinstance(model.weight, mxquant.MXTensor)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
