"""`from_pretrained`: recorded checkpoints as models, with the logits that the tools recorded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

pytest.importorskip("transformers")

from checkpoints.recorded import NAMES, SCHEMES, folder, tensors
from transformers import AutoModelForCausalLM, DeepseekV3Config

from mxquant import MXTensor, dequantize_, from_pretrained, load_state, summary

WEIGHT_ONLY, BOTH = "logits_weight_only_fp32", "logits_w_and_a_fp32"
# gpt-oss's was recorded with rotary frequencies in fp32; the other models had been cast to bf16 whole, and back.
FP32_BUFFERS = ("gptoss_mxfp4_tk_roundup",)


def recorded_model(name: str) -> Any:
    """The model in fp32 under the arithmetic of the recording."""
    model = from_pretrained(folder(name), dtype=torch.float32)
    if name not in FP32_BUFFERS:
        for buffer_name, buffer in model.named_buffers():
            if "inv_freq" in buffer_name:
                buffer.copy_(buffer.bfloat16().float())
    return model


def as_weight_only(model: nn.Module) -> None:
    for module in model.modules():
        for attribute, parameter in module._parameters.items():
            if isinstance(parameter, MXTensor):
                weight = parameter.detach().with_activation(None)
                module._parameters[attribute] = nn.Parameter(weight, requires_grad=False)


def distance(model: nn.Module, name: str, key: str) -> float:
    reference = tensors(name, "reference_logits")
    with torch.no_grad():
        logits: Tensor = model(reference["input_ids"]).logits
    return ((logits.float() - reference[key]).norm() / reference[key].norm()).item()


@pytest.mark.parametrize("name", NAMES)
def test_weights_have_the_checkpoints_values(name: str) -> None:
    """Also where experts were merged: gate above up."""
    model = from_pretrained(folder(name))
    fmt, activation, mode, static = SCHEMES[name]
    parameters = dict(model.named_parameters())
    for key, values in tensors(name, "reference_dequant").items():
        target, index = key, ()
        if ".experts." in key and key not in parameters:
            head, _, tail = key.partition(".experts.")
            expert, projection, _ = tail.split(".")
            target = f"{head}.experts.{'down_proj' if projection == 'down_proj' else 'gate_up_proj'}"
            half = (
                slice(None) if projection == "down_proj" else slice(96, None) if projection == "up_proj" else slice(96)
            )
            index = (int(expert), half)
        weight = parameters[target]
        assert isinstance(weight, MXTensor)
        assert torch.equal(weight.dequantize(torch.bfloat16)[index], values), key
        metadata = weight.metadata
        assert (metadata.scheme.weight, metadata.scheme.activation, metadata.scheme.activation_scale_mode) == (
            fmt,
            activation,
            mode,
        )
        assert (weight.activation_scale is not None) == static


@pytest.mark.parametrize("name", NAMES)
def test_weight_only_logits_equal_the_tools(name: str) -> None:
    """To fp32's accumulation (2e-5 of their norm would be ten times what was seen). The recording had the weights in
    bf16 first, which rounds NVFP4's products of two scales.
    """
    model = recorded_model(name)
    as_weight_only(model)
    if SCHEMES[name][0] == "nvfp4":
        assert 1e-3 < distance(model, name, WEIGHT_ONLY) < 1e-2
        dequantize_(model)
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().float()
    assert distance(model, name, WEIGHT_ONLY) < 2e-6


@pytest.mark.parametrize("name", ["quark_mxfp4_w4a4_llama", "quark_mxfp4_w4a4_mixtral"])
def test_w4a4_logits_equal_quarks(name: str) -> None:
    """Bit for bit, up to the order of fp32 sums; with the weights alone a quarter of the norm is missed."""
    model = recorded_model(name)
    assert distance(model, name, BOTH) < 2e-6
    as_weight_only(model)
    assert distance(model, name, BOTH) > 0.25


def test_static_scales_bring_logits_nearer_to_the_tools() -> None:
    """llm-compressor computed these in bf16, whose rounding moves activations to other codes."""
    name, key = "ct_nvfp4_llama", "logits_llmcompressor_qdq_bf16"
    model = from_pretrained(folder(name))
    near = distance(model, name, key)
    as_weight_only(model)
    assert near < 0.8 * distance(model, name, key)


def test_model_takes_as_many_bytes_as_its_files() -> None:
    """Weights that are not merged are views of the files."""
    model = from_pretrained(folder("ct_mxfp4a16_llama"))
    for name, tensor in load_state(folder("ct_mxfp4a16_llama")).items():
        parameter = model.get_parameter(name)
        assert torch.equal(
            parameter.qdata if isinstance(tensor, MXTensor) else parameter, getattr(tensor, "qdata", tensor)
        )
        assert parameter.nbytes == tensor.nbytes


def test_model_is_marked_as_quantized_by_mxquant() -> None:
    """The model is mxquant's: transformers' save_pretrained writes it, and generation follows the checkpoint."""
    model = from_pretrained(folder("quark_mxfp4_w4a4_llama"))
    assert model.config.quantization_config.quant_method == "mxquant"
    assert model.generation_config.eos_token_id == 2
    ids = torch.arange(6).reshape(2, 3)
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape == (2, 6)


def test_summary_tells_what_the_checkpoint_left_unquantized() -> None:
    found = summary(from_pretrained(folder("quark_mxfp4_w4a4_llama")))
    assert len(found.quantized) == 14
    assert {row.name: row.reason for row in found.skipped} == dict.fromkeys(
        ("model.embed_tokens.weight", "lm_head.weight"), "not quantized in the checkpoint"
    )


def test_transformers_saves_and_loads_the_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = from_pretrained(folder("quark_mxfp4_w4a4_mixtral"))
    model.save_pretrained(tmp_path)
    ids = torch.arange(6).reshape(2, 3)
    for again in (AutoModelForCausalLM.from_pretrained(tmp_path), from_pretrained(tmp_path)):
        assert torch.equal(again(ids).logits, model(ids).logits)


def test_named_backend_is_used_or_refused() -> None:
    model = from_pretrained(folder("ct_mxfp4a16_llama"), backend="emulation")
    assert model.model.layers[0].mlp.up_proj.weight.backend == "emulation"
    with pytest.raises(ValueError, match="typo"):
        from_pretrained(folder("ct_mxfp4a16_llama"), backend="typo")


def test_unquantized_checkpoint_is_loaded(tmp_path: Path) -> None:
    copy(folder("ct_mxfp4a16_llama"), tmp_path)
    state = load_state(folder("ct_mxfp4a16_llama"))
    plain = {n: t.dequantize() if isinstance(t, MXTensor) else t for n, t in state.items()}
    save_file(plain, tmp_path / "model.safetensors")
    change_config(tmp_path, lambda config: config.pop("quantization_config"))
    model = from_pretrained(tmp_path)
    assert not any(isinstance(parameter, MXTensor) for parameter in model.parameters())


def test_persistent_buffer_is_loaded(tmp_path: Path) -> None:
    """DeepSeek-V3's router has one, `e_score_correction_bias`."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 64, "num_hidden_layers": 1, "v_head_dim": 16}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1}
    attention = {"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": None, "kv_lora_rank": 32}
    config = DeepseekV3Config(**sizes, **experts, **attention, first_k_dense_replace=0, topk_group=1)
    model = AutoModelForCausalLM.from_config(config)
    bias = model.get_buffer("model.layers.0.mlp.gate.e_score_correction_bias")
    bias += torch.arange(4)
    model.save_pretrained(tmp_path)
    loaded: Any = from_pretrained(tmp_path)
    assert torch.equal(loaded.get_buffer("model.layers.0.mlp.gate.e_score_correction_bias"), bias)


