"""OpenAI's own layout of gpt-oss (the folder `original` of its repositories) as transformers' class has it.

Queries, keys and values are one matrix there, experts are [E, N, K] with blocks along the last axis, and config.json
has OpenAI's words. Bytes are the same in both.

Sources: gpt-oss `torch/model.py` (`ModelConfig`, the names of the parameters) and `torch/weights.py`; transformers
`models/gpt_oss/convert_gpt_oss_weights_to_hf.py`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from mxquant.checkpoints.files import Checkpoint
from mxquant.checkpoints.producer import ModelLayout, Rows
from mxquant.checkpoints.weight_spec import WeightSpec

_NAMES = {
    r"embedding\.": "model.embed_tokens.",
    r"unembedding\.": "lm_head.",
    r"norm\.scale": "model.norm.weight",
    r"block\.(\d+)\.attn\.norm\.scale": r"model.layers.\1.input_layernorm.weight",
    r"block\.(\d+)\.attn\.out\.": r"model.layers.\1.self_attn.o_proj.",
    r"block\.(\d+)\.attn\.sinks": r"model.layers.\1.self_attn.sinks",
    r"block\.(\d+)\.mlp\.norm\.scale": r"model.layers.\1.post_attention_layernorm.weight",
    r"block\.(\d+)\.mlp\.gate\.": r"model.layers.\1.mlp.router.",
    r"block\.(\d+)\.mlp\.mlp1_weight": r"model.layers.\1.mlp.experts.gate_up_proj",
    r"block\.(\d+)\.mlp\.mlp1_bias": r"model.layers.\1.mlp.experts.gate_up_proj_bias",
    r"block\.(\d+)\.mlp\.mlp2_weight": r"model.layers.\1.mlp.experts.down_proj",
    r"block\.(\d+)\.mlp\.mlp2_bias": r"model.layers.\1.mlp.experts.down_proj_bias",
}
_QKV = re.compile(r"block\.(\d+)\.attn\.qkv\.(weight|bias)")
# Words of OpenAI's config that are transformers' own, or have another name there.
_SAME = (
    *("num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size", "swiglu_limit", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "sliding_window"),
)
_REALS = ("swiglu_limit", "rope_theta", "rope_scaling_factor", "rope_ntk_alpha", "rope_ntk_beta")
_MOST_INTEGER, _MOST_REAL = 2**20 - 1, 10**12
"""Far above any model's, and low enough that no product of sizes overflows."""
_BLOCK = re.compile(r"block\.(\d+)\.")
_RENAMED = {"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"}
_ROPE = ("rope_theta", "rope_scaling_factor", "rope_ntk_alpha", "rope_ntk_beta", "initial_context_length")


def as_in_transformers(checkpoint: Checkpoint, stored: Iterable[WeightSpec]) -> ModelLayout:
    """The checkpoint by transformers' names.

    Raises:
        ValueError: config.json lacks a word, or has no number for one that a model can have.
        NotImplementedError: it has one that gpt-oss does not.
    """
    config = checkpoint.config
    words = {*_SAME, *_RENAMED, *_ROPE}
    if missing := sorted(words - config.keys()):
        raise ValueError(
            f"config.json of {checkpoint.path} lacks {', '.join(missing)}, which gpt-oss's has; get it anew"
        )
    if others := sorted(config.keys() - words):
        raise NotImplementedError(
            f"config.json of {checkpoint.path} has {', '.join(others)}, which gpt-oss does not know: it is of another "
            "model, of which load_state gives the tensors"
        )
    if wrong := {word: value for word, value in config.items() if type(value) not in (int, float)}:
        raise ValueError(f"config.json of {checkpoint.path} has no numbers for {wrong}; get it anew")
    _check_numbers(checkpoint)
    quantized = [dataclasses.replace(weight, name=_renamed(weight.name), axis=-2) for weight in stored]
    parts = {part for weight in quantized for part in weight.parts}
    ordinary: dict[str, Rows] = {}
    for name in checkpoint.tensors:
        if name not in parts:
            ordinary |= _split(name, config)
    return ModelLayout(_transformers_config(config), quantized, ordinary)


def _check_numbers(checkpoint: Checkpoint) -> None:
    """Refuse numbers that no model has, before one is built of them: a config comes from anybody."""
    config, where = checkpoint.config, f"config.json of {checkpoint.path}"
    for word, value in config.items():
        if word not in _REALS and not (type(value) is int and 1 <= value <= _MOST_INTEGER):
            raise ValueError(f"{where} has {word} {value!r}; it is an integer from 1 to {_MOST_INTEGER:,}; get it anew")
        least = 1 if word == "rope_theta" else 0  # frequencies are divided by its logarithm
        if word in _REALS and not least < value <= _MOST_REAL:
            raise ValueError(
                f"{where} has {word} {value!r}; it is above {least} and at most {_MOST_REAL:,}; get it anew"
            )
    blocks = {int(found[1]) for name in checkpoint.tensors if (found := _BLOCK.match(name)) is not None}
    layers, experts, heads = (config[word] for word in ("num_hidden_layers", "num_experts", "num_attention_heads"))
    if len(blocks) != layers or max(blocks) != layers - 1:
        raise ValueError(f"{where} has num_hidden_layers {layers}; the tensors are of {len(blocks)} layers")
    if (used := config["experts_per_token"]) > experts:
        raise ValueError(f"{where} has experts_per_token {used}, more than num_experts {experts}; get it anew")
    if heads % (shared := config["num_key_value_heads"]):
        raise ValueError(f"{where} has num_attention_heads {heads}, no multiple of num_key_value_heads {shared}")


def _renamed(name: str) -> str:
    for pattern, replacement in _NAMES.items():
        if (found := re.match(pattern, name)) is not None:
            return found.expand(replacement) + name[found.end() :]
    return name


def _split(name: str, config: Mapping[str, Any]) -> dict[str, Rows]:
    """A tensor under its name; that of queries, keys and values is three."""
    if (found := _QKV.fullmatch(name)) is None:
        return {_renamed(name): Rows(name)}
    queries = config["head_dim"] * config["num_attention_heads"]
    keys = queries + config["head_dim"] * config["num_key_value_heads"]
    layer, kind = found.groups()
    ends = {"q": (0, queries), "k": (queries, keys), "v": (keys, None)}
    return {f"model.layers.{layer}.self_attn.{p}_proj.{kind}": Rows(name, *rows) for p, rows in ends.items()}


def _transformers_config(config: Mapping[str, Any]) -> dict[str, Any]:
    theta, factor, slow, fast, context = (config[word] for word in _ROPE)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(theta)}
    if factor > 1:
        rope |= {
            "rope_type": "yarn",
            "factor": float(factor),
            "beta_fast": float(fast),
            "beta_slow": float(slow),
            "truncate": False,
            "original_max_position_embeddings": context,
        }
    return {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "rope_parameters": rope,
        "max_position_embeddings": int(context * max(1, factor)),
        **{word: float(config[word]) if word in _REALS else config[word] for word in _SAME},
        **{ours: config[theirs] for theirs, ours in _RENAMED.items()},
    }
