"""`save_state`: the same bytes for the same producer, the same values for others, refusals, all or nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from checkpoints.recorded import NAMES, folder, producer_of, tensors
from mxquant import MXTensor, flatten_state_dict, load_state, quantize, save_state
from mxquant.checkpoints import writable_producers
from mxquant.scheme import Scheme


def assert_same_bytes(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(actual[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def assert_same_state(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert isinstance(actual[name], MXTensor) == isinstance(tensor, MXTensor), name
        if isinstance(tensor, MXTensor):
            assert actual[name].metadata == tensor.metadata, name
            for ours, theirs in zip(actual[name].operand, tensor.operand, strict=True):
                assert (ours is None) == (theirs is None), name
                assert ours is None or torch.equal(ours, theirs), name
        else:
            assert torch.equal(actual[name], tensor), name


def header(at: Path) -> dict[str, str]:
    with safe_open(at / "model.safetensors", "pt") as file:
        return dict(file.metadata())


def weight(fmt: str = "mxfp4", **options: Any) -> MXTensor:
    return quantize(torch.randn(4, 64, dtype=torch.bfloat16), fmt, **options)


def experts() -> MXTensor:
    return quantize(torch.randn(2, 64, 8, dtype=torch.bfloat16), "mxfp4", axis=-2)


def name_of_case(value: Any) -> str:
    """Of values that differ at each import, their type: pytest-xdist wants equal names in every process."""
    return value if isinstance(value, str) else getattr(value, "__name__", type(value).__name__)


STATES: dict[str, dict[str, Tensor]] = {
    "mxquant": {"a.weight": weight("mxfp6_e3m2").with_activation("mxfp8"), "e.down_proj": experts()},
    "compressed-tensors": {
        "a.weight": weight(),
        "b.weight": weight().with_activation("mxfp4"),
        "c.weight": weight("nvfp4", per_tensor_scale=torch.tensor(0.25)),
    },
    "quark": {"a.weight": weight(), "b.weight": weight("mxfp6_e2m3").with_activation("mxfp4")},
    "modelopt": {"a.weight": weight("nvfp4").with_activation("nvfp4", scale=torch.tensor(0.5))},
    "gpt-oss": {"e.down_proj": experts(), "e.gate_up_proj": experts()},
}


def test_every_writable_producer_is_covered() -> None:
    assert set(STATES) == set(writable_producers())


@pytest.mark.parametrize("producer", STATES)
def test_load_state_returns_what_was_saved(producer: str, tmp_path: Path) -> None:
    state = STATES[producer] | {"norm.weight": torch.randn(4), "head.weight": torch.randn(3, 4)}
    save_state(state, tmp_path / "saved", producer)
    assert_same_state(load_state(tmp_path / "saved"), state)


@pytest.mark.parametrize("producer", STATES)
def test_saving_again_gives_the_same_files(producer: str, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    save_state(STATES[producer] | {"norm.weight": torch.randn(4)}, first, producer)
    save_state(load_state(first), second, producer)
    assert_same_bytes(load_file(second / "model.safetensors"), load_file(first / "model.safetensors"))
    assert header(second) == header(first)
    configs = [{file.name: file.read_bytes() for file in at.glob("*.json")} for at in (first, second)]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_checkpoint_keeps_its_bytes(name: str, tmp_path: Path) -> None:
    state = load_state(folder(name))
    save_state(state, tmp_path / "saved", producer_of(name), source=folder(name))
    assert_same_bytes(load_file(tmp_path / "saved" / "model.safetensors"), tensors(name))
    saved, recorded = (json.loads((at / "config.json").read_text()) for at in (tmp_path / "saved", folder(name)))
    assert saved == recorded
    # NOTE: without the source a divisor may be another one of equal reciprocal.
    save_state(state, tmp_path / "alone", producer_of(name))
    assert_same_state(load_state(tmp_path / "alone"), state)


def test_source_restores_what_tensors_do_not_tell(tmp_path: Path) -> None:
    """A divisor that is not the nearest one, a KV cache's scale, the config; not for a changed weight."""
    divisor = torch.tensor([490.0])  # 490 + 2^-15 has the same reciprocal, and is the nearest to its inverse
    source = tmp_path / "source"
    save_state({"a.weight": weight("nvfp4", per_tensor_scale=1 / divisor[0])}, source, "compressed-tensors")
    stored = load_file(source / "model.safetensors")
    assert not torch.equal(stored["a.weight_global_scale"], divisor)
    stored["a.weight_global_scale"] = divisor
    stored["attention.k_scale"] = torch.tensor(0.5)
    save_file(stored, source / "model.safetensors")
    config = json.loads((source / "config.json").read_text()) | {"model_type": "llama"}
    config["quantization_config"]["version"] = "0.20"
    (source / "config.json").write_text(json.dumps(config))
    loaded = load_state(source)
    save_state(loaded, tmp_path / "same", "compressed-tensors", source=source)
    assert_same_bytes(load_file(tmp_path / "same" / "model.safetensors"), stored)
    assert json.loads((tmp_path / "same" / "config.json").read_text()) == config
    save_state({"a.weight": weight()}, tmp_path / "other", "compressed-tensors", source=source)
    changed = json.loads((tmp_path / "other" / "config.json").read_text())
    assert changed["model_type"] == "llama"
    assert "version" not in changed["quantization_config"]


