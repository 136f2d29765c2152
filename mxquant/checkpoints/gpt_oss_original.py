"""OpenAI's own layout of gpt-oss (the folder `original` of its repositories) under the names of transformers' class.

Queries, keys and values are one matrix there, experts are [E, N, K] with blocks along the last axis, and config.json
has other keys. The bytes are the same in both.

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
# Keys of OpenAI's config that transformers has too; `_RENAMED` has those with another name there.
_SAME = (
    *("num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size", "swiglu_limit", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "sliding_window"),
)
_REALS = ("swiglu_limit", "rope_theta", "rope_scaling_factor", "rope_ntk_alpha", "rope_ntk_beta")
_MOST_INTEGER, _MOST_REAL = 2**20 - 1, 10**12
"""Far above any model's sizes, and low enough that no product of sizes overflows."""
_BLOCK = re.compile(r"block\.(\d+)\.")
_RENAMED = {"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"}
_ROPE = ("rope_theta", "rope_scaling_factor", "rope_ntk_alpha", "rope_ntk_beta", "initial_context_length")


def as_in_transformers(checkpoint: Checkpoint, quantized: Iterable[WeightSpec]) -> ModelLayout:
    """The checkpoint under transformers' names.

    Raises:
        ValueError: config.json lacks a key, or a value is not a number that a model can have.
        NotImplementedError: config.json has a key that gpt-oss does not have.
    """
    config = checkpoint.config
    keys = {*_SAME, *_RENAMED, *_ROPE}
    if missing := sorted(keys - config.keys()):
        raise ValueError(
            f"config.json of {checkpoint.path} lacks {', '.join(missing)}, which gpt-oss's has; get it anew"
        )
    if others := sorted(config.keys() - keys):
        raise NotImplementedError(
            f"config.json of {checkpoint.path} has {', '.join(others)}, which gpt-oss does not know: it is of another "
            "model, of which load_state gives the tensors"
        )
    if wrong := {key: value for key, value in config.items() if type(value) not in (int, float)}:
        raise ValueError(f"config.json of {checkpoint.path} has no numbers for {wrong}; get it anew")
    _check_numbers(checkpoint)
    renamed = [dataclasses.replace(spec, name=_renamed(spec.name), axis=-2) for spec in quantized]
    used = {name for spec in renamed for name in spec.tensor_names}
    ordinary: dict[str, Rows] = {}
    for name in checkpoint.tensors:
        if name not in used:
            ordinary |= _split(name, config)
    return ModelLayout(_transformers_config(config), renamed, ordinary)


def _check_numbers(checkpoint: Checkpoint) -> None:
    """Refuse numbers that no model has, before a model is built with them: configs are untrusted."""
    config, where = checkpoint.config, f"config.json of {checkpoint.path}"
    for key, value in config.items():
        if key not in _REALS and not (type(value) is int and 1 <= value <= _MOST_INTEGER):
            raise ValueError(f"{where} has {key} {value!r}; it is an integer from 1 to {_MOST_INTEGER:,}; get it anew")
        least = 1 if key == "rope_theta" else 0  # frequencies are divided by its logarithm
        if key in _REALS and not least < value <= _MOST_REAL:
            raise ValueError(
                f"{where} has {key} {value!r}; it is above {least} and at most {_MOST_REAL:,}; get it anew"
            )
    blocks = {int(found[1]) for name in checkpoint.tensors if (found := _BLOCK.match(name)) is not None}
    layers, experts, heads = (config[key] for key in ("num_hidden_layers", "num_experts", "num_attention_heads"))
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
    """A tensor under its name in transformers; the one of queries, keys and values becomes three."""
    if (found := _QKV.fullmatch(name)) is None:
        return {_renamed(name): Rows(name)}
    queries = config["head_dim"] * config["num_attention_heads"]
    keys = queries + config["head_dim"] * config["num_key_value_heads"]
    layer, kind = found.groups()
    ends = {"q": (0, queries), "k": (queries, keys), "v": (keys, None)}
    return {f"model.layers.{layer}.self_attn.{p}_proj.{kind}": Rows(name, *rows) for p, rows in ends.items()}


def _transformers_config(config: Mapping[str, Any]) -> dict[str, Any]:
    theta, factor, slow, fast, context = (config[key] for key in _ROPE)
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
        **{key: float(config[key]) if key in _REALS else config[key] for key in _SAME},
        **{ours: config[theirs] for theirs, ours in _RENAMED.items()},
    }
