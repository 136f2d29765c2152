"""`quantize_`, transformers' load and the command line refuse a weight with the same message."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from safetensors.torch import load_file, save_file
from small_transformers import MODELS
from transformers import AutoModelForCausalLM

from mxquant import MXFP4Config, mxfp4, mxfp8, quantize_
from mxquant.integrations.streaming import quantize_checkpoint
from mxquant.integrations.transformers import MXQuantConfig

UP = "model.layers.0.mlp.up_proj.weight"


def llama(**sizes: int) -> Any:
    config = MODELS["llama"]().config
    return transformers.LlamaForCausalLM(type(config)(**config.to_dict() | sizes))


def mixtral(**sizes: int) -> Any:
    config = MODELS["mixtral"]().config
    return transformers.MixtralForCausalLM(type(config)(**config.to_dict() | sizes))


def saved(model: Any, folder: Path) -> Path:
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def spoil(folder: Path, ending: str, value: float) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(ending):
            tensor[0, 0] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def nan_in(ending: str) -> Callable[[Path], None]:
    return lambda folder: spoil(folder, ending, torch.nan)


def huge_in(ending: str) -> Callable[[Path], None]:
    return lambda folder: spoil(folder, ending, 3e38)


ROTATED = {"weight": "mxfp4", "rotation": 32}
BAD: dict[str, tuple[Callable[[], Any], Callable[[Path], None] | None, object, str]] = {
    "a stack that the rotation does not fit": (
        lambda: mixtral(intermediate_size=48),
        None,
        {"moe": ROTATED},
        "mlp.experts.down_proj .*rotation=32 needs a blocked axis of a multiple",
    ),
    "a matrix that the rotation does not fit": (
        lambda: llama(intermediate_size=48),
        None,
        ROTATED,
        "mlp.down_proj.weight .*rotation=32 needs",
    ),
    "no rows": (lambda: llama(intermediate_size=0), None, "mxfp4", r"_proj.weight .* is empty"),
    "NaN": (llama, nan_in("0.mlp.up_proj.weight"), "mxfp4", rf"{UP} \(96, 64\) holds NaN or Inf"),
    "NaN in one expert": (
        mixtral,
        nan_in("experts.1.w1.weight"),
        "mxfp4",
        r"mlp.experts.gate_up_proj \(4, .*\) holds NaN or Inf",
    ),
    "values that a rotation may lift out of fp32's range": (
        llama,
        huge_in("0.mlp.up_proj.weight"),
        ROTATED,
        "may leave fp32's range when they are rotated",
    ),
    "an unknown backend": (llama, None, mxfp4(backend="typo"), "backend 'typo' is unknown"),
    "a backend that cannot": (llama, None, mxfp8(backend="fp8"), "backend 'fp8' cannot"),
    "an unknown backend for experts": (mixtral, None, {"moe": MXFP4Config(backend="typo")}, "experts.*'typo' is unk"),
}


@pytest.mark.parametrize("model, spoiling, config, named", BAD.values(), ids=BAD)
def test_each_way_refuses_with_the_same_message(
    model: Callable[[], Any],
    spoiling: Callable[[Path], None] | None,
    config: object,
    named: str,
    tmp_path: Path,
) -> None:
    folder = saved(model(), tmp_path / "plain")
    if spoiling is not None:
        spoiling(folder)
    with pytest.raises(ValueError, match=named) as after_loading:
        quantize_(AutoModelForCausalLM.from_pretrained(folder), config)
    with pytest.raises(ValueError) as while_loading:
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=MXQuantConfig(config))
    with pytest.raises(ValueError) as from_disk_to_disk:
        quantize_checkpoint(folder, tmp_path / "out", config)
    assert str(while_loading.value) == str(from_disk_to_disk.value) == str(after_loading.value)
    assert not (tmp_path / "out").exists()


def test_sizes_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    folder = saved(mixtral(intermediate_size=48), tmp_path)
    spoil(folder, "experts.1.w1.weight", torch.nan)  # would be the error if it were read
    with pytest.raises(ValueError, match="rotation=32 needs"):
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=MXQuantConfig({"moe": ROTATED}))


class Integers(transformers.PreTrainedModel):
    """A model with a linear layer of integers."""

    config_class = transformers.LlamaConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.linear = torch.nn.Linear(64, 64, bias=False)
        self.linear.weight = torch.nn.Parameter(torch.zeros(64, 64, dtype=torch.int32), requires_grad=False)
        self.norm = torch.nn.LayerNorm(64)
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        pass


def test_integers_are_refused_with_the_same_message(tmp_path: Path) -> None:
    Integers(transformers.LlamaConfig()).save_pretrained(tmp_path)
    with pytest.raises(TypeError, match=r"linear\.weight is torch.int32") as after_loading:
        quantize_(Integers.from_pretrained(tmp_path), "mxfp4")
    with pytest.raises(TypeError) as while_loading:
        Integers.from_pretrained(tmp_path, quantization_config=MXQuantConfig("mxfp4"))
    assert str(while_loading.value) == str(after_loading.value)
