"""`save_pretrained`: the same bytes for the same producer, lossless conversion to others, refusals, all or nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

pytest.importorskip("transformers")

from checkpoints.recorded import NAMES, folder, producer_of, tensors
from small_transformers import SMALL
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from mxquant import MXTensor, from_pretrained, load_state, mxfp4, quantize_, save_pretrained

IDS = torch.arange(24).reshape(2, 12)
ALL = ("mxquant", "compressed-tensors", "quark", "modelopt", "gpt-oss")
# Beside mxquant's own and themselves, what holds the recorded checkpoints without loss.
CONVERTIBLE = {
    "ct_mxfp4a16_llama": {"quark"},
    "ct_mxfp6_llama": {"quark"},
    "ct_mxfp8_qwen2": {"quark"},
    "ct_nvfp4_llama": {"modelopt", "quark"},
    "gptoss_mxfp4_tk_roundup": set(),
    "modelopt_nvfp4_llama": {"quark"},  # its multipliers are not all reciprocals
    "modelopt_w4a8mxfp4_qwen2": set(),
    "quark_mxfp4_w4a4_llama": {"compressed-tensors"},
    "quark_mxfp4_w4a4_mixtral": {"compressed-tensors"},
    "quark_mxfp6_e2m3_w6_qwen2": {"compressed-tensors"},
}


def small_llama(**options: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SMALL, **options)).to(torch.bfloat16).eval()


def assert_same_bytes(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert actual[name].shape == tensor.shape, name
        assert torch.equal(actual[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def quantization_config(at: Path) -> dict[str, Any]:
    return json.loads((at / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize("dtype", ["auto", torch.float32], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_loading_and_saving_keeps_the_bytes(name: str, dtype: Any, tmp_path: Path) -> None:
    save_pretrained(from_pretrained(folder(name), dtype=dtype), tmp_path / "saved", producer_of(name))
    assert_same_bytes(load_file(tmp_path / "saved" / "model.safetensors"), tensors(name))
    assert quantization_config(tmp_path / "saved") == quantization_config(folder(name))
    own = folder(name) / "hf_quant_config.json"
    if own.exists():
        assert json.loads((tmp_path / "saved" / own.name).read_text()) == json.loads(own.read_text())


@pytest.mark.parametrize("name", NAMES)
def test_conversion_is_lossless_or_refused(name: str, tmp_path: Path) -> None:
    model = from_pretrained(folder(name))
    logits = model(IDS).logits
    for producer in ALL:
        target = tmp_path / producer
        if producer in CONVERTIBLE[name] | {"mxquant", producer_of(name)}:
            save_pretrained(model, target, producer)
            again = from_pretrained(target)
            assert torch.equal(again(IDS).logits, logits), producer
            # And back: the first producer's codes and scales.
            save_pretrained(again, tmp_path / f"{producer}-back", producer_of(name))
            assert torch.equal(from_pretrained(tmp_path / f"{producer}-back")(IDS).logits, logits), producer
        else:
            with pytest.raises(NotImplementedError, match="would be lost"):
                save_pretrained(model, target, producer)
            assert not target.exists()


def test_mx_bytes_survive_conversion_to_another_producer_and_back(tmp_path: Path) -> None:
    name = "quark_mxfp4_w4a4_llama"
    save_pretrained(from_pretrained(folder(name)), tmp_path / "ct", "compressed-tensors")
    save_pretrained(from_pretrained(tmp_path / "ct"), tmp_path / "quark", "quark")
    assert_same_bytes(load_file(tmp_path / "quark" / "model.safetensors"), tensors(name))


def test_changed_model_gets_a_new_config(tmp_path: Path) -> None:
    """The checkpoint's config is used again only where every weight is as it was."""
    model = from_pretrained(folder("quark_mxfp4_w4a4_llama"))
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone(), requires_grad=False)
    quantize_(model, {"lm_head": mxfp4(activation=None)})
    save_pretrained(model, tmp_path / "saved", "quark")
    assert quantization_config(tmp_path / "saved")["exclude"] == ["model.embed_tokens"]
    again = from_pretrained(tmp_path / "saved")
    assert again.lm_head.weight.activation is None
    assert again.model.layers[0].mlp.up_proj.weight.activation == "mxfp4"
    assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_merged_experts_are_split_on_saving_and_merged_on_loading(tmp_path: Path) -> None:
    model = MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=4)).to(torch.bfloat16).eval()
    quantize_(model, "mxfp4")
    for producer in ("mxquant", "compressed-tensors", "quark"):
        save_pretrained(model, tmp_path / producer, producer)
        again = from_pretrained(tmp_path / producer)
        for key, parameter in model.named_parameters():
            if isinstance(parameter, MXTensor):
                assert torch.equal(again.get_parameter(key).dequantize(), parameter.dequantize()), (producer, key)
    names = load_state(tmp_path / "compressed-tensors")
    assert "model.layers.0.block_sparse_moe.experts.3.w1.weight" in names
    assert not isinstance(names["model.layers.0.block_sparse_moe.gate.weight"], MXTensor)
    # Those of the recorded checkpoint of Quark.
    names = load_state(tmp_path / "quark")
    assert names.keys() == load_state(folder("quark_mxfp4_w4a4_mixtral")).keys()


