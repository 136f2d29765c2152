"""`python -m mxquant {inspect, report, explain}`: what they say of checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from command_line import run
from safetensors.torch import load_file, save_file
from small_transformers import MODELS

from mxquant import from_pretrained, load_state


def test_inspect_shows_a_rotation(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"*.up_proj": {"weight": "mxfp4", "rotation": 32}}')
    run("quantize", llama, tmp_path / "out", "--config", tmp_path / "config.json")
    capsys.readouterr()
    assert run("inspect", tmp_path / "out") == 0
    assert capsys.readouterr().out.count("W4A4, rotation 32 ") == 2
    run("inspect", tmp_path / "out", "--json")
    rotations = {row["name"]: row["rotation"] for row in json.loads(capsys.readouterr().out)["tensors"]}
    assert rotations["model.layers.0.mlp.up_proj.weight"] == 32
    assert rotations["model.layers.0.mlp.down_proj.weight"] is None


def test_inspect(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("quantize", llama, tmp_path / "out", "--format", "mxfp4")
    capsys.readouterr()
    assert run("inspect", tmp_path / "out") == 0
    text = capsys.readouterr().out
    assert "mxquant, 14 of 21 tensors quantized" in text
    assert run("inspect", tmp_path / "out", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in found["tensors"]}
    row = rows["model.layers.0.mlp.up_proj.weight"]
    assert (row["format"], row["precision"], row["shape"], row["bits"]) == ("mxfp4", "W4A4", [96, 64], 4.25)
    assert rows["lm_head.weight"]["format"] == "bf16"
    assert found["parameters"] == sum(parameter.numel() for parameter in MODELS["llama"]().parameters())


def test_inspect_needs_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"w": torch.ones(2, 3)}, tmp_path / "weights.safetensors")
    assert run("inspect", tmp_path / "weights.safetensors", "--json") == 0
    assert json.loads(capsys.readouterr().out)["producer"] is None


@pytest.mark.parametrize("shards", [None, "60KB"])
def test_inspect_one_file_of_another_producer(
    shards: str | None, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is quantized stands in the config beside it; a shard may lack the scales of its codes."""
    limit = [] if shards is None else ["--max-shard-bytes", "60000"]
    run("quantize", llama, tmp_path / "out", "--format", "mxfp4", "--as", "compressed-tensors", *limit)
    capsys.readouterr()
    file = min((tmp_path / "out").glob("*.safetensors"))
    for command in ("inspect", "explain"):
        if shards is None:
            assert run(command, file) == 0
            assert "W4A4" in capsys.readouterr().out
        else:
            assert run(command, file) == 1
            error = capsys.readouterr().err
            assert "is one of several files of a quantized checkpoint" in error
            assert f"give the folder, {tmp_path / 'out'}" in error


