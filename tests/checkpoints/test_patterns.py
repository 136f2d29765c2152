"""Regular expressions of checkpoints: those in use match as Python's `re` does, hostile ones are refused in time."""

from __future__ import annotations

import functools
import json
import re
import time
from pathlib import Path

import pytest

from mxquant import load_state, quantize_, save_pretrained
from mxquant.checkpoints.patterns import matches_start
from mxquant.checkpoints.producer import matches

NAMES = [
    "lm_head",
    "model.layers.0.self_attn.q_proj",
    "model.layers.11.mlp.experts.127.down_proj",
    "model.language_model.layers.3.linear_attn.in_proj_qkvz",
    "visual.blocks.26.attn.qkv",
]
USUAL = [
    ".*lm_head",
    r"model\.layers\.\d+\.self_attn\.(q|k|v|o)_proj$",
    r".*\.(?:q_proj|k_proj).*",
    r"(\w+\.)*experts\.\d+\.(gate|up|down)_proj",
    r"(?:model\.)?layers\.(?:[0-9]|1[0-9])\..*",
    r"(?!.*lm_head).*proj$",
    r"^(?=.*experts)model\..*",
    r".*mlp.*experts.*proj.*",
    "",
]
HOSTILE = [
    "(.*.*)*[!]$",
    "(a+|[a-z.]+|.)+!",
    r"(\w|\w\w|[.])*!",
    "(?:(?:.*)*)*!",
    ".*.*.*.*.*.*.*.*.*.*.*.*!",
    "(?=.*proj)(.*.*)*!",
    "(.)(.*.*)*\\1!",
    "model(?:(.+)+)+!",
]


@pytest.mark.parametrize("pattern", USUAL)
def test_usual_patterns_match_as_in_python(pattern: str) -> None:
    assert [matches_start(pattern, name) for name in NAMES] == [bool(re.match(pattern, name)) for name in NAMES]
    assert matches(f"re:{pattern}", NAMES[0]) == bool(re.match(pattern, NAMES[0]))


@pytest.mark.parametrize("pattern", HOSTILE)
def test_hostile_patterns_are_refused_within_a_second(pattern: str) -> None:
    start = time.thread_time()
    with pytest.raises(ValueError, match=r"in the checkpoint's config .*: matching could take forever"):
        list(map(functools.partial(matches_start, pattern), NAMES))
    assert time.thread_time() - start < 1


def test_a_hostile_name_is_refused_within_a_second() -> None:
    start = time.thread_time()
    with pytest.raises(ValueError, match="takes too long on names such as"):
        matches_start(".*a.*b.*!", "ab" * 50_000)
    assert time.thread_time() - start < 1


def test_what_is_no_pattern_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'\(' in the checkpoint's config is no regular expression"):
        matches("re:(", "lm_head")


def test_names_that_differ_in_digits_are_tried_once() -> None:
    """So that fifty thousand experts cost little."""
    start = time.thread_time()
    for index in range(50_000):
        assert matches_start(r"(\w+\.)*experts\.\d+\.w1", f"model.layers.{index % 60}.mlp.experts.{index}.w1")
    assert time.thread_time() - start < 3


def test_a_checkpoint_with_a_hostile_pattern_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from small_transformers import MODELS

    model = MODELS["llama"]()
    quantize_(model, "mxfp4")
    save_pretrained(model, tmp_path / "ct", "compressed-tensors")
    config = json.loads((tmp_path / "ct" / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["targets"] = ["re:(.*.*)*[!]$", "Linear"]
    (tmp_path / "ct" / "config.json").write_text(json.dumps(config))
    start = time.thread_time()
    with pytest.raises(ValueError, match=r"'\(\.\*\.\*\)\*\[!\]\$' in the checkpoint's config takes too long"):
        load_state(tmp_path / "ct")
    assert time.thread_time() - start < 1
