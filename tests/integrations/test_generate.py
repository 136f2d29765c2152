"""`generate` of a quantized model: batches with padding on the left, a static cache, and compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from small_transformers import MODELS, SMALL
from transformers import AutoModelForCausalLM, CompileConfig, LlamaConfig, LlamaForCausalLM

from mxquant.integrations.transformers import MXQuantConfig

PROMPTS = [[5, 17, 90, 3, 44, 71, 12, 100], [64, 9, 33], [120, 7, 81, 2, 55]]
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(params=sorted(MODELS))
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    torch.manual_seed(0)
    MODELS[request.param]().to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    return AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=MXQuantConfig("mxfp4"))


def padded() -> dict[str, Tensor]:
    """The prompts as one batch, padding on the left."""
    width = max(map(len, PROMPTS))
    ids = [[0] * (width - len(prompt)) + prompt for prompt in PROMPTS]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def new_tokens(model: Any, **options: Any) -> list[list[int]]:
    return model.generate(**padded(), **GREEDY, **options)[:, -GREEDY["max_new_tokens"] :].tolist()


def test_a_padded_batch_gives_each_prompts_tokens(model: Any) -> None:
    """W4A4 activations are quantized row by row, so that a prompt's tokens do not depend on its batch mates. Growing
    and static caches give the same.
    """
    alone = [model.generate(torch.tensor([prompt]), **GREEDY)[0, len(prompt) :].tolist() for prompt in PROMPTS]
    assert new_tokens(model) == alone
    assert new_tokens(model, cache_implementation="static", disable_compile=True) == alone
    assert len({tuple(tokens) for tokens in alone}) == len(PROMPTS)


def compiled(backend: str) -> CompileConfig:
    """transformers compiles on a CPU only where this is set."""
    config = CompileConfig(fullgraph=True, backend=backend, mode=None)
    config._compile_all_devices = True
    return config


@pytest.mark.parametrize(
    "dtype, backend",
    [(torch.bfloat16, "aot_eager"), (torch.float32, "inductor")],
    ids=["traced", "compiled"],
)
def test_compiled_with_a_static_cache_gives_the_same_tokens(dtype: torch.dtype, backend: str, tmp_path: Path) -> None:
    """One graph for all steps but the first, without a break. Inductor keeps sums in fp32 where eager bf16 rounds
    them, and so picks other tokens of a random model in bf16, quantized or not: it is compared in fp32.
    """
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SMALL | {"num_hidden_layers": 1})).to(torch.bfloat16).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=MXQuantConfig("mxfp4"), dtype=dtype)
    expected = new_tokens(model)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert new_tokens(model, cache_implementation="static", compile_config=compiled(backend)) == expected
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
