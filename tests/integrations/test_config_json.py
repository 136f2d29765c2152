"""config.json as transformers takes it, or a ValueError within a second where no model has such values."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from small_transformers import MODELS
from transformers import AutoModelForCausalLM

from mxquant import from_pretrained, quantize_, save_pretrained


def saved(to: Path, changes: dict[str, Any]) -> Path:
    """A quantized Llama with changes to its config.json; a value of ... removes the key."""
    model = MODELS["llama"]()
    quantize_(model, "mxfp4")
    save_pretrained(model, to, "compressed-tensors")
    config = json.loads((to / "config.json").read_text()) | changes
    (to / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    return to


ARCHITECTURES = [None, ..., [], ["Unknown"], "LlamaForCausalLM", 3, [3], ["LlamaConfig"], ["AutoModel"], ["pipeline"]]


@pytest.mark.parametrize("architectures", ARCHITECTURES, ids=str)
def test_architectures_that_name_no_model_mean_the_model_types(architectures: Any, tmp_path: Path) -> None:
    """As in AutoModelForCausalLM.from_pretrained, which does not read them."""
    path = saved(tmp_path / "quantized", {"architectures": architectures})
    loaded = from_pretrained(path)
    assert isinstance(loaded, type(AutoModelForCausalLM.from_config(loaded.config)))
    assert loaded(torch.tensor([[1, 2, 3]])).logits.isfinite().all()


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"num_hidden_layers": 10**7}, "num_hidden_layers 10000000, more than the checkpoint's"),
        ({"text_config": {"n_layer": 10**7}}, "n_layer 10000000, more than"),
        ({"num_hidden_layers": 100}, "parameter|tensor"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers"),
        ({"num_attention_heads": 0}, "ZeroDivisionError"),
        ({"num_key_value_heads": 0}, "ZeroDivisionError"),
        ({"head_dim": 0}, "ZeroDivisionError"),
        ({"hidden_act": "unknown"}, "KeyError: 'unknown'"),
        ({"hidden_act": None}, "hidden_act"),
        ({"hidden_size": 10**30}, "TypeError|RuntimeError|OverflowError"),
        ({"vocab_size": 10**13}, "shape"),
        ({"intermediate_size": 10**15}, "shape"),
        ({"rope_parameters": {"rope_type": "unknown"}}, "KeyError: 'unknown'"),
        ({"dtype": "unknown"}, "unknown"),
        ({"model_type": []}, "model_type|unhashable"),
        ({"architectures": ["BertModel"]}, "LlamaConfig"),
        ({"id2label": 3}, "AttributeError"),
    ],
    ids=str,
)
def test_values_that_no_model_has_are_refused_within_a_second(
    changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    path = saved(tmp_path / "quantized", changes)
    start = time.thread_time()
    with pytest.raises(ValueError, match=named):
        from_pretrained(path)
    assert time.thread_time() - start < 1
