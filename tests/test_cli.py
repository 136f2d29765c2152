"""`python -m mxquant`: what each command does, prints, and answers with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from command_line import run
from safetensors.torch import load_file
from small_transformers import IDS, MODELS
from transformers import (
    AutoModelForCausalLM,
)

from mxquant import MXTensor, from_pretrained, mxfp4, quantize_, save_pretrained
from mxquant.cli import main
from mxquant.integrations.transformers import MXQuantConfig


@pytest.fixture(params=sorted(MODELS))
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    MODELS[request.param]().to(torch.bfloat16).save_pretrained(tmp_path / "source", max_shard_size="60KB")
    return tmp_path / "source"


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4", "mxfp6_e3m2"])
def test_quantize_gives_the_bytes_of_quantizing_the_model(source: Path, fmt: str, tmp_path: Path) -> None:
    (source / "tokenizer.json").write_text("{}")
    assert run("quantize", source, tmp_path / "out", "--format", fmt) == 0
    assert (tmp_path / "out" / "tokenizer.json").exists()
    expected = AutoModelForCausalLM.from_pretrained(source, quantization_config=MXQuantConfig(fmt))
    for ours in (from_pretrained(tmp_path / "out"), AutoModelForCausalLM.from_pretrained(tmp_path / "out")):
        for name, parameter in expected.named_parameters():
            other = ours.get_parameter(name)
            assert type(other) is type(parameter), name
            if isinstance(parameter, MXTensor):
                assert other.metadata == parameter.metadata
                pairs = zip(other.operand, parameter.operand, strict=True)
                assert all((a is None and b is None) or torch.equal(a, b) for a, b in pairs), name
            else:
                assert torch.equal(other, parameter), name
        assert torch.equal(ours(IDS).logits, expected(IDS).logits)
    assert ours.config.quantization_config.to_dict() == expected.config.quantization_config.to_dict()


@pytest.mark.parametrize("model", ["llama", "tied", "mixtral"])
@pytest.mark.parametrize("producer", ["compressed-tensors", "quark"])
def test_quantize_as_another_producer(model: str, producer: str, tmp_path: Path) -> None:
    MODELS[model]().to(torch.bfloat16).save_pretrained(tmp_path / "source")
    assert run("quantize", tmp_path / "source", tmp_path / "out", "--format", "mxfp4", "--as", producer) == 0
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "source")
    quantize_(expected, "mxfp4")
    assert torch.equal(from_pretrained(tmp_path / "out")(IDS).logits, expected(IDS).logits)
    save_pretrained(expected, tmp_path / "saved", producer)
    ours, saved = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "saved"))
    assert ours.keys() == saved.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in ours.items())
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("out", "saved")]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]


def test_nvfp4_for_compressed_tensors_has_scales_with_divisors(tmp_path: Path) -> None:
    """The model's codes and block scales; per-tensor scales at most one bit off, some of them."""
    torch.manual_seed(0)
    MODELS["llama"]().to(torch.bfloat16).save_pretrained(llama := tmp_path / "source")
    options = ("--format", "nvfp4", "--activation", "none", "--as", "compressed-tensors")
    assert run("quantize", llama, tmp_path / "out", *options) == 0
    expected = AutoModelForCausalLM.from_pretrained(llama)
    quantize_(expected, {"weight": "nvfp4", "activation": None})
    loaded, changed = from_pretrained(tmp_path / "out"), 0
    for name, weight in expected.named_parameters():
        if isinstance(weight, MXTensor):
            other = loaded.get_parameter(name)
            assert torch.equal(other.qdata, weight.qdata)
            assert torch.equal(other.scale, weight.scale)
            torch.testing.assert_close(other.per_tensor_scale, weight.per_tensor_scale, rtol=2**-23, atol=0)
            changed += int(not torch.equal(other.per_tensor_scale, weight.per_tensor_scale))
    assert changed  # else the test would pass without the choice


