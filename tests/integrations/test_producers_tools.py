"""Exports for AMD Quark and NVIDIA ModelOpt, read by their own tools on a CPU. Neither is a dependency: the tests skip
where it is not installed (docs/checkpoints.md has the versions that were seen).

ModelOpt has no loader for what it exports for inference engines: its classes of quantized tensors decode the weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

pytest.importorskip("transformers")

from checkpoints.recorded import NAMES, folder
from small_transformers import IDS, MODELS, SMALL
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from mxquant import MXTensor, from_pretrained, quantize_, save_pretrained

W4A16 = {"weight": "mxfp4", "activation": None}


def qwen3_moe() -> nn.Module:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=96))


MAKE = MODELS | {"qwen3_moe": qwen3_moe}


def quantized(name: str, config: Any) -> Any:
    """In bf16, since tools cast what they load."""
    torch.manual_seed(0)
    model = MAKE[name]().to(torch.bfloat16).eval()
    quantize_(model, config)
    return model


def static(model: nn.Module, activation: str, scale: float) -> nn.Module:
    """The same weights with activations of one calibrated scale."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, MXTensor):
                mode = "even" if activation == "nvfp4" else None
                weight = parameter.detach().with_activation(activation, mode, torch.tensor(scale))
                module._parameters[name] = nn.Parameter(weight, requires_grad=False)
    return model


# AMD Quark


def quarks(path: Path) -> nn.Module:
    """The model as Quark's importer loads it, computed in fp32."""
    from quark.torch import import_model_from_safetensors

    config = AutoConfig.from_pretrained(path)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return import_model_from_safetensors(model, str(path), device="cpu").eval().float()


EXPORTS = {
    "W4A4": lambda: quantized("llama", "mxfp4"),
    "W4A16": lambda: quantized("llama", W4A16),
    "W6A16": lambda: quantized("llama", {"weight": "mxfp6_e3m2", "activation": None}),
    "W6A6": lambda: quantized("llama", {"weight": "mxfp6_e2m3", "activation_scale_mode": "even"}),
    "tied": lambda: quantized("tied", "mxfp4"),
    "Mixtral W4A4": lambda: quantized("mixtral", "mxfp4"),
    "Qwen3-MoE W4A16": lambda: quantized("qwen3_moe", W4A16),
    "NVFP4 W4A16": lambda: quantized("llama", {"weight": "nvfp4", "activation": None}),
    "NVFP4 W4A4, static": lambda: static(quantized("llama", "nvfp4"), "nvfp4", 2**-9),
    "FP8, static": lambda: static(quantized("llama", W4A16), "fp8_e4m3", 2**-7),
    "two schemes": lambda: quantized("llama", {"linear": "mxfp4", "re:.*down_proj": "mxfp6"}),
}


@torch.no_grad()
@pytest.mark.parametrize("export", EXPORTS)
def test_quark_loads_our_export(export: str, tmp_path: Path) -> None:
    """To fp32's order of sums."""
    pytest.importorskip("quark.torch")
    model = EXPORTS[export]()
    save_pretrained(model, tmp_path / "saved", "quark")
    ours = from_pretrained(tmp_path / "saved", dtype=torch.float32)(IDS).logits
    theirs = quarks(tmp_path / "saved")(IDS).logits
    assert (theirs - ours).norm() < 1e-6 * ours.norm()
    model.model.layers[1].self_attn.o_proj.weight.qdata ^= 1  # the control
    save_pretrained(model, tmp_path / "other", "quark")
    assert (quarks(tmp_path / "other")(IDS).logits - ours).norm() > 1e-3 * ours.norm()


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("quark")])
def test_quark_loads_its_own_checkpoint_from_us(name: str, tmp_path: Path) -> None:
    pytest.importorskip("quark.torch")
    save_pretrained(from_pretrained(folder(name)), tmp_path / "saved", "quark")
    ours = from_pretrained(folder(name), dtype=torch.float32)(IDS).logits
    assert (quarks(tmp_path / "saved")(IDS).logits - ours).norm() < 1e-6 * ours.norm()


# NVIDIA ModelOpt


def modelopts(name: str, tensors: dict[str, Tensor], shape: torch.Size) -> Tensor:
    """A weight as ModelOpt decodes it, in fp32."""
    from modelopt.torch.quantization.qtensor import MXFP4QTensor, MXFP8QTensor, NVFP4QTensor

    qdata, scale = tensors[name], tensors[f"{name}_scale"]
    if f"{name}_scale_2" in tensors:
        double = tensors[f"{name}_scale_2"]
        tensor = NVFP4QTensor(shape, torch.float32, qdata)
        return tensor.dequantize(torch.float32, scale=scale, double_scale=double, block_sizes={-1: 16})
    if qdata.dtype == torch.uint8:
        tensor = MXFP4QTensor(shape, torch.float32, qdata)
        return tensor.dequantize(torch.float32, scale=scale.reshape(-1, 1), block_sizes={-1: 32})
    return MXFP8QTensor(shape, torch.float32, qdata).dequantize(torch.float32, scale=scale)


@pytest.mark.parametrize(
    "config", [{"weight": "nvfp4", "activation": None}, "mxfp8", {"weight": "mxfp4", "activation": "fp8_e4m3"}], ids=str
)
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_modelopt_decodes_our_export(name: str, config: Any, tmp_path: Path) -> None:
    """Every weight, bit by bit."""
    pytest.importorskip("modelopt.torch.quantization.qtensor")
    save_pretrained(quantized(name, config), tmp_path / "saved", "modelopt")
    tensors = load_file(tmp_path / "saved" / "model.safetensors")
    from mxquant import load_state

    weights = {n: t for n, t in load_state(tmp_path / "saved").items() if isinstance(t, MXTensor)}
    assert len(weights) >= 14
    for key, weight in weights.items():
        assert torch.equal(modelopts(key, tensors, weight.shape), weight.dequantize(torch.float32)), key
        flipped = tensors | {key: tensors[key].view(torch.uint8).clone()}
        flipped[key][0, 0] ^= 1
        flipped[key] = flipped[key].view(tensors[key].dtype)
        assert not torch.equal(modelopts(key, flipped, weight.shape), weight.dequantize(torch.float32)), key
