"""GPT-2: its linear layers are transformers' `Conv1D`, whose weight is [in, out] and whose forward is `addmm`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

import mxquant
from mxquant import MXTensor, dequantize_, explain, mxfp4, quantize_, save_pretrained, summary
from mxquant.integrations.transformers import MXQuantConfig

IDS = torch.arange(24).reshape(2, 12)


def gpt2(dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    config = GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=64, n_positions=32, tie_word_embeddings=True)
    return GPT2LMHeadModel(config).to(dtype).eval()


def conv1d(dtype: torch.dtype = torch.bfloat16) -> Conv1D:
    torch.manual_seed(1)
    layer = Conv1D(48, 96).to(dtype)
    layer.bias.data.normal_()
    return layer


def as_linear(layer: Conv1D) -> nn.Linear:
    linear = nn.Linear(layer.nx, layer.nf).to(layer.weight.dtype)
    linear.weight.data, linear.bias.data = layer.weight.data.t().contiguous(), layer.bias.data.clone()
    return linear


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("config", ["mxfp4", "nvfp4", mxfp4(activation=None), mxfp4(rotation=32)], ids=str)
def test_a_conv1d_gives_the_bits_of_the_linear_that_it_stands_for(config: object, dtype: torch.dtype) -> None:
    layer = conv1d(dtype)
    linear = as_linear(layer)
    quantize_(layer, config)
    quantize_(linear, config)
    assert torch.equal(layer.weight.t(), linear.weight)
    x = torch.randn(2, 5, 96, dtype=dtype)
    with torch.no_grad():
        expected = linear(x)
        assert torch.equal(layer(x), expected)
    assert torch.equal(layer(x), expected), "with a bias that requires a gradient"
    upstream = torch.randn_like(expected)
    x.requires_grad_()
    assert torch.equal(*(torch.autograd.grad(one(x), x, upstream)[0] for one in (layer, linear)))


def test_gpt2_is_quantized_by_default() -> None:
    model = gpt2()
    original = copy.deepcopy(model)
    quantize_(model, "mxfp4")
    layers = [module for module in model.modules() if isinstance(module, Conv1D)]
    assert len(layers) == 8
    assert all(isinstance(layer.weight, MXTensor) and layer.weight.axis == -2 for layer in layers)
    found = summary(model, original)
    assert {row.kind for row in found.quantized} == {"linear"}
    assert all(row.sqnr_db is not None and 15 < row.sqnr_db < 25 for row in found.quantized)
    assert {row.name: row.reason for row in found.skipped}["transformer.wte.weight"] in (
        "embedding",
        "output embedding",
    )
    assert "[192, 64]" in explain(model.transformer.h[0].attn.c_attn, (3, 64)).matmul
    similarity = nn.functional.cosine_similarity(logits(model).float().flatten(), logits(original).float().flatten(), 0)
    assert similarity > 0.9


def test_keys_name_a_conv1d() -> None:
    model = gpt2()
    quantize_(model, {"linear": "mxfp8", "*.c_fc": "mxfp4", "transformer.h.1": None})
    formats = {row.name: row.format for row in summary(model).quantized}
    assert formats["transformer.h.0.mlp.c_fc.weight"] == "mxfp4"
    assert formats["transformer.h.0.attn.c_attn.weight"] == "mxfp8_e4m3"
    assert not any(name.startswith("transformer.h.1") for name in formats)


def test_dequantize_gives_conv1d_weights_back() -> None:
    model = gpt2()
    quantize_(model, mxfp4(activation=None))
    expected = logits(model)
    dequantize_(model)
    weight = model.transformer.h[0].mlp.c_fc.weight
    assert type(weight) is nn.Parameter
    assert tuple(weight.shape) == (64, 256)
    assert torch.allclose(logits(model).float(), expected.float(), atol=0.05)


def test_gpt2_saves_and_loads(tmp_path: Path) -> None:
    model = gpt2()
    model.save_pretrained(tmp_path / "plain")
    quantize_(model, "mxfp4")
    save_pretrained(model, tmp_path / "quantized")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=MXQuantConfig("mxfp4"))
    for other in (AutoModelForCausalLM.from_pretrained(tmp_path / "quantized"), loaded):
        assert torch.equal(logits(other.eval()), logits(model))
    assert torch.equal(logits(mxquant.from_pretrained(tmp_path / "quantized").eval()), logits(model))
    with pytest.raises(NotImplementedError, match="its blocks along another axis"):
        save_pretrained(model, tmp_path / "other", "compressed-tensors")


def test_gptq_of_a_conv1d_is_that_of_the_linear() -> None:
    torch.manual_seed(0)
    layer = conv1d(torch.float32)
    linear = as_linear(layer)
    batches = [torch.randn(64, 96) @ torch.randn(96, 96) for _ in range(4)]
    rounded = copy.deepcopy(layer)
    quantize_(rounded, "mxfp4")
    for one in (layer, linear):
        quantize_(one, mxfp4(algorithm="gptq"), calibration=batches)
    assert torch.equal(layer.weight.t(), linear.weight)
    assert not torch.equal(layer.weight, rounded.weight)


def test_compiled_gpt2_has_the_bits_of_eager() -> None:
    layer = conv1d()
    quantize_(layer, "mxfp4")
    x = torch.randn(2, 5, 96, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))
    exported = torch.export.export(layer, (x,)).module()
    assert torch.equal(exported(x), layer(x))


class Scaled(Conv1D):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_a_subclass_with_a_forward_of_its_own_is_left_alone() -> None:
    model = nn.Sequential(Scaled(32, 32), nn.Linear(32, 32))
    quantize_(model, "mxfp4")
    assert summary(model).skipped[0].reason == "Scaled has a forward of its own"