def test_another_producer_holds_the_same_values(tmp_path: Path) -> None:
    state = {"a.weight": weight().with_activation("mxfp4"), "bias": torch.randn(3)}
    save_state(state, tmp_path / "quark", "quark")
    save_state(load_state(tmp_path / "quark"), tmp_path / "ct", "compressed-tensors", source=tmp_path / "quark")
    assert_same_state(load_state(tmp_path / "ct"), state)


@pytest.mark.parametrize("producer", ["quark", "compressed-tensors"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_config_names_the_dtype_that_files_do_not(producer: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """bf16 is what loaders take otherwise, and rounds NVFP4's values."""
    state = {"a.weight": quantize(torch.randn(8, 64).to(dtype), "nvfp4", per_tensor_scale=torch.tensor(0.25))}
    save_state(state, tmp_path / "saved", producer)
    assert_same_state(load_state(tmp_path / "saved"), state)
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config.get("dtype") == (None if dtype == torch.bfloat16 else str(dtype).removeprefix("torch."))


def test_weights_of_two_dtypes_are_refused_where_files_have_one(tmp_path: Path) -> None:
    state = {"a.weight": weight(), "b.weight": quantize(torch.randn(4, 64), "mxfp4")}
    with pytest.raises(
        NotImplementedError, match=r"'b\.weight' is torch\.float32 and would be loaded as torch\.bfloat16"
    ):
        save_state(state, tmp_path / "saved", "quark")
    assert not (tmp_path / "saved").exists()
    save_state(state, tmp_path / "saved", "mxquant")
    assert_same_state(load_state(tmp_path / "saved"), state)


def test_an_existing_folder_keeps_what_its_config_says_of_the_model(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama", "quantization_config": {"quant_method": "other"}}')
    save_state({"a.weight": weight()}, path, "quark")
    config = json.loads((path / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["quantization_config"]["quant_method"] == "quark"


@pytest.mark.parametrize("size", ["5GB", None, 1.5, True])
def test_a_shard_size_is_an_integer(size: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="as an integer"):
        save_state({"a.weight": weight()}, tmp_path / "saved", max_shard_bytes=size)
    assert not list(tmp_path.iterdir())


def test_a_dtype_that_safetensors_lacks_is_refused_by_name(tmp_path: Path) -> None:
    state = {"a.weight": weight(), "phase": torch.zeros(2, dtype=torch.complex128)}
    with pytest.raises(TypeError, match=r"'phase' is torch\.complex128"):
        save_state(state, tmp_path / "saved")


def test_native_files_are_those_of_flatten_state_dict(tmp_path: Path) -> None:
    shared = weight("nvfp4")
    state = {"a.weight": shared, "tied.weight": shared, "bias": torch.randn(3)}
    flat, metadata = flatten_state_dict(state)
    save_state(state, tmp_path / "saved")
    assert_same_bytes(load_file(tmp_path / "saved" / "model.safetensors"), flat)
    assert header(tmp_path / "saved") == {"format": "pt"} | metadata
    loaded = load_state(tmp_path / "saved")
    assert loaded["tied.weight"] is loaded["a.weight"]


def test_other_producers_store_tied_tensors_under_each_name(tmp_path: Path) -> None:
    shared, table = weight(), torch.randn(4, 64)
    state = {"a.weight": shared, "b.weight": shared, "head.weight": table, "embed.weight": table}
    save_state(state, tmp_path / "saved", "quark")
    assert_same_state(load_state(tmp_path / "saved"), state)


def test_views_of_one_memory_are_written_each(tmp_path: Path) -> None:
    table = torch.randn(4, 64)
    views = {"table": table, "flat": table.flatten(), "transposed": table.T, "row": table[1]}
    save_state({"a.weight": weight(), **views}, tmp_path / "saved")
    loaded = load_state(tmp_path / "saved")
    for name, view in views.items():
        assert torch.equal(loaded[name], view)


def test_shards_hold_whole_weights_and_aliases(tmp_path: Path) -> None:
    state: dict[str, Tensor] = {f"{i}.weight": weight() for i in range(4)}
    state |= {"tied.weight": state["2.weight"], "norm.weight": torch.randn(64)}
    save_state(state, tmp_path / "saved", max_shard_bytes=200)
    assert len(list((tmp_path / "saved").glob("model-*-of-00005.safetensors"))) == 5
    assert_same_state(load_state(tmp_path / "saved"), state)


@pytest.mark.parametrize(
    "state, producer, error, named",
    [
        ([weight()], "mxquant", TypeError, "a dict of tensors; got list"),
        (nn.Linear(2, 2), "mxquant", TypeError, "got Linear"),
        ({"a.weight": weight(), "b": 3}, "mxquant", TypeError, "'b': int"),
        ({0: weight()}, "mxquant", TypeError, "0: MXTensor"),
        ({"a.weight": weight()}, "gguf", ValueError, "'gguf' is unknown"),
        ({"a.weight": weight()}, "torchao", NotImplementedError, "read, not written"),
        ({"a.weight": torch.randn(4, 64)}, "mxquant", ValueError, "none of the tensors is quantized"),
        ({"a.weight": weight().to("meta")}, "mxquant", ValueError, "device 'meta'"),
        ({"a.weight": weight(), "b": torch.eye(2).to_sparse()}, "mxquant", ValueError, "sparse_coo"),
        ({"a.weight": weight(), "e": experts()}, "quark", NotImplementedError, "a stack of experts would be lost"),
        ({"a.weight": weight("mxfp6_e3m2")}, "compressed-tensors", NotImplementedError, "its codes would be lost"),
        (
            {"a.weight": weight(), "a.weight.qdata": torch.ones(1)},
            "mxquant",
            ValueError,
            "two tensors would",
        ),
        (
            {"a.weight": weight(), "b.weight_packed": torch.ones(1)},
            "quark",
            ValueError,
            "to no quantized weight",
        ),
    ],
    ids=name_of_case,
)
def test_bad_input_is_refused_with_nothing_written(
    state: Any, producer: str, error: type[Exception], named: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=named):
        save_state(state, tmp_path / "saved", producer)
    assert not any(tmp_path.iterdir())


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    with pytest.raises(FileExistsError, match="is a file"):
        save_state({"a.weight": weight()}, tmp_path / "file")
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [("file", "text")]


def test_a_failed_save_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    save_state({"a.weight": weight()}, tmp_path / "saved")
    before = {file.name: file.read_bytes() for file in (tmp_path / "saved").iterdir()}
    with pytest.raises(NotImplementedError):
        save_state({"e": experts()}, tmp_path / "saved", "quark")
    with pytest.raises(FileNotFoundError):
        save_state({"a.weight": weight()}, tmp_path / "saved", source=tmp_path / "nowhere")
    assert {file.name: file.read_bytes() for file in (tmp_path / "saved").iterdir()} == before


def test_an_interrupted_save_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state: dict[str, Tensor] = {f"{i}.weight": weight() for i in range(4)}
    save_state(state, tmp_path / "saved")
    before = {file.name: file.read_bytes() for file in (tmp_path / "saved").iterdir()}
    shards = []

    def interrupted(*arguments: Any) -> None:
        shards.append(arguments)
        if len(shards) > 2:
            raise KeyboardInterrupt
        save_file(*arguments)

    monkeypatch.setattr("safetensors.torch.save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_state(state, tmp_path / "saved", "quark", max_shard_bytes=200)
    assert [file.name for file in tmp_path.iterdir()] == ["saved"]
    assert {file.name: file.read_bytes() for file in (tmp_path / "saved").iterdir()} == before


def test_written_files_have_default_permissions(tmp_path: Path) -> None:
    save_state({f"{i}.weight": weight() for i in range(2)}, tmp_path / "saved", max_shard_bytes=200)
    (tmp_path / "plain").write_text("")
    modes = {file.name: file.stat().st_mode for file in (tmp_path / "saved").iterdir()}
    assert len(modes) == 4
    assert set(modes.values()) == {(tmp_path / "plain").stat().st_mode}, modes


def test_a_checkpoint_may_be_saved_over_itself(tmp_path: Path) -> None:
    state = {"a.weight": weight(), "norm.weight": torch.randn(4)}
    save_state(state, tmp_path / "saved", "quark")
    loaded = load_state(tmp_path / "saved")
    save_state(loaded, tmp_path / "saved", "compressed-tensors", source=tmp_path / "saved")
    assert_same_state(loaded, state)
    assert_same_state(load_state(tmp_path / "saved"), state)
    assert load_state(tmp_path / "saved")["a.weight"].metadata.scheme == Scheme("mxfp4")
