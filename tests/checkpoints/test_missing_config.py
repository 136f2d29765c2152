"""Quantized tensors whose config or header is missing: refused, by every producer's names and dtypes of tensors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance.vectors import existing
from safetensors.torch import save_file

from checkpoints.recorded import NAMES
from mxquant import flatten_state_dict, load_state, quantize
from mxquant.checkpoints.files import WEIGHTS


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("config", [None, {"model_type": "llama"}], ids=["no config", "one without quantization"])
def test_quantized_tensors_without_their_config_are_refused(name: str, config: Any, tmp_path: Path) -> None:
    """Of every producer: codes must not pass for weights. The unquantized original is read."""
    source = existing(f"checkpoints/{name}/model.safetensors")
    shutil.copyfile(source, tmp_path / WEIGHTS)
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    for path in (tmp_path, tmp_path / WEIGHTS):
        with pytest.raises(ValueError, match=r"no config\.json .* and no header says how it is quantized; put the"):
            load_state(path)
    shutil.copyfile(source.parent / "original_bf16.safetensors", tmp_path / WEIGHTS)
    assert load_state(tmp_path)


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4", "mxfp8"])
def test_own_file_without_its_header_is_refused(fmt: str, tmp_path: Path) -> None:
    flat, _ = flatten_state_dict({"experts": quantize(torch.randn(2, 4, 64), fmt)})
    save_file(flat, tmp_path / WEIGHTS)
    with pytest.raises(ValueError, match=r"'experts\.qdata' is U8, part of a quantized weight"):
        load_state(tmp_path)


def test_unquantized_tensors_named_as_scales_are_read(tmp_path: Path) -> None:
    """Only codes and scales have the names and the dtypes of such."""
    tensors = {"norm.scale": torch.ones(4), "a.scales": torch.ones(2), "mask": torch.ones(3, dtype=torch.uint8)}
    save_file(tensors, tmp_path / WEIGHTS)
    assert load_state(tmp_path).keys() == tensors.keys()
