"""transformers' own `from_pretrained` and `save_pretrained` with the quantizer "mxquant"."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from small_transformers import IDS, MODELS
from transformers import AutoModel, AutoModelForCausalLM

from mxquant import (
    MXFP4Config,
    MXTensor,
    dequantize_,
    from_pretrained,
    load_state,
    quantize_,
    save_pretrained,
    summary,
)
from mxquant.integrations.transformers import MXQuantConfig


@pytest.fixture(params=sorted(MODELS))
def plain(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The folder of an unquantized bf16 model."""
    MODELS[request.param]().to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    MODELS["llama"]().to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


def assert_same_state(actual: torch.nn.Module, expected: torch.nn.Module) -> None:
    ours, theirs = actual.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert type(ours[name]) is type(tensor), name
        if isinstance(tensor, MXTensor):
            assert ours[name].metadata == tensor.metadata
            pairs = zip(ours[name].operand, tensor.operand, strict=True)
            assert all((a is None and b is None) or torch.equal(a, b) for a, b in pairs), name
        else:
            assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize(
    "config",
    [{"lm_head": "mxfp8"}, {"model.embed_tokens": "mxfp4"}, {"linear": "mxfp4", "lm_head": "mxfp8"}],
    ids=lambda config: " ".join(config),
)
def test_key_for_one_name_of_a_tied_weight_applies_to_both(config: dict[str, str], tmp_path: Path) -> None:
    """Weights are tied only once they are loaded; the plan is made before."""
    MODELS["tied"]().to(torch.bfloat16).save_pretrained(tmp_path)
    on_load = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=MXQuantConfig(config))
    after = AutoModelForCausalLM.from_pretrained(tmp_path)
    quantize_(after, config)
    assert isinstance(on_load.lm_head.weight, MXTensor)
    assert on_load.lm_head.weight is on_load.model.embed_tokens.weight
    assert_same_state(on_load, after)


@pytest.mark.parametrize("config", ["mxfp4", "nvfp4"])
def test_quantizing_on_load_equals_quantizing_after_loading(plain: Path, config: str) -> None:
    on_load = AutoModelForCausalLM.from_pretrained(plain, quantization_config=MXQuantConfig(config))
    after = AutoModelForCausalLM.from_pretrained(plain)
    quantize_(after, config)
    assert any(isinstance(parameter, MXTensor) for parameter in on_load.parameters())
    assert_same_state(on_load, after)
    assert torch.equal(on_load(IDS).logits, after(IDS).logits)
    reasons = {row.name: row.reason for row in summary(after).skipped}
    assert {row.name: row.reason for row in summary(on_load).skipped} == reasons


@pytest.mark.parametrize("config", ["mxfp4", "nvfp4"])
def test_saved_model_loads_equal(plain: Path, config: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=MXQuantConfig(config))
    model.save_pretrained(tmp_path / "saved", max_shard_size="40KB")
    assert (tmp_path / "saved" / "model.safetensors.index.json").exists()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert_same_state(again, model)
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    assert again.config.quantization_config.to_dict() == model.config.quantization_config.to_dict()
    again.save_pretrained(tmp_path / "twice")
    assert_same_state(AutoModelForCausalLM.from_pretrained(tmp_path / "twice"), model)


def test_mapping_with_modules_to_not_convert(llama: Path, tmp_path: Path) -> None:
    config = MXQuantConfig(
        {"linear": MXFP4Config(activation=None), "re:.*down_proj": "mxfp8_e5m2", "lm_head": "mxfp6"},
        modules_to_not_convert=["model.layers.0"],
    )
    model = AutoModelForCausalLM.from_pretrained(llama, quantization_config=config)
    formats = {n: p.format for n, p in model.named_parameters() if isinstance(p, MXTensor)}
    assert formats["model.layers.1.mlp.down_proj.weight"] == "mxfp8_e5m2"
    assert formats["lm_head.weight"] == "mxfp6_e2m3"
    assert formats["model.layers.1.self_attn.q_proj.weight"] == "mxfp4"
    assert not any("layers.0" in name for name in formats)
    model.save_pretrained(tmp_path / "saved")
    assert_same_state(AutoModelForCausalLM.from_pretrained(tmp_path / "saved"), model)
    stored = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    assert MXQuantConfig(**stored).mapping() == config.mapping()


def test_loading_in_another_dtype_keeps_the_codes(llama: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama, quantization_config=MXQuantConfig("mxfp4"))
    model.save_pretrained(tmp_path / "saved")
    wide = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert wide.dtype == torch.float32
    weight, narrow = wide.model.layers[0].mlp.up_proj.weight, model.model.layers[0].mlp.up_proj.weight
    assert weight.dtype == torch.float32
    assert torch.equal(weight.qdata, narrow.qdata)
    assert wide(IDS).logits.dtype == torch.float32


@pytest.mark.parametrize(
    "skipped, left",
    [
        (["mlp"], {"q_proj", "k_proj", "v_proj", "o_proj"}),
        (["self_attn", "down_proj"], {"gate_proj", "up_proj"}),
        (["layers.0", r".*\.(mlp|o_proj)"], {"q_proj", "k_proj", "v_proj"}),
    ],
)
def test_modules_to_not_convert_skips_all_inside(llama: Path, skipped: list[str], left: set[str]) -> None:
    config = MXQuantConfig("mxfp4", modules_to_not_convert=skipped)
    model = AutoModelForCausalLM.from_pretrained(llama, quantization_config=config)
    names = [name for name, parameter in model.named_parameters() if isinstance(parameter, MXTensor)]
    assert {name.split(".")[-2] for name in names} == left
    assert any("layers.0" in name for name in names) == ("layers.0" not in skipped)


