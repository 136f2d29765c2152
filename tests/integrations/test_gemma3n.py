"""Gemma3n: its AltUp layers mix four copies of the residual stream by 4 x 4 and 4 x 16 linears."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

from mxquant import quantize_, summary


def test_altup_layers_are_left_alone_with_a_reason() -> None:
    torch.manual_seed(0)
    config = Gemma3nTextConfig(
        vocab_size=64,
        vocab_size_per_layer_input=64,
        hidden_size=64,
        hidden_size_per_layer_input=16,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_kv_shared_layers=0,
        laurel_rank=16,
        layer_types=["full_attention"] * 2,
        activation_sparsity_pattern=[0.0, 0.0],
        altup_coef_clip=120.0,
    )
    model = Gemma3nForCausalLM(config).eval()
    quantize_(model, "mxfp4")
    found = summary(model)
    assert not any("altup" in row.name for row in found.quantized if ".layers." in row.name)
    reasons = {row.name.rpartition("altup.")[2]: row.reason for row in found.skipped if ".altup." in row.name}
    assert reasons["correction_coefs.weight"] == "fewer than 16 input features, no format's block"
    assert reasons["prediction_coefs.weight"] == "fewer than 16 input features, no format's block"
    assert "router" in reasons["modality_router.weight"]
    model.train()  # AltUp clips the coefficients of its weights in place
    assert model(torch.arange(8)[None]).logits.isfinite().all()