def test_inspect_one_file_beside_another_checkpoint(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("quantize", llama, tmp_path / "out", "--format", "mxfp4", "--as", "compressed-tensors")
    save_file({"w": torch.ones(2, 3)}, tmp_path / "out" / "adapter.safetensors")
    capsys.readouterr()
    assert run("inspect", tmp_path / "out" / "adapter.safetensors") == 0
    assert "not quantized, 0 of 1" in capsys.readouterr().out


def test_report(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("quantize", llama, tmp_path / "a", "--format", "mxfp4")
    run("quantize", llama, tmp_path / "b", "--format", "mxfp8")
    capsys.readouterr()
    name = "model.layers.0.mlp.up_proj.weight"

    def rows(first: Path, second: Path) -> dict[str, dict[str, Any]]:
        assert run("report", first, second, "--json") == 0
        return {row["name"]: row for row in json.loads(capsys.readouterr().out)["tensors"]}

    against_plain = rows(llama, tmp_path / "a")
    plain, quantized = load_state(llama)[name].double(), load_state(tmp_path / "a")[name].dequantize().double()
    expected = 20 * torch.log10(plain.norm() / (plain - quantized).norm())
    assert against_plain[name]["sqnr_db"] == pytest.approx(expected.item())
    assert against_plain[name]["differing_bytes"] is None
    assert against_plain["lm_head.weight"] == {
        "name": "lm_head.weight",
        "kinds": ["bfloat16", "bfloat16"],
        "shape": [128, 64],
        "differing_bytes": 0,
        "nbytes": 128 * 64 * 2,
        "sqnr_db": "inf",
    }
    assert rows(llama, tmp_path / "b")[name]["sqnr_db"] > against_plain[name]["sqnr_db"] + 10
    assert all(row["differing_bytes"] == 0 for row in rows(tmp_path / "a", tmp_path / "a").values())


def test_report_counts_differing_bytes(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("quantize", llama, tmp_path / "a", "--format", "mxfp4")
    run("quantize", llama, tmp_path / "b", "--format", "mxfp4")
    file = tmp_path / "b" / "model.safetensors"
    name = "model.layers.0.mlp.up_proj.weight"
    from safetensors import safe_open

    with safe_open(file, "pt") as handle:
        metadata = handle.metadata()
    tensors = {key: tensor.clone() for key, tensor in load_file(file).items()}
    tensors[f"{name}.qdata"][:2, 0] ^= 1
    tensors[f"{name}.scale"][5, 1] += 1
    save_file(tensors, file, metadata)
    capsys.readouterr()
    assert run("report", tmp_path / "a", tmp_path / "b", "--json") == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["tensors"]}
    assert rows[name]["differing_bytes"] == 3
    assert run("report", tmp_path / "a", tmp_path / "b") == 0
    assert "differing bytes" in capsys.readouterr().out


@pytest.mark.parametrize("producer", ["compressed-tensors", "quark"])
def test_report_compares_experts_whatever_the_files_call_them(
    producer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    MODELS["mixtral"]().to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    for name, others in (("out", producer), ("own", "mxquant")):
        run("quantize", tmp_path / "plain", tmp_path / name, "--format", "mxfp4", "--as", others)
    capsys.readouterr()

    def rows(first: Path, second: Path) -> dict[str, dict[str, Any]]:
        assert run("report", first, second, "--json") == 0
        found = json.loads(capsys.readouterr().out)
        return {row["name"]: row for row in found["tensors"]}

    experts = "model.layers.1.mlp.experts.gate_up_proj"
    found = rows(tmp_path / "plain", tmp_path / "own")
    model, quantized = (from_pretrained(tmp_path / name) for name in ("plain", "own"))
    plain, values = (m.get_parameter(experts) for m in (model, quantized))
    expected = 20 * torch.log10(plain.double().norm() / (plain - values.dequantize()).double().norm())
    assert found.keys() == dict(model.named_parameters()).keys()
    assert found[experts]["sqnr_db"] == pytest.approx(expected.item(), abs=0.05)  # a bf16 difference
    assert found[experts]["nbytes"] == plain.nbytes
    assert all(row["differing_bytes"] == 0 for row in rows(tmp_path / "own", tmp_path / "out").values())


def test_a_report_that_leaves_tensors_out_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)}, tmp_path / "a.safetensors")
    save_file({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path / "b.safetensors")
    assert run("report", tmp_path / "a.safetensors", tmp_path / "b.safetensors") == 1
    printed = capsys.readouterr()
    assert "only in A: 1 (c)\nof other shapes: 1 (b)" in printed.out
    assert printed.err.startswith("error: 2 tensors are not compared")


def test_a_report_of_a_checkpoint_that_lacks_a_tensor(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(llama, tmp_path / "cut")
    tensors = load_file(llama / "model.safetensors")
    save_file(
        {name: tensors[name] for name in tensors if name != "model.norm.weight"}, tmp_path / "cut" / "w.safetensors"
    )
    (tmp_path / "cut" / "w.safetensors").replace(tmp_path / "cut" / "model.safetensors")
    assert run("report", llama, tmp_path / "cut") == 1
    printed = capsys.readouterr()
    assert printed.out.count("equal") == len(tensors) - 1
    assert "only in A: 1 (model.norm.weight)" in printed.out
    assert "does not fit its model: the checkpoint lacks 1 tensors" in caplog.text


def test_report_of_unrelated_checkpoints_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    save_file({"b": torch.ones(2)}, tmp_path / "b.safetensors")
    assert run("report", tmp_path / "a.safetensors", tmp_path / "b.safetensors") == 1
    assert "no tensor of one name" in capsys.readouterr().err


def test_explain(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("quantize", llama, tmp_path / "out", "--format", "mxfp4")
    capsys.readouterr()
    assert run("explain", tmp_path / "out", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(len(kind["weights"]) for kind in found) == 14
    assert all(kind["chosen"] for kind in found)
    assert run("explain", tmp_path / "out", "--device", "cuda") == 0
    assert "on cuda" in capsys.readouterr().out
    assert run("explain", llama) == 1
    assert "is not quantized" in capsys.readouterr().err
