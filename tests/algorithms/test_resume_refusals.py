"""A folder of saved stages is refused if it is damaged or of another model, config or calibration; nothing changes."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from small_models import snapshot
from torch import Tensor, nn

from algorithms.calibration_models import Block, Model, batches
from mxquant import GPTQ, MXFP4Config, MXTensor, quantize_

ROTATED = MXFP4Config(rotation=32, algorithm="gptq")


def heavier(model: Model) -> None:
    with torch.no_grad():
        model.blocks[2].norm.bias[5] += 1e-3


def with_a_buffer(model: Model) -> None:
    model.register_buffer("table", torch.ones(2), persistent=False)


def of_another_class(model: Model) -> None:
    model.dropout = nn.Identity()  # type: ignore[assignment]


def quantized_and_back(model: Model) -> None:
    from mxquant import dequantize_

    quantize_(model, {"blocks.0": "mxfp4"})
    dequantize_(model)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Model, list[Tensor], Path]:
    """An unquantized model, its batches, and a folder with its first two stages."""
    original, data = Model(), batches()
    quantize_(copy.deepcopy(original), ROTATED, calibration=data, resume=tmp_path)
    for number in (2, 3):
        (tmp_path / f"stage-{number:05}.safetensors").unlink()
    return original, data, tmp_path


def assert_refused(model: nn.Module, config: object, data: Any, folder: Any, message: str) -> None:
    before = snapshot(model)
    with pytest.raises((ValueError, TypeError), match=message):
        quantize_(model, config, calibration=data, resume=folder)
    assert snapshot(model) == before


def of_another_attribute(model: Model) -> None:
    model.blocks[1].norm.eps = 1e-3


def of_another_function(model: Model) -> None:
    model.blocks[1].activation = torch.tanh


def of_another_config(model: Model) -> None:
    model.config = SimpleNamespace(rope={"theta": 5e5}, layers=(1, 2))


@pytest.mark.parametrize(
    "change",
    [
        heavier,
        with_a_buffer,
        of_another_class,
        quantized_and_back,
        of_another_attribute,
        of_another_function,
        of_another_config,
    ],
)
def test_another_model_is_refused(saved: tuple[Model, list[Tensor], Path], change: Callable[[Model], None]) -> None:
    model, data, folder = saved
    change(model)
    assert_refused(model, ROTATED, data, folder, "stage-00000.safetensors was made with another model; call with")


@pytest.mark.parametrize(
    "config",
    [
        MXFP4Config(rotation=32, algorithm=GPTQ(damping=0.02)),
        MXFP4Config(rotation=32, algorithm="gptq", activation=None),
        {"linear": ROTATED, "pooler": None},
    ],
)
def test_another_config_is_refused(saved: tuple[Model, list[Tensor], Path], config: object) -> None:
    model, data, folder = saved
    assert_refused(model, config, data, folder, "was made with another config;")


def test_other_batches_are_refused(saved: tuple[Model, list[Tensor], Path]) -> None:
    model, data, folder = saved
    other = data[1].clone()
    other[0, 0] = (other[0, 0] + 1) % 50
    for changed in (
        [data[0], other, data[2]],
        data[:2],
        data[::-1],
        [(ids,) for ids in data],
        [*data[:2], data[2].int()],
    ):
        assert_refused(model, ROTATED, changed, folder, "was made with another calibration;")
    assert_refused(model, "mxfp8", None, folder, "resume is given, but no config")
    both = {"linear": ROTATED, "pooler": None}
    assert_refused(model, both, data[:2], folder, "another calibration and another config;")


def test_incidental_attributes_do_not_change_the_fingerprint(saved: tuple[Model, list[Tensor], Path]) -> None:
    model, data, folder = saved
    model.eval()
    model.name_or_path = "elsewhere"
    model._private = 7
    quantize_(model, ROTATED, calibration=data, resume=folder)
    assert isinstance(model.pooler.weight, MXTensor)


def test_batches_with_the_same_values_are_the_same(saved: tuple[Model, list[Tensor], Path]) -> None:
    model, data, folder = saved
    strided = [torch.stack([ids, ids], -1)[..., 0] for ids in data]
    quantize_(model, ROTATED, calibration=strided, resume=folder)
    assert isinstance(model.pooler.weight, MXTensor)


def test_a_batch_that_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    data = [{"ids": ids, "scale": 1.0, "extra": [None, "text", object()]} for ids in batches()]
    assert_refused(Model(), ROTATED, data, tmp_path, "holds a object, of which resume cannot tell")


def test_a_batch_that_contains_itself_is_refused(tmp_path: Path) -> None:
    extra: list[Any] = []
    extra.append(extra)
    data = [{"ids": ids, "extra": extra} for ids in batches()]
    assert_refused(Model(), ROTATED, data, tmp_path, "holds a list that contains itself")


@pytest.mark.parametrize("place", ["first code", "last scale", "length", "header"])
def test_a_damaged_file_is_refused(saved: tuple[Model, list[Tensor], Path], place: str) -> None:
    model, data, folder = saved
    file = folder / "stage-00001.safetensors"
    content = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    if place == "length":
        del content[-1]
    elif place == "header":
        content[8 + content[8:start].index(b"mxfp4") + 4] ^= 1  # another name of a format
    else:
        content[start if place == "first code" else -1] ^= 1
    file.write_bytes(content)
    assert_refused(model, ROTATED, data, folder, r"stage-00001.safetensors is .*; delete it, and its stage is computed")
    file.unlink()
    quantize_(model, ROTATED, calibration=data, resume=folder)


def test_files_that_are_no_stages_of_this_call_are_refused(saved: tuple[Model, list[Tensor], Path]) -> None:
    model, data, folder = saved
    first, second = (folder / f"stage-0000{i}.safetensors" for i in (0, 1))
    content = first.read_bytes()
    second.write_bytes(content)
    assert_refused(model, ROTATED, data, folder, "stage-00001.safetensors holds stage 0; give it its name back")
    save_file({"a": torch.ones(2)}, second, {"format": "pt"})
    assert_refused(model, ROTATED, data, folder, "stage-00001.safetensors is no stage that quantize_ saved")
    with safe_open(first, "pt") as handle:
        header, tensors = handle.metadata(), {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    origin = json.loads(header["mxquant.stage"])
    for changed, message in (
        ("{", "is damaged: its header"),
        (json.dumps(origin | {"version of mxquant's algorithm": 0}), "another version of mxquant's algorithm"),
    ):
        save_file(tensors, second, header | {"mxquant.stage": changed})
        assert_refused(model, ROTATED, data, folder, message)


@pytest.mark.parametrize(
    "folder, message",
    [
        (7, "resume is the path of a folder; got 7"),
        ("file", "is a file; name"),
        ("file/below", "no file can be made there .*Not a directory.*; name another folder"),
        ("dangling", "is a symbolic link to nothing; name"),
        pytest.param(
            "/proc/self",
            "no file can be made there",
            marks=pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="a folder that takes no files"),
        ),
    ],
)
def test_a_path_that_is_no_folder_is_refused(tmp_path: Path, folder: Any, message: str) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    if isinstance(folder, str):
        folder = tmp_path / folder
    assert_refused(Model(Block, 1), ROTATED, batches(), folder, message)