def test_nvfp4_experts_keep_their_own_per_tensor_scales(tmp_path: Path) -> None:
    model = MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=4)).to(torch.bfloat16).eval()
    quantize_(model, {"weight": "nvfp4", "activation": None})
    save_pretrained(model, tmp_path / "saved", "modelopt")
    again = from_pretrained(tmp_path / "saved")
    weight = model.model.layers[0].mlp.experts.down_proj
    assert weight.per_tensor_scale.shape == (4, 1, 1)
    assert torch.equal(again.model.layers[0].mlp.experts.down_proj.dequantize(), weight.dequantize())


def test_tied_weights_are_written_once_and_stay_tied(tmp_path: Path) -> None:
    model = small_llama(tie_word_embeddings=True)
    quantize_(model, "mxfp4")
    for producer in ("mxquant", "compressed-tensors", "quark", "modelopt"):
        if producer == "modelopt":
            quantize_(model := small_llama(tie_word_embeddings=True), {"weight": "nvfp4", "activation": None})
        save_pretrained(model, tmp_path / producer, producer)
        assert "lm_head.weight" not in load_state(tmp_path / producer)
        # Tools that go by classes of modules would look for its codes.
        skipped = {"compressed-tensors": "ignore", "quark": "exclude", "modelopt": "ignore"}.get(producer)
        if skipped is not None:
            assert quantization_config(tmp_path / producer)[skipped] == ["lm_head", "model.embed_tokens"]
        again = from_pretrained(tmp_path / producer)
        assert again.lm_head.weight is again.model.embed_tokens.weight


def test_transformers_loads_native_files(tmp_path: Path) -> None:
    model = small_llama()
    quantize_(model, {"linear": "mxfp4", "re:.*down_proj": "nvfp4"})
    save_pretrained(model, tmp_path / "saved", max_shard_bytes=20_000)
    assert len(list((tmp_path / "saved").glob("model-*.safetensors"))) > 2
    theirs, ours = AutoModelForCausalLM.from_pretrained(tmp_path / "saved"), from_pretrained(tmp_path / "saved")
    assert torch.equal(theirs(IDS).logits, ours(IDS).logits)


def test_gpt_oss_is_loaded_by_transformers_own_loader(tmp_path: Path) -> None:
    from transformers import Mxfp4Config

    name = "gptoss_mxfp4_tk_roundup"
    save_pretrained(from_pretrained(folder(name)), tmp_path / "saved", "gpt-oss")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", quantization_config=Mxfp4Config(dequantize=True))
    for key, values in tensors(name, "reference_dequant").items():
        assert torch.equal(theirs.get_parameter(key), values)


@pytest.mark.parametrize("name", ["ct_mxfp4a16_llama", "quark_mxfp4_w4a4_llama", "quark_mxfp6_e2m3_w6_qwen2"])
def test_compressed_tensors_loads_our_export(name: str, tmp_path: Path) -> None:
    """With its own arithmetic, activations included: the same logits."""
    pytest.importorskip("compressed_tensors")
    model = from_pretrained(folder(name))
    save_pretrained(model, tmp_path / "saved", "compressed-tensors")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(theirs(IDS).logits, model(IDS).logits)