@pytest.mark.parametrize(
    "skipped, named",
    [
        (["up_prj"], "'up_prj', which matches no module of LlamaForCausalLM.*did you mean 'up_proj'"),
        (["mlp", "nonsense"], "'nonsense', which matches no module"),
        (["layers.0", "layers.1"], "selects no weight"),
    ],
)
def test_modules_to_not_convert_without_effect_is_refused(llama: Path, skipped: list[str], named: str) -> None:
    config = MXQuantConfig("mxfp4", modules_to_not_convert=skipped)
    with pytest.raises(ValueError, match=named):
        AutoModelForCausalLM.from_pretrained(llama, quantization_config=config)


def test_body_and_model_with_a_head_load_each_others_files(llama: Path, tmp_path: Path) -> None:
    """transformers adds and strips the prefix of the body's names."""
    config = MXQuantConfig({"linear": "mxfp4", "lm_head": "mxfp8"})
    whole = AutoModelForCausalLM.from_pretrained(llama, quantization_config=config)
    whole.save_pretrained(tmp_path / "whole")
    body = AutoModel.from_pretrained(tmp_path / "whole")
    assert_same_state(body, whole.model)
    body.save_pretrained(tmp_path / "body")
    assert_same_state(AutoModelForCausalLM.from_pretrained(tmp_path / "body").model, whole.model)


@pytest.mark.parametrize("load", [AutoModelForCausalLM.from_pretrained, from_pretrained], ids=["transformers", "ours"])
def test_dequantized_model_can_be_cast_and_saved(load: Callable[..., Any], llama: Path, tmp_path: Path) -> None:
    """It can be cast, is not taken for quantized by the trainer, and saves what it is."""
    AutoModelForCausalLM.from_pretrained(llama, quantization_config=MXQuantConfig("mxfp4")).save_pretrained(tmp_path)
    model = load(tmp_path)
    assert model.is_quantized
    with pytest.raises(ValueError, match="not supported for quantized"):
        model.float()
    expected = model.model.layers[0].mlp.up_proj.weight.dequantize()
    dequantize_(model)
    assert not model.is_quantized
    assert getattr(model, "hf_quantizer", None) is None
    model.save_pretrained(tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(again.model.layers[0].mlp.up_proj.weight, expected)
    assert model.float().dtype == torch.float32


def test_dequantized_experts_are_saved_as_the_family_has_them(tmp_path: Path) -> None:
    MODELS["mixtral"]().to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=MXQuantConfig("mxfp4"))
    dequantize_(model)
    model.save_pretrained(tmp_path / "saved")
    assert load_state(tmp_path / "saved").keys() == load_state(tmp_path / "plain").keys()
    assert_same_state(AutoModelForCausalLM.from_pretrained(tmp_path / "saved"), model)


def test_model_quantized_anew_is_saved_with_its_new_config(llama: Path, tmp_path: Path) -> None:
    """And not under the config that it was loaded with."""
    model = AutoModelForCausalLM.from_pretrained(llama, quantization_config=MXQuantConfig("mxfp4"))
    dequantize_(model)
    quantize_(model, "mxfp8")
    save_pretrained(model, tmp_path / "saved")
    assert "mxfp4" not in (tmp_path / "saved" / "config.json").read_text()
    assert_same_state(AutoModelForCausalLM.from_pretrained(tmp_path / "saved"), model)


def test_dequantizing_the_model(llama: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama, quantization_config=MXQuantConfig({"linear": "mxfp4"}))
    expected = {n: p.dequantize() for n, p in model.named_parameters() if isinstance(p, MXTensor)}
    model.dequantize()
    for name, values in expected.items():
        assert torch.equal(model.get_parameter(name), values)


@pytest.mark.parametrize(
    "arguments, error, named",
    [
        ({"config": "mxfp5"}, ValueError, "mxfp5"),
        ({"config": "mxfp4", "group_size": 32}, TypeError, "group_size"),
        ({"config": "mxfp4", "version": 2}, ValueError, "version 2"),
        ({"config": "mxfp4", "modules_to_not_convert": "up_proj"}, TypeError, "is a list of names.*'up_proj'"),
        ({"config": "mxfp4", "modules_to_not_convert": [7]}, TypeError, "is a list of names"),
        ({"config": "mxfp4", "modules_to_not_convert": ["*.mlp.*"]}, ValueError, r"'\*.mlp.\*': None"),
    ],
)
def test_a_wrong_config_is_refused_at_once(arguments: dict, error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        MXQuantConfig(**arguments)


def test_a_config_without_a_format_quantizes_nothing(llama: Path) -> None:
    with pytest.raises(ValueError, match="name a format"):
        AutoModelForCausalLM.from_pretrained(llama, quantization_config=MXQuantConfig())


def test_gptq_on_load_is_refused(llama: Path) -> None:
    """It is refused, and not rounded to nearest."""
    with pytest.raises(ValueError, match="needs data to calibrate on"):
        AutoModelForCausalLM.from_pretrained(
            llama, quantization_config=MXQuantConfig({"linear": MXFP4Config(algorithm="gptq")})
        )


def test_a_key_that_matches_nothing_is_refused(llama: Path) -> None:
    with pytest.raises(ValueError, match="gate_up"):
        AutoModelForCausalLM.from_pretrained(llama, quantization_config=MXQuantConfig({"re:.*gate_up": "mxfp4"}))
