"""Damaged and hostile files: each is refused with a reason, before anything large is allocated, and nothing hangs."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from mxquant import flatten_state_dict, load_state, quantize
from mxquant.checkpoints.files import INDEX, WEIGHTS

REFUSALS = (ValueError, NotImplementedError, FileNotFoundError)
Files = dict[str, bytes]

CT = {
    "quant_method": "compressed-tensors",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "float", "group_size": 32, "dynamic": False},
            "input_activations": None,
        }
    },
    "ignore": [],
}
SPEC = {
    "dtype": "fp4",
    "qscheme": "per_group",
    "group_size": 32,
    "scale_format": "e8m0",
    "is_dynamic": False,
    "scale_calculation_mode": "even",
}
QUARK = {"quant_method": "quark", "global_quant_config": {"weight": SPEC, "input_tensors": None}, "exclude": []}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": []}


def safetensors_bytes(tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    from safetensors.torch import save

    return save(tensors, metadata)


def parts(fmt: str = "mxfp4") -> tuple[Tensor, Tensor]:
    weight = quantize(torch.linspace(-1, 1, 4 * 64).reshape(4, 64), fmt)
    return weight.qdata, weight.scale


def valid(producer: str) -> Files:
    """The files of a tiny checkpoint."""
    qdata, scale = parts()
    plain = {"norm.weight": torch.ones(4)}
    if producer == "mxquant":
        flat, metadata = flatten_state_dict({"a.weight": quantize(torch.linspace(-1, 1, 256).reshape(4, 64), "nvfp4")})
        return {WEIGHTS: safetensors_bytes(flat | plain, metadata)}
    if producer == "gpt-oss":
        blocks = torch.stack([qdata, qdata]).unflatten(-1, (-1, 16)).contiguous()
        tensors = {"e.down_proj_blocks": blocks, "e.down_proj_scales": torch.stack([scale, scale])}
        config: dict[str, Any] = {"quant_method": "mxfp4"}
    elif producer == "modelopt":
        config = MODELOPT
        qdata, scale = parts("nvfp4")
        one = torch.tensor(0.5)
        tensors = {"a.weight": qdata, "a.weight_scale": scale.view(torch.float8_e4m3fn)}
        tensors |= {"a.weight_scale_2": one, "a.input_scale": one.clone()}
    else:
        config = QUARK if producer == "quark" else CT
        name = "weight" if producer == "quark" else "weight_packed"
        tensors = {f"a.{name}": qdata, "a.weight_scale": scale}
    document = json.dumps({"model_type": "llama", "quantization_config": config}).encode()
    return {"config.json": document, WEIGHTS: safetensors_bytes(tensors | plain)}


def sharded() -> Files:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    return {
        INDEX: json.dumps(index).encode(),
        "model-1.safetensors": safetensors_bytes({"a": torch.ones(8)}),
        "model-2.safetensors": safetensors_bytes({"b": torch.ones(8)}),
    }


KINDS: dict[str, Callable[[], Files]] = {
    name: (lambda name=name: valid(name))  # type: ignore[misc]
    for name in ("mxquant", "compressed-tensors", "quark", "modelopt", "gpt-oss")
} | {"shards": sharded}


def put(files: Files, at: Path) -> Path:
    at.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (at / name).write_bytes(content)
    return at


@pytest.mark.parametrize("kind", KINDS)
def test_undamaged_checkpoints_are_read(kind: str, tmp_path: Path) -> None:
    """The control: what is refused below is refused for its damage."""
    assert load_state(put(KINDS[kind](), tmp_path))


def with_tensors(producer: str, change: Callable[[dict[str, Tensor]], Any]) -> Files:
    from safetensors.torch import load

    files = valid(producer)
    tensors = load(files[WEIGHTS])
    metadata = json.loads(files[WEIGHTS][8 : 8 + struct.unpack("<Q", files[WEIGHTS][:8])[0]]).get("__metadata__")
    change(tensors)
    return files | {WEIGHTS: safetensors_bytes(tensors, metadata)}


CHANGED = {
    "no codes": ("compressed-tensors", lambda t: t.pop("a.weight_packed"), "belongs to no quantized weight"),
    "no scales": ("compressed-tensors", lambda t: t.pop("a.weight_scale"), "'a.weight_scale' is missing"),
    "no scales of Quark": ("quark", lambda t: t.pop("a.weight_scale"), "'a.weight_scale' is missing"),
    "no blocks": ("gpt-oss", lambda t: t.pop("e.down_proj_blocks"), "belongs to no quantized weight"),
    "no static scale": ("modelopt", lambda t: t.pop("a.input_scale"), "'a.input_scale' is missing"),
    "no metadata of it": ("mxquant", lambda t: t.pop("a.weight.qdata"), "'a.weight.qdata' is missing"),
    "bf16 in a packed slot": (
        "compressed-tensors",
        lambda t: t.update({"a.weight_packed": torch.ones(4, 32, dtype=torch.bfloat16)}),
        "is BF16; for mxfp4 it is U8",
    ),
    "bf16 scales": (
        "compressed-tensors",
        lambda t: t.update({"a.weight_scale": torch.ones(4, 2, dtype=torch.bfloat16)}),
        "is BF16; for mxfp4 it is U8 or F8_E8M0",
    ),
    "scales of another shape": (
        "quark",
        lambda t: t.update({"a.weight_scale": torch.ones(4, 3, dtype=torch.uint8)}),
        r"has scales \(4, 2\)",
    ),
    "codes of one axis": (
        "quark",
        lambda t: t.update({"a.weight": torch.ones(128, dtype=torch.uint8)}),
        "rows, bytes",
    ),
    "a zero per-tensor scale": (
        "modelopt",
        lambda t: t.update({"a.weight_scale_2": torch.tensor(0.0)}),
        "positive and finite",
    ),
    "an infinite static scale": (
        "modelopt",
        lambda t: t.update({"a.input_scale": torch.tensor(torch.inf)}),
        "positive and finite",
    ),
    "twice": (
        "compressed-tensors",
        lambda t: t.update({"a.weight": torch.ones(4, 64)}),
        "there both as it is and as",
    ),
    "codes nobody explains": (
        "quark",
        lambda t: t.update({"norm.weight": torch.ones(4, 4).to(torch.float8_e5m2)}),
        "'norm.weight_scale' is missing|no scales say",
    ),
}


@pytest.mark.parametrize("what", CHANGED)
def test_error_names_the_damaged_tensor(what: str, tmp_path: Path) -> None:
    producer, change, named = CHANGED[what]
    with pytest.raises(ValueError, match=named):
        load_state(put(with_tensors(producer, change), tmp_path))


def test_codes_in_an_unquantized_checkpoint_are_refused(tmp_path: Path) -> None:
    save_file({"a.weight": torch.ones(4, 4, dtype=torch.uint8)}, tmp_path / WEIGHTS)
    with pytest.raises(ValueError, match=r"'a\.weight' is U8, part of a quantized weight, but no config\.json"):
        load_state(tmp_path)


# Files and indexes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", [0, 4, 8, 40, -1])
def test_a_truncated_file_is_refused(kind: str, cut: int, tmp_path: Path) -> None:
    files = KINDS[kind]()
    name = max(name for name in files if name.endswith(".safetensors"))
    put(files | {name: files[name][:cut]}, tmp_path)
    with pytest.raises(ValueError, match="is no intact safetensors file"):
        load_state(tmp_path)


def header(content: dict[str, Any]) -> bytes:
    text = json.dumps(content).encode()
    return struct.pack("<Q", len(text)) + text


ABSURD = {
    "a header of exabytes": struct.pack("<Q", 1 << 62) + b"{}",
    "a tensor of terabytes": header({"w": {"dtype": "F32", "shape": [1 << 20, 1 << 20], "data_offsets": [0, 1 << 42]}}),
    "sizes that overflow": header({"w": {"dtype": "F32", "shape": [1 << 40] * 2, "data_offsets": [0, 4]}}) + b"1234",
    "a negative size": header({"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}) + b"1234",
    "tensors over one another": header(
        {
            "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
            "b": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]},
        }
    )
    + b"123456",
    "an unknown dtype": header({"w": {"dtype": "X9", "shape": [4], "data_offsets": [0, 4]}}) + b"1234",
    "no JSON": struct.pack("<Q", 4) + b"{{{{",
}


@pytest.mark.parametrize("what", ABSURD)
def test_impossible_header_is_refused_without_allocating(what: str, tmp_path: Path) -> None:
    (tmp_path / WEIGHTS).write_bytes(ABSURD[what])
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="is no intact safetensors file"):
            load_state(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "file", ["../secret.safetensors", "/etc/secret.safetensors", "a/b.safetensors", "..\\b.safetensors", "model.bin", 3]
)
def test_index_cannot_name_files_elsewhere(file: Any, tmp_path: Path) -> None:
    put(sharded() | {INDEX: json.dumps({"weight_map": {"a": file}}).encode()}, tmp_path / "in")
    save_file({"a": torch.ones(2)}, tmp_path / "secret.safetensors")
    with pytest.raises(ValueError, match="only safetensors files beside the index"):
        load_state(tmp_path / "in")


@pytest.mark.parametrize(
    "index, named",
    [
        ({"weight_map": {"a": "model-1.safetensors"}}, None),
        ({"weight_map": {"a": "model-1.safetensors", "b": "model-1.safetensors"}}, "which does not have it"),
        ({"weight_map": {"a": "model-1.safetensors", "b": "model-3.safetensors"}}, "which is missing"),
        ({"weight_map": {}}, "no weight_map"),
        ({}, "no weight_map"),
        ([], "no JSON object"),
    ],
)
def test_index_that_contradicts_the_files_is_refused(index: Any, named: str | None, tmp_path: Path) -> None:
    files = sharded() | {INDEX: json.dumps(index).encode()}
    if named is None:  # one file, but with a tensor that the index does not list
        files["model-1.safetensors"] = safetensors_bytes({"a": torch.ones(2), "x": torch.ones(2)})
        named = "which the index does not list"
    with pytest.raises(ValueError, match=named):
        load_state(put(files, tmp_path))


def test_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    both = {"model-2.safetensors": safetensors_bytes({"a": torch.ones(2), "b": torch.ones(2)})}
    with pytest.raises(ValueError, match=r"'a' is both in model-1\.safetensors and in model-2\.safetensors"):
        load_state(put(sharded() | both, tmp_path))


def test_duplicate_key_in_an_index_is_refused(tmp_path: Path) -> None:
    text = b'{"weight_map": {"a": "model-1.safetensors", "a": "model-2.safetensors"}}'
    with pytest.raises(ValueError, match="'a' is there twice"):
        load_state(put(sharded() | {INDEX: text}, tmp_path))


def test_pickles_are_never_read(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="is a pickle, which is never read"):
        load_state(tmp_path)


def test_missing_checkpoint_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="neither a folder nor a file"):
        load_state(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"huggingface_hub\.snapshot_download"):
        load_state("organization/model-of-the-hub")
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor"):
        load_state(tmp_path)


# Fuzz: 500 files

COUNT = 500


@st.composite
def damaged(draw: st.DrawFn) -> Files:
    """One of the checkpoints with a file cut or overwritten here and there, or well-formed with other values in its
    config, its index, the header of its tensors, or what mxquant writes there.
    """
    files = dict(KINDS[draw(st.sampled_from(sorted(KINDS)))]())
    name = draw(st.sampled_from(sorted(files)))
    if draw(st.sampled_from(["bytes", "values", "values"])) == "bytes":
        return files | {name: draw(_overwritten(files[name]))}
    if name.endswith(".json"):
        return files | {name: json.dumps(draw(_documents(json.loads(files[name])))).encode()}
    end = 8 + struct.unpack("<Q", files[name][:8])[0]
    content, data = json.loads(files[name][8:end]), files[name][end:]
    metadata = content.get("__metadata__", {})
    if "mxquant" in metadata and draw(st.booleans()):
        metadata["mxquant"] = json.dumps(draw(_documents(json.loads(metadata["mxquant"]))))
    else:
        content = draw(_documents(content))
    return files | {name: header(content) + data}


@st.composite
def _overwritten(draw: st.DrawFn, content: bytes) -> bytes:
    damaged = bytearray(content)
    at = draw(st.integers(0, len(damaged) - 1))
    how = draw(st.sampled_from(["cut", "insert", "flip"]))
    if how == "cut":
        return bytes(damaged[:at])
    damaged[at : at + (how == "flip")] = draw(st.binary(min_size=1, max_size=8))
    return bytes(damaged)


DTYPES = ["U8", "F32", "BF16", "F8_E4M3", "F8_E8M0", "I64", "F4"]
NAMES = ["a.weight", "a.weight_scale", "a.weight.scale", "norm.weight", "b", "mxfp4", "nvfp4", "group", "weight"]


def _documents(document: Any) -> st.SearchStrategy[Any]:
    """The document with one value or key, somewhere inside, replaced or gone."""
    values = st.none() | st.booleans() | st.integers(-3, 1 << 40) | st.just([]) | st.just({}) | st.just([4, 32])
    values |= st.sampled_from(DTYPES) | st.sampled_from(NAMES) | st.text(max_size=3)
    if isinstance(document, list) and document:
        place = st.integers(0, len(document) - 1)
        return values | place.flatmap(
            lambda i: _documents(document[i]).map(lambda value: [*document[:i], value, *document[i + 1 :]])
        )
    if not isinstance(document, dict) or not document:
        return values

    def inside(key: str) -> st.SearchStrategy[Any]:
        rest = {k: v for k, v in document.items() if k != key}
        renamed = st.sampled_from(NAMES).map(lambda name: {name: document[key]} | rest)
        replaced = _documents(document[key]).map(lambda value: document | {key: value})
        return st.one_of(replaced, replaced, replaced, renamed, st.just(rest))

    return st.sampled_from(sorted(document)).flatmap(inside)


@settings(
    max_examples=COUNT,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(files=damaged())
def test_fuzzed_files_are_read_or_refused(files: Files, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No other error, and no allocation beyond twice the files and what the interpreter's own objects take."""
    folder = put(files, tmp_path_factory.mktemp("fuzzed"))
    size = sum(map(len, files.values()))
    try:
        state = load_state(folder)
    except REFUSALS:
        return
    held = sum(tensor.nbytes for tensor in state.values())
    assert held <= 2 * size
    for tensor in state.values():
        values = tensor.dequantize() if hasattr(tensor, "qdata") else tensor
        assert values.shape == tensor.shape