def test_compressed_tensors_loads_tied_weights(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    model = small_llama(tie_word_embeddings=True)
    quantize_(model, "mxfp4")
    save_pretrained(model, tmp_path / "saved", "compressed-tensors")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert theirs.lm_head.weight is theirs.model.embed_tokens.weight
    assert torch.equal(theirs(IDS).logits, model(IDS).logits)


# Refusals


@pytest.mark.parametrize(
    "config, producer, lost",
    [
        ({"weight": "mxfp6_e3m2", "activation": None}, "compressed-tensors", "its codes"),
        ({"weight": "mxfp4", "activation": "mxfp8"}, "compressed-tensors", "another format than the weight's"),
        ("mxfp8", "compressed-tensors", "activation_scale_mode 'rceil'"),
        ("nvfp4", "compressed-tensors", "computed at run time"),
        ("nvfp4", "modelopt", r"dynamic scales.*calibrated scales .*activation=None \(W4A16_NVFP4\)"),
        ({"weight": "mxfp4", "activation": None}, "modelopt", r"activation='fp8_e4m3' \(W4A8_MXFP4_FP8\)"),
        ("mxfp6", "modelopt", "quantize it to one of nvfp4, mxfp8_e4m3, mxfp4"),
        ("nvfp4", "quark", "computed at run time"),
        ({"weight": "mxfp4", "activation": "fp8_e4m3"}, "quark", "computed at run time"),
        ({"weight": "mxfp4", "activation": "mxfp8_e5m2"}, "quark", "activations in mxfp8_e5m2"),
        ({"weight": "mxfp4", "activation": "mxfp4", "activation_scale_mode": "rceil"}, "quark", "'rceil'"),
        ("mxfp4", "gpt-oss", "the quantization of activations"),
        ({"weight": "mxfp4", "rotation": 32}, "compressed-tensors", "its rotation in blocks of 32"),
        ({"weight": "mxfp4", "rotation": 32}, "quark", "its rotation in blocks of 32"),
        ({"weight": "nvfp4", "activation": None, "rotation": 16}, "modelopt", "its rotation in blocks of 16"),
    ],
)
def test_error_says_what_would_be_lost(config: Any, producer: str, lost: str, tmp_path: Path) -> None:
    model = small_llama()
    quantize_(model, config)
    with pytest.raises(NotImplementedError, match=lost):
        save_pretrained(model, tmp_path / "saved", producer)
    assert not any(tmp_path.iterdir())


def test_other_writers_raise_and_name_save_pretrained(tmp_path: Path) -> None:
    """transformers' own writer, of a model that `quantize_` quantized, and safetensors'."""
    model = small_llama()
    quantize_(model, "mxfp4")
    with pytest.raises(TypeError, match=r"mxquant\.save_pretrained\(model, path\)"):
        model.save_pretrained(tmp_path / "saved")
    with pytest.raises(TypeError, match="flatten_state_dict"):
        save_file(model.state_dict(), tmp_path / "model.safetensors")


def test_partial_block_is_refused_outside_native_files(tmp_path: Path) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SMALL | {"intermediate_size": 72})).to(torch.bfloat16)
    quantize_(model, "mxfp4")
    with pytest.raises(NotImplementedError, match="partial block of 32"):
        save_pretrained(model, tmp_path / "saved", "quark")
    save_pretrained(model, tmp_path / "saved")
    assert torch.equal(
        from_pretrained(tmp_path / "saved").model.layers[0].mlp.down_proj.weight.dequantize(),
        model.model.layers[0].mlp.down_proj.weight.dequantize(),
    )


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'gguf'"):
        save_pretrained(small_llama(), tmp_path / "saved", "gguf")
    with pytest.raises(ValueError, match="none of the tensors is quantized"):
        save_pretrained(small_llama(), tmp_path / "saved")
    with pytest.raises(TypeError, match="transformers model; got Linear"):
        save_pretrained(torch.nn.Linear(2, 2), tmp_path / "saved")  # type: ignore[arg-type]
    assert not any(tmp_path.iterdir())


def test_model_is_saved_over_its_own_files(tmp_path: Path) -> None:
    """A model whose weights are views of the files that are replaced; a tokenizer beside them stays."""
    model = small_llama()
    quantize_(model, "mxfp4")
    save_pretrained(model, tmp_path / "saved")
    (tmp_path / "saved" / "tokenizer.json").write_text("{}")
    loaded = from_pretrained(tmp_path / "saved")
    expected = loaded(IDS).logits
    save_pretrained(loaded, tmp_path / "saved", "quark")
    assert torch.equal(loaded(IDS).logits, expected)
    assert torch.equal(from_pretrained(tmp_path / "saved")(IDS).logits, expected)
    assert (tmp_path / "saved" / "tokenizer.json").exists()
