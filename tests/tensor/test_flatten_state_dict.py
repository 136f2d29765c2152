"""To plain tensors and strings, as safetensors wants them, and back."""

import json
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from matmul_reference import FORMATS, quantized, quantized_linear, same_bytes
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mxquant import MXTensor, flatten_state_dict, quantize, unflatten_state_dict


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("activation", [None, "mxfp8_e4m3", "fp8_e5m2"])
def test_round_trip_through_safetensors(tmp_path: Path, format: str, activation: str | None) -> None:
    model = nn.Sequential(quantized_linear(40, 64, format, activation), nn.LayerNorm(64))
    tensors, metadata = flatten_state_dict(model.state_dict())
    save_file(tensors, tmp_path / "model.safetensors", metadata)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        read = file.metadata()
    state = unflatten_state_dict(load_file(tmp_path / "model.safetensors"), read)
    assert set(state) == set(model.state_dict())
    assert type(state["0.weight"]) is MXTensor
    assert same_bytes(state["0.weight"], model[0].weight)
    assert torch.equal(state["0.bias"], model[0].bias)
    assert torch.equal(state["1.weight"], model[1].weight)


@pytest.mark.parametrize("format", FORMATS)
def test_names_and_dtypes_of_the_flattened_tensors(format: str) -> None:
    """`.qdata`, `.scale` and, for NVFP4, `.per_tensor_scale`; the rest keeps its names and is passed on, not copied."""
    bias = torch.randn(5)
    tensors, metadata = flatten_state_dict({"a.weight": quantize(torch.randn(5, 72), format), "a.bias": bias})
    names = {"a.weight.qdata", "a.weight.scale", "a.bias"} | (
        {"a.weight.per_tensor_scale"} if format == "nvfp4" else set()
    )
    assert set(tensors) == names
    assert all(type(t) is Tensor for t in tensors.values())
    assert tensors["a.bias"] is bias
    assert all(t.is_contiguous() for t in tensors.values())
    assert all(isinstance(k, str) and isinstance(v, str) for k, v in metadata.items())


def test_metadata_is_versioned_json() -> None:
    state = {
        "w": quantize(torch.randn(3, 64, dtype=torch.bfloat16), "nvfp4").with_activation("fp8_e4m3"),
        "v": quantize(torch.randn(64, 3), "mxfp4", axis=0).with_activation("mxfp8", scale_mode="floor"),
    }
    _, metadata = flatten_state_dict(state)
    assert list(metadata) == ["mxquant"]
    document = json.loads(metadata["mxquant"])
    assert document["version"] == 1
    assert set(document["tensors"]) == {"w", "v"}
    assert_expected_inline(
        json.dumps(document, indent=1, sort_keys=True),
        """\
{
 "aliases": {},
 "tensors": {
  "v": {
   "activation": "mxfp8_e4m3",
   "activation_scale_mode": "floor",
   "axis": -2,
   "block_offset": 0,
   "dtype": "float32",
   "format": "mxfp4",
   "layout": "canonical",
   "rotation": null,
   "shape": [
    64,
    3
   ],
   "version": 1
  },
  "w": {
   "activation": "fp8_e4m3",
   "activation_scale_mode": null,
   "axis": -1,
   "block_offset": 0,
   "dtype": "bfloat16",
   "format": "nvfp4",
   "layout": "canonical",
   "rotation": null,
   "shape": [
    3,
    64
   ],
   "version": 1
  }
 },
 "version": 1
}""",
    )


def test_every_field_of_the_metadata_round_trips() -> None:
    w = torch.randn(6, 100, dtype=torch.float16)
    originals = {
        "slice": quantized(w, "mxfp6_e3m2", "mxfp4")[:, 7:50],
        "logical": quantized(w, "mxfp4", axis=0),
        "transposed": quantized(w, "mxfp8_e5m2").t(),
        "stack": quantize(torch.randn(2, 3, 40), "nvfp4"),
        "static": quantize(w, "nvfp4").with_activation("nvfp4", scale=torch.tensor(0.5)),
        "mode": quantize(w, "mxfp4").with_activation("mxfp8", scale_mode="ceil"),
        "vector": quantize(w[0], "mxfp4"),
    }
    back = unflatten_state_dict(*flatten_state_dict(originals))
    for name, original in originals.items():
        assert back[name].metadata == original.metadata, name
        assert back[name].shape == original.shape, name
        assert torch.equal(back[name].dequantize(), original.dequantize()), name
    assert back["static"].activation_scale.item() == 0.5


def test_a_model_without_quantized_weights_passes_through() -> None:
    state = nn.Linear(4, 4).state_dict()
    tensors, metadata = flatten_state_dict(state)
    assert list(tensors) == list(state)
    back = unflatten_state_dict(tensors, metadata)
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_tensors_without_their_metadata_are_refused() -> None:
    """Without it packed codes would be handed on as if they were weights."""
    tensors, _ = flatten_state_dict({"w": quantize(torch.randn(2, 64), "mxfp4")})
    with pytest.raises(ValueError, match="metadata"):
        unflatten_state_dict(tensors, {})


