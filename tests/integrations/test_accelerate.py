"""accelerate and sentence-transformers: what they save and offload of quantized models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import mlp

pytest.importorskip("accelerate")

from accelerate import Accelerator, cpu_offload, disk_offload

from mxquant import MXTensor, quantize_

X = torch.ones(2, 40)


def quantized(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model = mlp(dtype=dtype)
    quantize_(model, "mxfp4")
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_disk_offload_is_refused_with_what_works(tmp_path: Path, dtype: torch.dtype) -> None:
    with pytest.raises(NotImplementedError, match=r"use accelerate\.cpu_offload, or mxquant\.from_pretrained"):
        disk_offload(quantized(dtype), tmp_path, execution_device=torch.device("cpu"))
    model = quantized(dtype)
    expected = model(X.to(dtype))
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert torch.equal(model(X.to(dtype)), expected)


def test_save_state_works_without_safetensors(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(quantized())
    with pytest.raises(TypeError, match=r"Accelerate's save_state .* safe_serialization=False"):
        accelerator.save_state(tmp_path / "safe")
    accelerator.save_state(tmp_path / "state", safe_serialization=False)
    codes, bias = model[0].weight.qdata.clone(), model[0].bias.detach().clone()
    with torch.no_grad():
        model[0].weight.qdata.zero_()
        model[0].bias.zero_()
    accelerator.load_state(tmp_path / "state")
    assert torch.equal(model[0].weight.qdata, codes)
    assert torch.equal(model[0].bias, bias)


def test_sentence_transformers_saves_what_was_quantized_on_load(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sentence_transformers = pytest.importorskip("sentence_transformers")
    from mxquant.integrations.transformers import MXQuantConfig

    config = transformers.BertConfig(
        vocab_size=15, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    torch.manual_seed(0)
    transformers.BertModel(config).save_pretrained(tmp_path / "bert")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "bert")
    from sentence_transformers import models as parts

    model = sentence_transformers.SentenceTransformer(
        modules=[parts.Transformer(str(tmp_path / "bert")), parts.Pooling(64)], device="cpu"
    )
    model.save_pretrained(str(tmp_path / "plain"))
    quantize_(model, "mxfp4")
    with pytest.raises(TypeError, match="where its transformers model was quantized on load, by MXQuantConfig"):
        model.save_pretrained(str(tmp_path / "refused"))
    options = {"quantization_config": MXQuantConfig("mxfp4")}
    loaded = sentence_transformers.SentenceTransformer(str(tmp_path / "plain"), device="cpu", model_kwargs=options)
    assert (loaded.encode(["a b c"]) == model.encode(["a b c"])).all()
    loaded.save_pretrained(str(tmp_path / "saved"))
    again = sentence_transformers.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert any(isinstance(parameter, MXTensor) for parameter in again.parameters())
    assert (again.encode(["a b c"]) == model.encode(["a b c"])).all()


def test_diffusers_saves_without_safetensors(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.UNet2DConditionModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        norm_num_groups=8,
    )
    inputs = torch.randn(1, 4, 8, 8), 1, torch.randn(1, 4, 32)
    quantize_(model, "mxfp4")
    with pytest.raises(TypeError, match="diffusers' save_pretrained take safe_serialization=False"):
        model.save_pretrained(tmp_path / "safe")
    model.save_pretrained(tmp_path / "saved", safe_serialization=False)
    loaded = type(model).from_pretrained(tmp_path / "saved", use_safetensors=False, low_cpu_mem_usage=False)
    assert torch.equal(loaded(*inputs).sample, model(*inputs).sample)