def test_quantize_gpt_oss_as_gpt_oss(tmp_path: Path) -> None:
    MODELS["gpt_oss"]().to(torch.bfloat16).save_pretrained(tmp_path / "source")
    (tmp_path / "config.json").write_text('{"moe": {"weight": "mxfp4", "activation": null}}')
    options = ("--config", tmp_path / "config.json", "--as", "gpt-oss")
    assert run("quantize", tmp_path / "source", tmp_path / "out", *options) == 0
    assert "model.layers.0.mlp.experts.gate_up_proj_blocks" in load_file(tmp_path / "out" / "model.safetensors")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "source")
    quantize_(expected, {"moe": {"weight": "mxfp4", "activation": None}})
    assert torch.equal(from_pretrained(tmp_path / "out")(IDS).logits, expected(IDS).logits)


def test_fp32_files_are_quantized_in_the_models_dtype(tmp_path: Path) -> None:
    """As transformers does when it quantizes on load."""
    model = MODELS["llama"]()
    model.save_pretrained(tmp_path / "source")
    config = json.loads((tmp_path / "source" / "config.json").read_text()) | {"dtype": "bfloat16"}
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    assert run("quantize", tmp_path / "source", tmp_path / "out", "--format", "mxfp4") == 0
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "source", quantization_config=MXQuantConfig("mxfp4"))
    assert torch.equal(from_pretrained(tmp_path / "out")(IDS).logits, loaded(IDS).logits)