def test_other_keys_of_the_metadata_are_ignored() -> None:
    tensors, metadata = flatten_state_dict({"w": quantize(torch.randn(2, 64), "mxfp4")})
    back = unflatten_state_dict(tensors, {**metadata, "format": "pt"})
    assert list(back) == ["w"]


def test_neither_direction_changes_its_arguments() -> None:
    state = OrderedDict(w=quantize(torch.randn(2, 64), "mxfp4"))
    tensors, metadata = flatten_state_dict(state)
    assert list(state) == ["w"]
    before = dict(tensors), dict(metadata)
    unflatten_state_dict(tensors, metadata)
    assert (set(tensors), metadata) == (set(before[0]), before[1])


def test_tied_weights_stay_tied() -> None:
    weight = quantize(torch.randn(4, 64), "mxfp4")
    tensors, metadata = flatten_state_dict({"a": weight, "b": weight})
    assert tensors.keys() == {"a.qdata", "a.scale"}
    assert json.loads(metadata["mxquant"])["aliases"] == {"b": "a"}
    back = unflatten_state_dict(tensors, metadata)
    assert back["b"] is back["a"]


def test_a_tied_name_that_the_tensors_contradict_is_refused() -> None:
    weight = quantize(torch.randn(4, 64), "mxfp4")
    tensors, metadata = flatten_state_dict({"a": weight, "b": weight})
    with pytest.raises(ValueError, match="'b' stands for 'a'"):
        unflatten_state_dict({**tensors, "b": torch.zeros(1)}, metadata)


# What unflatten refuses


def flat(format: str = "nvfp4") -> tuple[dict[str, Tensor], dict[str, str]]:
    return flatten_state_dict({"layer.weight": quantize(torch.randn(4, 64), format)})


@pytest.mark.parametrize("missing", ["qdata", "scale", "per_tensor_scale"])
def test_a_missing_tensor_is_named(missing: str) -> None:
    tensors, metadata = flat()
    del tensors[f"layer.weight.{missing}"]
    with pytest.raises((ValueError, KeyError), match=rf"layer\.weight.*{missing}"):
        unflatten_state_dict(tensors, metadata)


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_an_unknown_version_is_refused(version: object) -> None:
    tensors, metadata = flat()
    document = json.loads(metadata["mxquant"])
    document["version"] = version
    with pytest.raises(ValueError, match=f"(?s)version.*{version}|{version}.*version"):
        unflatten_state_dict(tensors, {"mxquant": json.dumps(document)})


def test_a_file_without_a_version_is_refused() -> None:
    tensors, metadata = flat()
    document = json.loads(metadata["mxquant"])
    del document["version"]
    with pytest.raises(ValueError, match="version"):
        unflatten_state_dict(tensors, {"mxquant": json.dumps(document)})


@pytest.mark.parametrize("text", ["{", "[]", '"x"', "null"])
def test_metadata_that_is_not_the_expected_json_is_refused(text: str) -> None:
    tensors, _ = flat()
    with pytest.raises(ValueError, match="mxquant"):
        unflatten_state_dict(tensors, {"mxquant": text})


@pytest.mark.parametrize(
    "name, damaged",
    [
        ("qdata", torch.zeros(4, 31, dtype=torch.uint8)),
        ("qdata", torch.zeros(4, 32)),
        ("scale", torch.zeros(4, 5, dtype=torch.uint8)),
        ("scale", torch.zeros(4, 4, dtype=torch.bfloat16)),
        ("per_tensor_scale", torch.zeros(3)),
    ],
)
def test_damaged_tensors_are_named(name: str, damaged: Tensor) -> None:
    tensors, metadata = flat()
    with pytest.raises((ValueError, TypeError), match=r"layer\.weight"):
        unflatten_state_dict({**tensors, f"layer.weight.{name}": damaged}, metadata)


@pytest.mark.parametrize("field", ["format", "activation"])
def test_an_unknown_format_in_a_file_is_named(field: str) -> None:
    tensors, metadata = flat()
    document = json.loads(metadata["mxquant"])
    document["tensors"]["layer.weight"][field] = "mxfp5"
    with pytest.raises(ValueError, match="mxfp5"):
        unflatten_state_dict(tensors, {"mxquant": json.dumps(document)})


def test_a_name_that_collides_is_refused() -> None:
    """A plain tensor that already bears a name which a quantized one needs would be overwritten."""
    with pytest.raises(ValueError, match=r"w\.qdata"):
        flatten_state_dict({"w": quantize(torch.randn(2, 64), "mxfp4"), "w.qdata": torch.zeros(1)})
