"""A calibration that was stopped goes on after its last finished stage, to the bytes of one that was not.

It is stopped wherever it solves a matrix, and every way of damaging or confusing what it left is refused.
"""

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

from algorithms.calibration_models import Block, Model, MoEBlock, Unchained, batches
from mxquant import GPTQ, MXFP4Config, MXTensor, NVFP4Config, flatten_state_dict, load_state, quantize_
from mxquant.algorithms import calibrate, resume

ROTATED = MXFP4Config(rotation=32, algorithm="gptq")
MODELS = {"dense": Model, "experts": lambda: Model(MoEBlock), "one stage": Unchained}


class Stopped(Exception):
    pass


def stop_after(monkeypatch: pytest.MonkeyPatch, module: Any, function: str, count: int | None) -> list[None]:
    """Let a function of `module` work so many times (None: always), then raise; the calls that worked."""
    work, calls = getattr(module, function), []

    def counted(*args: Any, **kwargs: Any) -> Any:
        if len(calls) == count:
            raise Stopped
        calls.append(None)
        return work(*args, **kwargs)

    monkeypatch.setattr(module, function, counted)
    return calls


def bytes_of(model: nn.Module) -> dict[str, Tensor]:
    return flatten_state_dict(model.state_dict())[0]


def assert_same(model: nn.Module, other: nn.Module) -> None:
    one, two = bytes_of(model), bytes_of(other)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    for (_, a), (_, b) in zip(model.named_parameters(), other.named_parameters()):
        assert type(a) is type(b)
        assert a.requires_grad == b.requires_grad
        assert not isinstance(a, MXTensor) or a.metadata == b.metadata  # type: ignore[attr-defined]


def mapping(sequential: bool) -> dict[str, object]:
    """All that the saved form has to carry: a rotation, a per-tensor scale, activations, a layer rounded to nearest."""
    algorithm = GPTQ(sequential=sequential, min_tokens=16)
    return {
        "blocks": MXFP4Config(rotation=32, algorithm=algorithm),
        "blocks.1": NVFP4Config(algorithm=algorithm, activation=None),
        "pooler": "mxfp8",
        "lm_head": MXFP4Config(activation="mxfp8", algorithm=algorithm),
    }


