"""Copies, pickles, files and conversions: a quantized weight comes through each with its bytes."""

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from matmul_reference import FORMATS, quantized, quantized_linear, same_bytes
from torch import nn

from mxquant import EmulatedMXTensor, MXTensor, quantize
from mxquant.tensor import as_weight


def python(code: str, *arguments: object) -> str:
    """Run `code` in a fresh process and give what it printed."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


@pytest.fixture(params=FORMATS)
def weight(request: pytest.FixtureRequest) -> MXTensor:
    return quantized(torch.randn(5, 72, dtype=torch.bfloat16), request.param, request.param)


# Copies


def test_deepcopy(weight: MXTensor) -> None:
    for original in (weight, nn.Parameter(weight, requires_grad=False)):
        twin = copy.deepcopy(original)
        assert type(twin) is type(original)
        assert isinstance(twin, nn.Parameter) == isinstance(original, nn.Parameter)
        assert same_bytes(twin, weight)
        assert twin.qdata.data_ptr() != weight.qdata.data_ptr()
        assert twin.requires_grad == original.requires_grad


def test_deepcopy_of_a_model_keeps_ties_and_results() -> None:
    model = nn.ModuleList([quantized_linear(64, 64), quantized_linear(64, 64)])
    model[1].weight = model[0].weight
    twin = copy.deepcopy(model)
    assert twin[0].weight is twin[1].weight
    assert twin[0].weight is not model[0].weight
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    assert torch.equal(twin[0](x), model[0](x))


def test_copy_from_another_quantized_tensor(weight: MXTensor) -> None:
    target = torch.zeros_like(weight)
    target.copy_(weight)
    assert same_bytes(target, weight)
    target.qdata.zero_()
    assert weight.qdata.any()


def test_copy_brings_the_static_activation_scale() -> None:
    """A checkpoint's own scale arrives with its codes, or the copy is refused: never the old scale on new codes."""
    w = torch.randn(5, 64)
    source = quantized(w, "nvfp4").with_activation("nvfp4", scale=torch.tensor(0.25))
    target = quantized(w, "nvfp4").with_activation("nvfp4", scale=torch.tensor(0.5))
    target.copy_(source)
    assert target.activation_scale is not None
    assert target.activation_scale.item() == 0.25
    for other in (quantized(w, "nvfp4", "nvfp4"), quantized(w, "nvfp4")):
        with pytest.raises((ValueError, TypeError), match=r"activation"):
            other.copy_(source)


def test_copy_between_different_activation_formats_is_refused() -> None:
    """Weights calibrated for W4A16 in a W4A4 layer, or the reverse, is a mistake of the config."""
    w = torch.randn(5, 64)
    with pytest.raises((ValueError, TypeError), match=r"activation|W4A"):
        quantized(w, "mxfp4", "mxfp4").copy_(quantized(w, "mxfp4"))


def test_empty_like_of_a_slice_holds_the_bytes_of_the_slice() -> None:
    part = quantized(torch.randn(5, 100), "mxfp4")[:, 7:60]
    like = torch.empty_like(part)
    like.copy_(part)
    assert torch.equal(like.dequantize(), part.dequantize())


# Pickles and files


def test_pickle(weight: MXTensor) -> None:
    assert same_bytes(pickle.loads(pickle.dumps(weight)), weight)


def test_pickle_of_a_module() -> None:
    model = nn.Sequential(quantized_linear(40, 64, activation="mxfp4"), nn.ReLU(), quantized_linear(64, 8, "nvfp4"))
    x = torch.randn(3, 40, dtype=torch.bfloat16)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))


def test_torch_save_of_a_module() -> None:
    model = nn.Sequential(quantized_linear(40, 64, activation="mxfp4"), nn.ReLU(), quantized_linear(64, 8, "nvfp4"))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    x = torch.randn(3, 40, dtype=torch.bfloat16)
    assert torch.equal(loaded(x), model(x))


def test_a_static_activation_scale_is_saved() -> None:
    weight = quantized(torch.randn(5, 64), "nvfp4").with_activation("nvfp4", scale=torch.tensor(0.25))
    back = pickle.loads(pickle.dumps(weight))
    assert back.activation_scale is not None
    assert back.activation_scale.item() == 0.25
    assert copy.deepcopy(weight).activation_scale.item() == 0.25


