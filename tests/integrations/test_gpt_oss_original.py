"""gpt-oss in OpenAI's own layout, as a model: the weights and logits of transformers' layout of the same tensors.

The layout is written here by itself, from gpt-oss `torch/model.py`: parameters, fused qkv, words of the config.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

pytest.importorskip("transformers")

from checkpoints.recorded import folder, tensors
from transformers import AutoConfig, GptOssConfig

from mxquant import MXTensor, from_pretrained, load_state, save_pretrained
from mxquant.checkpoints import read_content

NAME = "gptoss_mxfp4_tk_roundup"
IDS = torch.arange(48).reshape(2, 24)
CONFIG: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_experts": 4,
    "experts_per_token": 2,
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "swiglu_limit": 7.0,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": 32,
    "initial_context_length": 256,
    "rope_theta": 150000.0,
    "rope_scaling_factor": 1.0,
    "rope_ntk_alpha": 1.0,
    "rope_ntk_beta": 32.0,
}
# The defaults of `ModelConfig`: gpt-oss-120b.
LARGE = CONFIG | {
    "num_hidden_layers": 36,
    "num_experts": 128,
    "experts_per_token": 4,
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "head_dim": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "initial_context_length": 4096,
    "rope_scaling_factor": 32.0,
}


def original(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of transformers' layout under OpenAI's names."""
    found = {
        "embedding.weight": state["model.embed_tokens.weight"],
        "norm.scale": state["model.norm.weight"],
        "unembedding.weight": state["lm_head.weight"],
    }
    for layer in sorted({int(match[1]) for name in state if (match := re.search(r"layers\.(\d+)\.", name))}):
        theirs, ours = f"model.layers.{layer}", f"block.{layer}"
        found[f"{ours}.attn.norm.scale"] = state[f"{theirs}.input_layernorm.weight"]
        found[f"{ours}.attn.sinks"] = state[f"{theirs}.self_attn.sinks"]
        found[f"{ours}.mlp.norm.scale"] = state[f"{theirs}.post_attention_layernorm.weight"]
        for kind in ("weight", "bias"):
            parts = [state[f"{theirs}.self_attn.{part}_proj.{kind}"] for part in "qkv"]
            found[f"{ours}.attn.qkv.{kind}"] = torch.cat(parts)
            found[f"{ours}.attn.out.{kind}"] = state[f"{theirs}.self_attn.o_proj.{kind}"]
            found[f"{ours}.mlp.gate.{kind}"] = state[f"{theirs}.mlp.router.{kind}"]
        for number, projection in ((1, "gate_up_proj"), (2, "down_proj")):
            found[f"{ours}.mlp.mlp{number}_bias"] = state[f"{theirs}.mlp.experts.{projection}_bias"]
            for part in ("blocks", "scales"):
                found[f"{ours}.mlp.mlp{number}_weight.{part}"] = state[f"{theirs}.mlp.experts.{projection}_{part}"]
    assert sum(tensor.numel() for tensor in found.values()) == sum(tensor.numel() for tensor in state.values())
    return found


