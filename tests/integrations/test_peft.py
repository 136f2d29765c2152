"""peft on quantized weights: what works, and what is refused when it is attached."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft
from small_transformers import IDS, MODELS

from mxquant import MXTensor, dequantize_, mxfp4, quantize_, summary
from mxquant.integrations.peft import merge_adapter

WEIGHT_ONLY = mxfp4(activation=None)
Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"


def quantized(config: object = WEIGHT_ONLY, kind: str = "llama", dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model = MODELS[kind]().to(dtype).eval()
    quantize_(model, config)
    return model


def adapted(model: nn.Module, **options: Any) -> Any:
    options = {"target_modules": ["q_proj"], "r": 4} | options
    return peft.get_peft_model(model, peft.LoraConfig(**options))


def train_one_step(model: nn.Module) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dora_has_the_values_of_the_dequantized_base(dtype: torch.dtype) -> None:
    model = quantized(dtype=dtype)
    reference = copy.deepcopy(model)
    dequantize_(reference)
    models = []
    for base in (model, reference):
        torch.manual_seed(1)
        models.append(adapted(base, use_dora=True, init_lora_weights=False))
    expected = models[1](IDS).logits
    difference = (models[0](IDS).logits - expected).float().norm()
    assert difference < (1e-5 if dtype == torch.float32 else 2e-2) * expected.float().norm()
    before = copy.deepcopy(models[0].state_dict())
    train_one_step(models[0])
    after = models[0].state_dict()
    assert {name for name in after if not torch.equal(after[name], before[name])} == {
        name for name in after if "lora" in name
    }


def test_target_parameters_on_quantized_experts_are_refused_when_attached() -> None:
    model = quantized("mxfp4", "mixtral")
    targets = {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj"]}
    with pytest.raises(
        NotImplementedError, match=r"gate_up_proj of MixtralExperts is quantized .*dequantize_\(module\)"
    ):
        adapted(model, **targets)
    model = quantized("mxfp4", "mixtral")
    for layer in model.model.layers:
        dequantize_(layer.mlp.experts)
    train_one_step(adapted(model, **targets))


def test_all_linear_adapts_the_linears_of_a_model_with_experts() -> None:
    """peft takes it for the experts of Mixtral as well, which are refused; linears that are named work."""
    with pytest.raises(NotImplementedError, match=r"name linear layers alone in target_modules \('all-linear' means"):
        adapted(quantized("mxfp4", "mixtral"), target_modules="all-linear")
    names = ["q_proj", "k_proj", "v_proj", "o_proj"]
    model = adapted(quantized("mxfp4", "mixtral"), target_modules=names)
    train_one_step(model)
    assert isinstance(model.get_submodule("base_model.model.model.layers.0.mlp.experts").down_proj, MXTensor)


def test_modules_to_save_are_refused_when_attached(tmp_path: Path) -> None:
    with pytest.raises(
        NotImplementedError, match=r"weight of Linear is quantized .*modules_to_save .*dequantize_\(mod"
    ):
        adapted(quantized(), modules_to_save=["o_proj"])
    model = quantized()
    for layer in model.model.layers:
        dequantize_(layer.self_attn.o_proj)
    adapter = adapted(model, modules_to_save=["o_proj"])
    copies = [name for name, p in adapter.named_parameters() if "modules_to_save" in name and p.requires_grad]
    assert len(copies) == 2
    before = adapter.get_parameter(copies[0]).clone()
    train_one_step(adapter)
    assert not torch.equal(before, adapter.get_parameter(copies[0]))
    adapter.save_pretrained(tmp_path)


@pytest.mark.parametrize("method", ["pissa", "olora"])
def test_initializations_that_change_the_base_are_refused_when_attached(method: str) -> None:
    with pytest.raises(NotImplementedError, match=r"call \.dequantize\(\) first .*mxquant\.dequantize_\(model\)"):
        adapted(quantized(), init_lora_weights=method)


@pytest.mark.parametrize(
    "options", [{"init_lora_weights": "pissa"}, {"init_lora_weights": "olora"}, {"use_dora": True}], ids=str
)
def test_quantizing_under_an_adapter_leaves_the_adapter_trainable(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = adapted(MODELS["llama"](), modules_to_save=["o_proj"], **options)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    quantize_(model, WEIGHT_ONLY)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == trainable
    assert isinstance(model.get_parameter(Q_PROJ), MXTensor)
    reasons = {row.reason for row in summary(model).skipped if "lora" in row.name or "modules_to_save" in row.name}
    assert reasons == {"adapter of peft"}
    train_one_step(model)


def test_a_bf16_model_is_prepared_for_kbit_training() -> None:
    model = quantized("mxfp4", dtype=torch.bfloat16)
    before = {name: p.qdata.clone() for name, p in model.named_parameters() if isinstance(p, MXTensor)}
    prepared = peft.prepare_model_for_kbit_training(model)
    assert {p.dtype for p in prepared.parameters()} == {torch.float32}
    for name, qdata in before.items():
        weight = prepared.get_parameter(name)
        assert isinstance(weight, MXTensor)
        assert torch.equal(weight.qdata, qdata)
        assert weight.dequantize().dtype == torch.float32
    train_one_step(adapted(prepared))


def merged_by_hand(model: Any) -> torch.Tensor:
    layer = model.get_submodule(Q_PROJ.removesuffix(".base_layer.weight"))
    return layer.base_layer.weight.dequantize() + layer.get_delta_weight("default").detach()


@pytest.mark.parametrize("config", [WEIGHT_ONLY, "nvfp4", mxfp4(rotation=32)], ids=str)
def test_merging_tells_how_much_of_the_update_survives(config: object) -> None:
    model = adapted(quantized(config), init_lora_weights=False)
    old = model.get_parameter(Q_PROJ)
    before, wanted = old.dequantize(), merged_by_hand(model)
    shares = merge_adapter(model)
    new = model.get_parameter(Q_PROJ)
    assert isinstance(new, MXTensor)
    assert new.metadata == old.metadata
    made, asked = new.dequantize() - before, wanted - before
    assert math.isclose(shares[Q_PROJ], ((made * asked).sum() / asked.square().sum()).item(), rel_tol=1e-3)
    assert 0.5 < shares[Q_PROJ] < 1.5
    assert len(shares) == 2
    base = model.unload()
    assert not any("lora" in name for name, _ in base.named_parameters())
    assert isinstance(base.model.layers[0].self_attn.q_proj.weight, MXTensor)


def test_a_small_update_does_not_survive_and_the_share_says_so() -> None:
    model = adapted(quantized(), init_lora_weights=False, lora_alpha=0.001)
    shares = merge_adapter(model)
    assert all(share < 0.2 for share in shares.values())


def test_merging_without_a_quantized_weight_is_refused() -> None:
    with pytest.raises(ValueError, match="no adapter of peft lies on a quantized weight"):
        merge_adapter(adapted(MODELS["llama"]()))


def test_pefts_own_merge_names_ours() -> None:
    model = adapted(quantized(), init_lora_weights=False)
    with pytest.raises(NotImplementedError, match=r"mxquant\.integrations\.peft\.merge_adapter\(model\)"):
        model.merge_and_unload()