def test_a_state_dict_is_saved_without_foreign_attributes(tmp_path: Path) -> None:
    """Loaders and sharding marks stay on the live parameter; for plain parameters, too, they are in no state dict."""
    linear = quantized_linear(40, 8)
    linear.weight.weight_loader = lambda *_: None
    linear.weight.owner = linear
    torch.save(linear.state_dict(), tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert same_bytes(loaded["weight"], linear.weight)
    assert not hasattr(loaded["weight"], "owner")


LOAD = """
import sys, torch, mxquant
state = torch.load(sys.argv[1], weights_only=True)
for name, tensor in sorted(state.items()):
    if isinstance(tensor, mxquant.MXTensor):
        x = torch.ones(1, tensor.shape[1], dtype=tensor.dtype)
        y = torch.nn.functional.linear(x, tensor).float().sum().item()
        print(name, type(tensor).__name__, tensor.format, tensor.activation, tensor.backend, f"{y:.6g}")
"""


def test_weights_only_load_in_a_fresh_process(tmp_path: Path) -> None:
    """After `import mxquant`, without a list of safe globals; saved as a plain MXTensor, for any machine."""
    state = {f: quantized(torch.randn(5, 72), f, f, scale_mode=None) for f in FORMATS}
    torch.save(state, tmp_path / "state.pt")
    lines = python(LOAD, tmp_path / "state.pt").splitlines()
    expected = []
    for name in sorted(state):
        y = nn.functional.linear(torch.ones(1, 72), state[name]).sum().item()
        expected.append(f"{name} MXTensor {name} {name} auto {y:.6g}")
    assert lines == expected


def test_weights_only_load_keeps_bytes_and_parameters(tmp_path: Path) -> None:
    linear = quantized_linear(40, 8, "nvfp4", "nvfp4")
    torch.save(linear.state_dict(), tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert same_bytes(loaded["weight"], linear.weight)
    torch.save({"p": linear.weight}, tmp_path / "parameter.pt")
    parameter = torch.load(tmp_path / "parameter.pt", weights_only=True)["p"]
    assert isinstance(parameter, nn.Parameter)
    assert not parameter.requires_grad


@pytest.mark.parametrize("backend", ["auto", "emulation"])
def test_no_file_holds_the_choice_of_a_backend(tmp_path: Path, backend: str) -> None:
    linear = nn.Linear(64, 8, bias=False)
    weight = as_weight(quantize(linear.weight.detach(), "mxfp4").with_activation("mxfp4"), backend)
    assert isinstance(weight, EmulatedMXTensor)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    torch.save(linear, tmp_path / "module.pt")
    torch.save(linear.state_dict(), tmp_path / "state.pt")
    blobs = [(tmp_path / "module.pt").read_bytes(), (tmp_path / "state.pt").read_bytes()]
    blobs += [pickle.dumps(linear), pickle.dumps(weight)]
    for blob in blobs:
        for word in (b"emulation", b"Emulated", b"backend"):
            assert word not in blob
    assert type(pickle.loads(pickle.dumps(weight))) is MXTensor
    assert pickle.loads(pickle.dumps(weight)).backend == "auto"


@pytest.mark.parametrize("version", [2, 0, "1"])
def test_pickles_of_an_unknown_version_are_refused(version: object) -> None:
    """A file of a later mxquant is not misread as one of today's."""
    import dataclasses

    weight = quantize(torch.randn(2, 64), "mxfp4")
    with pytest.raises(ValueError, match=f"(?s){version}.*version|version.*{version}"):
        dataclasses.replace(weight.metadata, version=version)  # type: ignore[arg-type]


# Sharing and pinning

SHARE = """
import torch, torch.multiprocessing as mp, mxquant
from torch import nn

def child(weight, done):
    done.put((weight.is_shared(), weight.dequantize().sum().item()))

if __name__ == "__main__":
    linear = nn.Linear(64, 8)
    linear.weight = nn.Parameter(mxquant.quantize(linear.weight.detach(), "nvfp4"), requires_grad=False)
    before = linear.weight.dequantize()
    linear.share_memory()
    weight = linear.weight
    assert weight.is_shared() and weight.qdata.is_shared() and weight.scale.is_shared()
    assert torch.equal(weight.dequantize(), before)
    assert linear(torch.ones(1, 64)).isfinite().all()
    assert mxquant.quantize(torch.ones(2, 32), "mxfp4").share_memory_().is_shared()
    print("survived")
"""


def test_share_memory_in_a_subprocess() -> None:
    """A crash elsewhere, so a process of its own."""
    assert python(SHARE) == "survived\n"


@pytest.mark.parametrize("options", [{"mmap": True}, {"map_location": "meta"}])
def test_loading_with_mmap_and_other_options(tmp_path: Path, weight: MXTensor, options: dict[str, object]) -> None:
    torch.save({"w": weight}, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True, **options)["w"]  # type: ignore[arg-type]
    assert (loaded.metadata, loaded.shape) == (weight.metadata, weight.shape)
    if "mmap" in options:
        assert same_bytes(loaded, weight)
    else:
        assert loaded.qdata.is_meta


def test_is_shared_is_true_only_after_sharing() -> None:
    assert not quantize(torch.randn(2, 64), "mxfp4").is_shared()


def test_is_pinned(weight: MXTensor) -> None:
    assert weight.is_pinned() is False


def test_setting_data_takes_effect_or_is_refused() -> None:
    """`p.data = p.data.to(...)` is common; a setter that kept the old codes would go unnoticed."""
    parameter = nn.Parameter(quantized(torch.randn(5, 64), "mxfp4"), requires_grad=False)
    for new in (quantized(torch.randn(5, 64), "mxfp4"), parameter.data.half(), torch.zeros(5, 64)):
        try:
            parameter.data = new
        except (TypeError, ValueError, NotImplementedError, RuntimeError):
            continue
        assert parameter.dtype == new.dtype
        expected = new.dequantize() if isinstance(new, MXTensor) else new
        assert torch.equal(parameter.dequantize(), expected)


# Conversions


@pytest.mark.parametrize(
    "convert, dtype",
    [
        (lambda t: t.float(), torch.float32),
        (lambda t: t.half(), torch.float16),
        (lambda t: t.bfloat16(), torch.bfloat16),
        (lambda t: t.double(), torch.float64),
        (lambda t: t.to(torch.float16), torch.float16),
        (lambda t: t.to("cpu", torch.float32), torch.float32),
        (lambda t: t.to(dtype=torch.float16, copy=True), torch.float16),
        (lambda t: t.type(torch.float16), torch.float16),
        (lambda t: t.to(torch.zeros(1, dtype=torch.float16)), torch.float16),
    ],
    ids=["float", "half", "bfloat16", "double", "to(dtype)", "to(device, dtype)", "to(copy)", "type", "to(other)"],
)
def test_dtype_conversions_change_no_code(weight: MXTensor, convert: object, dtype: torch.dtype) -> None:
    """The dtype is what the weight decodes to; its bytes are the same in every dtype."""
    converted = convert(weight)  # type: ignore[operator]
    assert type(converted) is type(weight)
    assert converted.dtype == dtype
    assert converted.dequantize().dtype == dtype
    assert torch.equal(converted.qdata, weight.qdata)
    assert torch.equal(converted.scale, weight.scale)
    assert converted.activation == weight.activation


def test_to_its_own_device_and_dtype_returns_the_same_tensor(weight: MXTensor) -> None:
    assert weight.to("cpu") is weight
    assert weight.to(weight.dtype) is weight
    assert weight.cpu() is weight
    copied = weight.to("cpu", copy=True)
    assert copied is not weight
    assert copied.qdata.data_ptr() != weight.qdata.data_ptr()


def test_to_meta_and_empty_like_back(weight: MXTensor) -> None:
    meta = weight.to("meta")
    assert isinstance(meta, MXTensor)
    assert meta.is_meta
    assert meta.qdata.is_meta
    assert meta.scale.is_meta
    assert (meta.shape, meta.dtype, meta.metadata) == (weight.shape, weight.dtype, weight.metadata)
    back = torch.empty_like(meta, device="cpu")
    assert back.qdata.shape == weight.qdata.shape
    back.copy_(weight)
    assert same_bytes(back, weight)


@pytest.mark.parametrize("activation", [None, "mxfp4", "nvfp4", "fp8_e4m3"])
def test_products_on_meta_have_the_right_shape(activation: str | None) -> None:
    meta = quantized(torch.randn(6, 40), "mxfp4", activation).to("meta")
    y = nn.functional.linear(torch.empty(2, 3, 40, device="meta"), meta)
    assert (y.shape, y.device.type) == ((2, 3, 6), "meta")