def write(at: Path, shards: int = 1, config: dict[str, Any] = CONFIG, *, index: bool = False) -> Path:
    """`model.safetensors`, or `model--00001-of-00007.safetensors` and so on as gpt-oss-120b has."""
    at.mkdir()
    state = original(tensors(NAME))
    names, weight_map = sorted(state), {}
    for shard in range(shards):
        file = f"model--{shard + 1:05}-of-{shards:05}.safetensors" if shards > 1 else "model.safetensors"
        save_file({name: state[name] for name in names[shard::shards]}, at / file)
        weight_map |= dict.fromkeys(names[shard::shards], file)
    if index:
        (at / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (at / "config.json").write_text(json.dumps(config))
    (at / "dtypes.json").write_text("{}")
    return at


@pytest.mark.parametrize("shards, index", [(1, False), (3, False), (3, True)])
def test_openais_layout_gives_the_model_of_transformers_layout(shards: int, index: bool, tmp_path: Path) -> None:
    path = write(tmp_path / "original", shards, index=index)
    ours, theirs = from_pretrained(path), from_pretrained(folder(NAME))
    state = theirs.state_dict()
    assert ours.state_dict().keys() == state.keys()
    for name, tensor in ours.state_dict().items():
        assert type(tensor) is type(state[name]), name
        assert torch.equal(tensor, state[name]), name
    assert sum(isinstance(tensor, MXTensor) for tensor in state.values()) == 4
    assert torch.equal(ours(IDS).logits, theirs(IDS).logits)
    assert ours.config.rope_parameters == theirs.config.rope_parameters
    # The control: sinks, norms and projections do count.
    ours.model.layers[0].self_attn.q_proj.weight.data.copy_(ours.model.layers[1].self_attn.q_proj.weight)
    assert not torch.equal(ours(IDS).logits, theirs(IDS).logits)


def test_openais_layout_is_saved_in_transformers_layout(tmp_path: Path) -> None:
    save_pretrained(from_pretrained(write(tmp_path / "original")), tmp_path / "saved", "gpt-oss")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == tensors(NAME).keys()
    for name, tensor in tensors(NAME).items():
        assert torch.equal(saved[name], tensor), name
    assert torch.equal(from_pretrained(tmp_path / "saved")(IDS).logits, from_pretrained(folder(NAME))(IDS).logits)


def test_config_of_the_released_model_is_translated(tmp_path: Path) -> None:
    """transformers' defaults are gpt-oss-120b's, and so are OpenAI's: they lead to one config."""
    path = write(tmp_path / "original", config=LARGE)
    layers = {f"block.{i}.attn.sinks": torch.ones(64) for i in range(36)}
    save_file(load_file(path / "model.safetensors") | layers, path / "model.safetensors")
    content = read_content(path).as_in_transformers()
    config = AutoConfig.for_model(**content.checkpoint.config)
    expected = GptOssConfig(architectures=["GptOssForCausalLM"], swiglu_limit=7.0)  # no field of it in 5.17
    assert isinstance(config, GptOssConfig)
    assert config.to_dict() == expected.to_dict()
    smaller = read_content(write(tmp_path / "smaller")).as_in_transformers()
    assert AutoConfig.for_model(**smaller.checkpoint.config).to_dict() != expected.to_dict()


def test_integers_are_accepted_for_real_config_values(tmp_path: Path) -> None:
    whole = CONFIG | {"swiglu_limit": 7, "rope_theta": 150000, "rope_scaling_factor": 1}
    ours, theirs = (from_pretrained(write(tmp_path / str(i), config=c)) for i, c in enumerate((whole, CONFIG)))
    assert torch.equal(ours(IDS).logits, theirs(IDS).logits)


def test_load_state_keeps_the_files_names(tmp_path: Path) -> None:
    state = load_state(write(tmp_path / "original", 3))
    expected = load_state(folder(NAME))
    assert state.keys() == {name.removesuffix(".blocks").removesuffix(".scales") for name in original(tensors(NAME))}
    weight = state["block.1.mlp.mlp2_weight"]
    assert isinstance(weight, MXTensor)
    assert torch.equal(weight.mT.dequantize(), expected["model.layers.1.mlp.experts.down_proj"].dequantize())
    assert torch.equal(state["block.0.attn.qkv.bias"], original(tensors(NAME))["block.0.attn.qkv.bias"])


# Refusals


def test_error_names_the_missing_shard(tmp_path: Path) -> None:
    path = write(tmp_path / "original", 3)
    (path / "model--00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match="has 2 of 3 shards; number 2 is missing"):
        load_state(path)


@pytest.mark.parametrize(
    "change, error, named",
    [
        ({"num_experts": None}, ValueError, "lacks num_experts"),
        ({"bidirectional_context": True}, NotImplementedError, "bidirectional_context"),
        ({"head_dim": "16"}, ValueError, "no numbers for"),
        ({"rope_scaling_factor": "much"}, ValueError, "no numbers for"),
        ({"num_key_value_heads": 1}, ValueError, "v_proj"),
        ({"num_hidden_layers": 3}, ValueError, "the tensors are of 2 layers"),
        ({"num_hidden_layers": 10**6}, ValueError, "the tensors are of 2 layers"),
        ({"num_hidden_layers": 10**30}, ValueError, "an integer from 1 to 1,048,575"),
        ({"hidden_size": 64.0}, ValueError, "hidden_size 64.0; it is an integer"),
        ({"experts_per_token": 9}, ValueError, "experts_per_token 9, more than num_experts 4"),
        ({"num_key_value_heads": 3}, ValueError, "no multiple of num_key_value_heads 3"),
        ({"swiglu_limit": 0}, ValueError, "swiglu_limit 0; it is above 0"),
        ({"swiglu_limit": -7.0}, ValueError, "swiglu_limit -7.0; it is above 0"),
        ({"rope_scaling_factor": 1e308}, ValueError, "at most 1,000,000,000,000"),
        ({"rope_theta": float("nan")}, ValueError, "rope_theta nan; it is above 1"),
        ({"num_experts": 8}, ValueError, "shape"),
    ],
    ids=str,
)
def test_config_of_another_model_is_refused(
    change: dict[str, Any], error: type[Exception], named: str, tmp_path: Path
) -> None:
    config = {name: value for name, value in (CONFIG | change).items() if value is not None}
    path = write(tmp_path / "original", config=config)
    with pytest.raises(error, match=named):
        from_pretrained(path)
    assert len(load_state(path)) == len(original(tensors(NAME))) - 4


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "original")
    state = load_file(path / "model.safetensors")
    for wrong in (torch.ones(()), torch.ones(5)):
        save_file(state | {"block.0.attn.qkv.bias": wrong}, path / "model.safetensors")
        with pytest.raises(ValueError, match=r"self_attn\.[qkv]_proj\.bias' has shape"):
            from_pretrained(path)
