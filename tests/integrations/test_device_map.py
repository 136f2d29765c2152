"""`device_map`: modules that wait on the CPU or the disk, without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accelerate.hooks import attach_align_device_hook_on_blocks
from accelerate.utils import find_tied_parameters
from small_transformers import IDS, MODELS
from transformers import AutoModelForCausalLM

from mxquant import MXTensor, from_pretrained, quantize, quantize_, save_pretrained
from mxquant.integrations.transformers import MXQuantConfig, MXQuantizer

MODULES = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head")


@pytest.fixture(params=sorted(MODELS))
def model(request: pytest.FixtureRequest) -> Any:
    """Quantized, its output embedding included, so that tied weights are quantized ones."""
    torch.manual_seed(0)
    model = MODELS[request.param]().to(torch.bfloat16).eval()
    kinds = {"moe": "mxfp4"} if request.param in ("mixtral", "gpt_oss") else {}
    quantize_(model, {"linear": "mxfp4", "lm_head": "mxfp4"} | kinds)
    return model


def wait_on_the_cpu(model: nn.Module, waiting: tuple[str, ...]) -> None:
    """What accelerate's `dispatch_model` does for modules that are on the CPU and computed on another device, which is
    the CPU here too: they lie on the meta device but while they are computed.
    """
    tied = {model.get_parameter(name).data_ptr(): {} for group in find_tied_parameters(model) for name in group}
    attach_align_device_hook_on_blocks(
        model,
        execution_device=dict.fromkeys(MODULES, "cpu"),
        offload={name: name in waiting for name in MODULES},
        weights_map=model.state_dict(),
        tied_params_map=tied,
    )
    model.tie_weights()  # type: ignore[operator]


@torch.no_grad()
@pytest.mark.parametrize("waiting", [("model.layers.1",), ("model.embed_tokens", "model.layers.0", "lm_head")], ids=str)
def test_offloaded_modules_compute_the_same(model: Any, waiting: tuple[str, ...]) -> None:
    expected = model(IDS).logits
    wait_on_the_cpu(model, waiting)
    quantized = [p for name in waiting for p in model.get_submodule(name).parameters() if isinstance(p, MXTensor)]
    assert quantized
    assert all(p.is_meta and p.qdata.is_meta for p in quantized)
    for _ in range(2):
        assert torch.equal(model(IDS).logits, expected)


def test_model_with_offloaded_modules_is_saved_whole(model: Any, tmp_path: Path) -> None:
    expected = model(IDS).logits
    wait_on_the_cpu(model, ("model.embed_tokens", "model.layers.1", "lm_head"))
    save_pretrained(model, tmp_path / "ours")
    config = MXQuantConfig()
    model.config.quantization_config, model.hf_quantizer = config, MXQuantizer(config, pre_quantized=True)
    vars(model)["_weight_conversions"] = []
    model.save_pretrained(tmp_path / "theirs")
    for name in ("ours", "theirs"):
        assert torch.equal(from_pretrained(tmp_path / name)(IDS).logits, expected), name


def test_data_ptr_tells_tied_weights_from_others() -> None:
    """torch gives 0 for every subclass without a storage, by which accelerate would take all for one; and nothing can
    read there.
    """
    one, other = (quantize(torch.randn(4, 64), "mxfp4") for _ in range(2))
    assert len({0, one.data_ptr(), other.data_ptr()}) == 3
    assert one.detach().data_ptr() == one.data_ptr()
    assert one.data_ptr() > 1 << 57
    assert one.to("meta").data_ptr() == 0


def test_parameter_is_rebuilt_by_its_class() -> None:
    """`type(parameter)(value, requires_grad=...)`, as accelerate and others do."""
    weight = quantize(torch.randn(4, 64), "mxfp4")
    made = type(weight)(weight, requires_grad=False)
    assert isinstance(made, nn.Parameter)
    assert torch.equal(made, weight)
    with pytest.raises(TypeError, match=r"mxquant\.quantize"):
        MXTensor(torch.randn(4, 64))  # type: ignore[arg-type]


# The disk


def disk(*modules: str) -> dict[str, str]:
    return {name: "disk" if name in modules else "cpu" for name in MODULES}


def mapped(parameter: MXTensor, file: Path) -> bool:
    """Whether the codes lie in a mapping of the file."""
    address = parameter.qdata.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(number, 16) for number in line.split()[0].split("-"))
        if first <= address < last:
            return line.endswith(str(file))
    return False


@pytest.mark.parametrize("device_map", [disk("model.layers.1", "lm_head"), {"": "disk"}, "auto"], ids=str)
def test_disk_means_the_mapped_file(model: Any, device_map: Any, tmp_path: Path) -> None:
    """Also where "auto" finds that the CPU has too little room."""
    save_pretrained(model, tmp_path / "saved")
    again = from_pretrained(tmp_path / "saved", device_map=device_map, max_memory={"cpu": "10KB"})
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    quantized = [parameter for parameter in again.parameters() if isinstance(parameter, MXTensor)]
    assert len(quantized) > 10
    if Path("/proc/self/maps").exists():
        assert all(mapped(parameter, tmp_path / "saved" / "model.safetensors") for parameter in quantized)
        assert not mapped(quantized[0].clone(), tmp_path / "saved" / "model.safetensors")  # the control


def test_merged_experts_on_disk_are_refused(tmp_path: Path) -> None:
    model = MODELS["mixtral"]().to(torch.bfloat16)
    quantize_(model, "mxfp4")
    save_pretrained(model, tmp_path / "saved", "quark")
    with pytest.raises(NotImplementedError, match=r"merged of 4 tensors.*producer='mxquant'"):
        from_pretrained(tmp_path / "saved", device_map=disk("model.layers.1"))
    from_pretrained(tmp_path / "saved", device_map=disk("lm_head"))


@pytest.mark.parametrize("saved", [False, True])
def test_transformers_loader_refuses_the_disk(saved: bool, tmp_path: Path) -> None:
    """Where it would read the modules as they are in the checkpoint: unquantized."""
    MODELS["llama"]().to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    folder, options = tmp_path / "plain", {"quantization_config": MXQuantConfig("mxfp4")}
    if saved:
        model = AutoModelForCausalLM.from_pretrained(folder, **options)
        model.save_pretrained(tmp_path / "saved")
        folder, options = tmp_path / "saved", {}
    for more in ({"device_map": disk("model.layers.1")}, {"device_map": "auto", "max_memory": {"cpu": "10KB"}}):
        with pytest.raises(NotImplementedError, match=r"mxquant\.from_pretrained"):
            AutoModelForCausalLM.from_pretrained(folder, offload_folder=tmp_path / "offload", **options, **more)
    model = AutoModelForCausalLM.from_pretrained(folder, device_map={"": "cpu"}, **options)
    assert any(isinstance(parameter, MXTensor) for parameter in model.parameters())
