"""A resumed calibration starts after its last finished stage and gives the bytes of one that was not stopped.

It is stopped wherever it solves a matrix.
"""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from algorithms.calibration_models import Block, Model, MoEBlock, Stopped, Unchained, batches, stop_after
from mxquant import GPTQ, MXFP4Config, MXTensor, NVFP4Config, flatten_state_dict, load_state, quantize_
from mxquant.algorithms import calibrate, resume

ROTATED = MXFP4Config(rotation=32, algorithm="gptq")
MODELS = {"dense": Model, "experts": lambda: Model(MoEBlock), "one stage": Unchained}


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
    """What saved stages must hold: a rotation, a per-tensor scale, activation formats; and a layer without GPTQ."""
    algorithm = GPTQ(sequential=sequential, min_tokens=16)
    return {
        "blocks": MXFP4Config(rotation=32, algorithm=algorithm),
        "blocks.1": NVFP4Config(algorithm=algorithm, activation=None),
        "pooler": "mxfp8",
        "lm_head": MXFP4Config(activation="mxfp8", algorithm=algorithm),
    }


@pytest.mark.parametrize("sequential", [True, False])
@pytest.mark.parametrize("kind", MODELS)
def test_resume_gives_the_same_codes_wherever_it_stopped(
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
def test_resume_of_transformers_models(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_finished_stages_are_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_partial_file_is_no_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_two_writers_of_one_stage_leave_it_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second writes the whole stage while the first is writing."""
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


def test_file_names_with_non_ascii_digits_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "stage-\u0660\u0660\u0660\u0660\u0663.safetensors").write_bytes(b"of somebody else")
    quantize_(Model(Block, 1), ROTATED, calibration=batches(), resume=tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


def test_tilde_in_the_path_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    quantize_(Model(Block, 1), ROTATED, calibration=batches(), resume="~/new")
    assert len(list((tmp_path / "new").iterdir())) == 2


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_meta_and_sparse_tensors_change_the_fingerprint(tmp_path: Path) -> None:
    """Meta tensors count by their shapes, sparse ones by their values."""
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


def test_the_log_says_how_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stop_after(monkeypatch, calibrate, "gptq", 4)
    with pytest.raises(Stopped):
        quantize_(Model(), ROTATED, calibration=batches(), resume=tmp_path)
    assert "stopped at blocks.1.down.weight: 6 of 10 weights" in caplog.text
    assert f"load the model anew and make the same call; 2 stages are saved in {tmp_path}" in caplog.text


def not_quantized(module: nn.Module, name: str) -> bool:
    return not any(isinstance(parameter, MXTensor) for parameter in module.parameters(recurse=False))


def test_a_rerun_on_the_stopped_model_is_told_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by `dequantize_`, whose values would be rounded twice."""
    original, data = Model(), batches()
    expected, model = copy.deepcopy(original), copy.deepcopy(original)
    quantize_(expected, ROTATED, calibration=data)
    with monkeypatch.context() as patch:
        stop_after(patch, calibrate, "gptq", 4)
        with pytest.raises(Stopped):
            quantize_(model, ROTATED, calibration=data)
    with pytest.raises(ValueError, match=r"GPTQ was stopped at blocks\.1\.down\.weight\. Load the original") as info:
        quantize_(model, ROTATED, calibration=data)
    assert "call dequantize_" not in str(info.value)
    assert "filter_fn=lambda module, name: " in str(info.value)
    quantize_(model, ROTATED, filter_fn=not_quantized, calibration=data)
    assert_same(model, expected)
    with pytest.raises(ValueError, match=r"call dequantize_\(model\) first"):  # nothing is stopped any more
        quantize_(model, ROTATED, calibration=data)


def test_a_rerun_with_resume_is_told_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, data = Model(), batches()
    model = copy.deepcopy(original)
    with monkeypatch.context() as patch:
        stop_after(patch, calibrate, "gptq", 4)
        with pytest.raises(Stopped):
            quantize_(model, ROTATED, calibration=data, resume=tmp_path)
    with pytest.raises(ValueError, match=r"make the same call with resume='.*', which reads the finished part"):
        quantize_(copy.deepcopy(model), ROTATED, calibration=data, resume=tmp_path)
    quantize_(original, ROTATED, calibration=data, resume=tmp_path)