@pytest.mark.parametrize("content", ["mxfp8", {"linear": "mxfp8"}], ids=str)
def test_a_config_file_means_what_format_means(content: Any, llama: Path, tmp_path: Path) -> None:
    """Activations are rounded as readers of the export round them, unless the config names a mode."""
    export = ("--as", "compressed-tensors")
    assert run("quantize", llama, tmp_path / "by-format", "--format", "mxfp8", *export) == 0
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert run("quantize", llama, tmp_path / "by-config", "--config", tmp_path / "config.json", *export) == 0
    by_format, by_config = (
        {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("by-format", "by-config")
    )
    assert by_format == by_config
    named = {"linear": {"weight": "mxfp8", "activation_scale_mode": "rceil"}}
    (tmp_path / "config.json").write_text(json.dumps(named))
    assert run("quantize", llama, tmp_path / "named", "--config", tmp_path / "config.json", *export) == 1


@pytest.mark.parametrize(
    "options, named",
    [
        (
            ["--format", "nvfp4", "--as", "compressed-tensors"],
            "computed at run time (its NVFP4 has calibrated ones) would be lost",
        ),
        (["--format", "mxfp6_e3m2", "--activation", "none", "--as", "compressed-tensors"], "its codes would be lost"),
        (["--format", "mxfp4", "--as", "gpt-oss"], "would be lost"),
        (["--format", "mxfp4", "--as", "gpt-oss"], "on the command line, weight-only is --activation none"),
    ],
)
def test_config_that_the_producer_cannot_write_is_refused_before_writing(
    options: list[str], named: str, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("quantize", llama, tmp_path / "out", *options) == 1
    assert named in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    "content, named",
    [
        ('{"linear":', "config.json is no JSON: Expecting value"),
        (b"\xff\xfe", "config.json is no JSON: 'utf-8' codec"),
        ("[" * 100_000, "config.json is no JSON"),
        ('{"linear": "mxfp4", "linear": "mxfp8"}', "'linear' is there twice"),
        ('["mxfp4"]', "holds ['mxfp4']; it is an object"),
        ("{}", "the config mapping is empty"),
        ('{"linear": null}', "selects no weight"),
        ('{"linear": {"weight": "mxfp4", "activaton": null}}', "did you mean 'activation'"),
        ('{"linear": {"weight": "mxfp4", "algorithm": "gptq"}}', "needs data to calibrate on"),
        ('{"linear": {"weight": "mxfp4", "backend": "typo"}}', "'typo' is unknown"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_config_file_is_refused(
    content: str | bytes, named: str, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert run("quantize", llama, tmp_path / "out", "--config", tmp_path / "config.json") == 1
    assert named in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "model, change, named",
    [
        ("llama", {"hidden_size": 128}, "are not of one model"),
        ("llama", {"num_hidden_layers": 3}, "lacks"),
        ("mixtral", {"num_local_experts": 3}, "stacks 3 experts, but the checkpoint has 4"),
        ("mixtral", {"intermediate_size": 64}, "are not of one model"),
        ("llama", {"model_type": "unheard"}, "of model_type 'unheard', which transformers"),
        ("llama", {"model_type": "unheard", "auto_map": {"AutoConfig": "code.Config"}}, "is never run"),
    ],
    ids=str,
)
def test_config_json_of_another_model_is_refused(
    model: str, change: dict[str, Any], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is asked on the terminal either, of code that lies beside the weights."""
    source = tmp_path / "source"
    MODELS[model]().to(torch.bfloat16).save_pretrained(source)
    config = json.loads((source / "config.json").read_text()) | change
    (source / "config.json").write_text(json.dumps(config))
    (source / "code.py").write_text("raise SystemExit('was run')")
    assert run("quantize", source, tmp_path / "out", "--format", "mxfp4", "--json") == 1
    printed = capsys.readouterr()
    assert named in printed.err
    assert printed.out == ""
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]


def test_a_rotation_is_written_or_refused(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Others would take the codes for those of an ordinary weight."""
    (tmp_path / "config.json").write_text('{"linear": {"weight": "mxfp4", "rotation": 32}}')
    options = ("--config", tmp_path / "config.json")
    assert run("quantize", llama, tmp_path / "out", *options) == 0
    expected = AutoModelForCausalLM.from_pretrained(llama)
    quantize_(expected, {"linear": mxfp4(rotation=32)})
    assert torch.equal(from_pretrained(tmp_path / "out")(IDS).logits, expected(IDS).logits)
    for producer in ("compressed-tensors", "quark"):
        assert run("quantize", llama, tmp_path / producer, *options, "--as", producer) == 1
        assert "its rotation in blocks of 32" in capsys.readouterr().err
        assert not (tmp_path / producer).exists()


def test_quantizing_twice_and_in_place_is_refused(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("quantize", llama, llama, "--format", "mxfp4") == 1
    assert "is the source" in capsys.readouterr().err
    assert run("quantize", llama, tmp_path / "out", "--format", "mxfp4") == 0
    assert run("quantize", tmp_path / "out", tmp_path / "again", "--format", "mxfp4") == 1
    assert "is quantized already, by mxquant" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["quantize", "a", "b"],
        ["quantize", "a", "b", "--format", "int4"],
        ["quantize", "a", "b", "--format", "mxfp4", "--max-shard-bytes", "many"],
        ["quantize", "a", "b", "--format", "mxfp4", "--max-shard-bytes", "5XB"],
        ["quantize", "a", "b", "--format", "mxfp4", "--max-shard-bytes", "0KB"],
        ["quantize", "a", "b", "--format", "mxfp4", "--activation", "int8"],
        ["quantize", "a", "b", "--config", "absent.json"],
        ["quantize", "a", "b", "--config", "."],
        ["quantize", "a", "b", "--config", __file__, "--activation", "none"],
        ["inspect"],
        ["solve"],
    ],
)
def test_wrong_usage_exits_with_two(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_shards_of_a_size_with_a_unit(llama: Path, tmp_path: Path) -> None:
    for size in ("20KB", "20000"):
        assert run("quantize", llama, tmp_path / size, "--format", "mxfp4", "--max-shard-bytes", size) == 0
    files = [sorted(file.name for file in (tmp_path / size).glob("*.safetensors")) for size in ("20KB", "20000")]
    assert files[0] == files[1]
    assert len(files[0]) > 1


def test_quantize_lists_skipped_weights(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"linear": "mxfp4", "*.mlp.*": null}')
    assert run("quantize", llama, tmp_path / "out", "--config", tmp_path / "config.json") == 0
    text = capsys.readouterr().out
    assert "left as they are, embedding: 1 (model.embed_tokens.weight)" in text
    named = ", ".join(f"model.layers.0.mlp.{name}_proj.weight" for name in ("down", "gate", "up"))
    assert f"left as they are, the config says None for '*.mlp.*': 6 ({named}, ...)" in text


def test_python_m_mxquant(llama: Path) -> None:
    command = [sys.executable, "-m", "mxquant", "inspect", str(llama), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["producer"] is None
    done = subprocess.run([sys.executable, "-m", "mxquant", "inspect", "nowhere"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "nowhere is neither a folder nor a file" in done.stderr
