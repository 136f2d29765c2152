"""Transformers models of few and small layers, with random weights. Imports transformers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "tied": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=True)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=4)),
    "gpt_oss": lambda: GptOssForCausalLM(
        GptOssConfig(**SMALL, num_local_experts=4, layer_types=["full_attention"] * 2)
    ),
}
IDS = torch.arange(16).reshape(2, 8)