@pytest.mark.parametrize("sequential", [True, False])
@pytest.mark.parametrize("kind", MODELS)
def test_it_goes_on_wherever_it_was_stopped(
    kind: str, sequential: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, data = MODELS[kind](), batches()
    uninterrupted = copy.deepcopy(original)
    with monkeypatch.context() as patch:
        solved = stop_after(patch, calibrate, "gptq", None)
        quantize_(uninterrupted, mapping(sequential), calibration=data)
    work = []
    for count in range(len(solved)):
        folder = tmp_path / str(count)
        with monkeypatch.context() as patch:
            stop_after(patch, calibrate, "gptq", count)
            with pytest.raises(Stopped):
                quantize_(copy.deepcopy(original), mapping(sequential), calibration=data, resume=folder)
        model = copy.deepcopy(original)
        with monkeypatch.context() as patch:
            again = stop_after(patch, calibrate, "gptq", None)
            quantize_(model, mapping(sequential), calibration=data, resume=folder)
        assert_same(model, uninterrupted)
        work.append(len(again))
    assert work[0] == len(solved)
    assert work == sorted(work, reverse=True)
    if kind != "one stage":
        assert work[-1] < len(solved) / 3  # one block of three, or what is outside of them


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_models_of_transformers_go_on(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from small_transformers import IDS
    from small_transformers import MODELS as TRANSFORMERS

    original, data = TRANSFORMERS[kind](), [{"input_ids": IDS}, {"input_ids": IDS + 7}]
    config = MXFP4Config(rotation=32, algorithm=GPTQ(min_tokens=1))
    with monkeypatch.context() as patch:
        first, expected = stop_after(patch, calibrate, "gptq", None), copy.deepcopy(original)
        quantize_(expected, config, calibration=data)
    with monkeypatch.context() as patch:
        stop_after(patch, calibrate, "gptq", len(first) - 1)
        with pytest.raises(Stopped):
            quantize_(copy.deepcopy(original), config, calibration=data, resume=tmp_path)
    again = stop_after(monkeypatch, calibrate, "gptq", None)
    quantize_(original, config, calibration=data, resume=tmp_path)
    assert_same(original, expected)
    assert len(again) == len(first) / 2  # the second of two blocks


def test_what_is_finished_is_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, data = Model(), batches()
    first, second = copy.deepcopy(original), copy.deepcopy(original)
    quantize_(first, ROTATED, calibration=data, resume=tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [f"stage-{i:05}.safetensors" for i in range(4)]
    stop_after(monkeypatch, calibrate, "gptq", 0)
    quantize_(second, ROTATED, calibration=iter(data), resume=str(tmp_path))
    assert_same(first, second)


def test_a_stage_is_an_ordinary_checkpoint(tmp_path: Path) -> None:
    model = Model(MoEBlock)
    quantize_(model, ROTATED, calibration=batches(), resume=tmp_path / "new" / "folder")
    stored = load_state(tmp_path / "new" / "folder" / "stage-00001.safetensors")
    assert set(stored) == {"blocks.1.experts.up", "blocks.1.experts.down"}
    assert torch.equal(stored["blocks.1.experts.up"].qdata, model.blocks[1].experts.up.qdata)


def test_a_file_that_was_being_written_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, data = Model(), batches()
    with monkeypatch.context() as patch:
        stop_after(patch, resume.os, "fsync", 1)
        with pytest.raises(Stopped):
            quantize_(copy.deepcopy(original), ROTATED, calibration=data, resume=tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["stage-00000.safetensors"]
    (tmp_path / "stage-00001.0123.part").write_bytes(b"of a process that was killed")
    model, expected = copy.deepcopy(original), copy.deepcopy(original)
    quantize_(expected, ROTATED, calibration=data)
    quantize_(model, ROTATED, calibration=data, resume=tmp_path)
    assert_same(model, expected)


def test_two_may_write_one_stage_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second writes all of it while the first is writing."""
    model, fsync = Model(Block, 1), resume.os.fsync
    quantize_(model, {"pooler": "mxfp4"})
    weights = {"pooler.weight": model.pooler.weight}
    first, second = (resume.SavedStages(tmp_path, {}) for _ in range(2))

    def meanwhile(descriptor: int) -> None:
        fsync(descriptor)
        monkeypatch.setattr(resume.os, "fsync", fsync)
        second.write(0, weights)

    monkeypatch.setattr(resume.os, "fsync", meanwhile)
    first.write(0, weights)
    assert 0 in first
    assert 0 in second
    assert [file.name for file in tmp_path.iterdir()] == ["stage-00000.safetensors"]
    assert torch.equal(first.read(0)["pooler.weight"].qdata, model.pooler.weight.qdata)


def test_the_home_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    quantize_(Model(Block, 1), ROTATED, calibration=batches(), resume="~/new")
    assert len(list((tmp_path / "new").iterdir())) == 2


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_tensors_without_plain_values_are_told_apart(tmp_path: Path) -> None:
    """Parameters on the meta device, which nothing uses, by their shapes; sparse buffers by what they hold."""
    data, eye = batches(), torch.eye(4)

    def make(spare: int, mask: Tensor, rows: Tensor) -> Model:
        torch.manual_seed(0)
        model = Model(Block, 1)
        model.register_parameter("spare", nn.Parameter(torch.empty(spare, device="meta")))
        model.register_buffer("mask", mask.to_sparse(), persistent=False)
        model.register_buffer("rows", rows.to_sparse_csr(), persistent=False)
        return model

    model, again = make(7, eye, eye), make(7, eye, eye)
    quantize_(model, ROTATED, calibration=data, resume=tmp_path)
    for other in (make(8, eye, eye), make(7, 2 * eye, eye), make(7, eye, eye.flip(0))):
        with pytest.raises(ValueError, match="was made with another model;"):
            quantize_(other, ROTATED, calibration=data, resume=tmp_path)
    quantize_(again, ROTATED, calibration=data, resume=tmp_path)
    assert_same(again.blocks, model.blocks)


def test_a_stage_whose_file_is_deleted_is_computed_again(tmp_path: Path) -> None:
    original, data = Model(), batches()
    first, second = copy.deepcopy(original), copy.deepcopy(original)
    quantize_(first, ROTATED, calibration=data, resume=tmp_path)
    (tmp_path / "stage-00001.safetensors").unlink()
    quantize_(second, ROTATED, calibration=data, resume=tmp_path)
    assert_same(first, second)


def test_the_log_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stop_after(monkeypatch, calibrate, "gptq", 4)
    with pytest.raises(Stopped):
        quantize_(Model(), ROTATED, calibration=batches(), resume=tmp_path)
    assert "stopped at blocks.1.down.weight: 6 of 10 weights" in caplog.text
    assert f"load the model anew and make the same call; 2 stages are saved in {tmp_path}" in caplog.text


# Refusals


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
    """A model as it was, the batches, and what is left after its first two stages."""
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


def test_what_changes_nothing_of_a_model_is_no_other_model(saved: tuple[Model, list[Tensor], Path]) -> None:
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
def test_what_is_no_folder_is_refused(tmp_path: Path, folder: Any, message: str) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    if isinstance(folder, str):
        folder = tmp_path / folder
    assert_refused(Model(Block, 1), ROTATED, batches(), folder, message)