# What is wrong is said before anything is allocated


def copy(source: Path, to: Path) -> None:
    for file in ("config.json", "model.safetensors"):
        shutil.copyfile(source / file, to / file)


def change_config(at: Path, change) -> None:  # type: ignore[no-untyped-def]
    config = json.loads((at / "config.json").read_text())
    change(config)
    (at / "config.json").write_text(json.dumps(config))


def change_tensors(at: Path, change) -> None:  # type: ignore[no-untyped-def]
    state = load_file(at / "model.safetensors")
    change(state)
    save_file(state, at / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    "change, named",
    [
        (lambda state: state.pop("model.norm.weight"), "lacks 1 tensors .*model.norm.weight"),
        (lambda state: state.update({"model.extra.weight": torch.ones(2, 2)}), "'model.extra.weight'"),
        (lambda state: state.update({"model.norm.weight": torch.ones(65)}), r"has shape \(65,\)"),
    ],
)
def test_error_names_the_wrong_tensor(change, named: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    copy(folder("ct_mxfp4a16_llama"), tmp_path)
    change_tensors(tmp_path, change)
    with pytest.raises(ValueError, match=named):
        from_pretrained(tmp_path)


def test_error_names_the_missing_expert(tmp_path: Path) -> None:
    copy(folder("quark_mxfp4_w4a4_mixtral"), tmp_path)

    def change(state: dict[str, Tensor]) -> None:
        for part in ("weight", "weight_scale"):
            del state[f"model.layers.1.mlp.experts.2.up_proj.{part}"]

    change_tensors(tmp_path, change)
    with pytest.raises(ValueError, match=r"experts\.gate_up_proj"):
        from_pretrained(tmp_path)


def test_missing_config_is_refused(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        from_pretrained(tmp_path)


def test_torch_dtype_is_accepted_for_dtype() -> None:
    """transformers' former name of it would be dropped without a word."""
    name = "quark_mxfp4_w4a4_llama"
    assert from_pretrained(folder(name), torch_dtype=torch.float32).dtype == torch.float32
    assert from_pretrained(folder(name), torch_dtype=None).dtype == from_pretrained(folder(name)).dtype
    with pytest.raises(TypeError, match="give dtype alone"):
        from_pretrained(folder(name), dtype=torch.bfloat16, torch_dtype=torch.float32)


@pytest.mark.parametrize("option", ["subfolder", "revision", "quantization_config"])
def test_meaningless_options_are_refused(option: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=f"has no use for {option}: .* give the folder"):
        from_pretrained(tmp_path, **{option: "x"})
