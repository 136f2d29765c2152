"""The GPU benchmark without a GPU: what it records of versions and peers, and the goals that it holds them against."""

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from mxquant import quantize

ROOT = Path(__file__).resolve().parents[1]
SHAPE = "128x256"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The scripts of `benchmarks` as modules: they import each other by their bare names."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


@pytest.fixture
def gpu_linear(load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The benchmark on a CPU, where a version takes a microsecond for each copy of its weight; only linears."""
    module = load("gpu_linear")
    monkeypatch.setattr(module, "DEVICE", "cpu")
    monkeypatch.setattr(module.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(module, "copies", lambda size: 2)
    monkeypatch.setattr(module, "graph_microseconds", lambda run, calls: float(len(run())))
    monkeypatch.setattr(module, "host_microseconds", lambda run: 3.0)
    monkeypatch.setattr(module, "measure_quantizer", lambda device: [])
    monkeypatch.setattr(module, "measure_bounds", lambda shapes, rows, device: [])
    monkeypatch.setattr(load("record"), "FOLDER", tmp_path)
    return module


def recorded(tmp_path: Path) -> dict[str, Any]:
    return json.loads((tmp_path / "results" / "gpu_linear.json").read_text())


def peer(load: Any, name: str, build: Any, module: str = "torch") -> Any:
    return load("peers").Version(name, "torchao", build, module)


# What a run records


def test_a_run_records_every_version(gpu_linear: ModuleType, tmp_path: Path) -> None:
    gpu_linear.main(["--shapes", SHAPE, "--rows", "1", "3", "--peers"])
    record = recorded(tmp_path)
    rows = [row for row in record["results"] if "shape" in row]
    assert [(row["rows"], row["version"]) for row in rows] == [
        (m, v) for m in (1, 3) for v in ("bf16", "W4A4", "W4A16")
    ]
    assert all(row["us"] == 2 and row["times_bf16"] == 1 for row in rows)
    assert [row.get("host_us") for row in rows] == [3.0] * 3 + [None] * 3
    # Rounding to bf16, and no more: each is held against what it says that it computes.
    assert all(row["error"] < 4e-3 for row in rows)
    absent = {row["version"]: row["absent"] for row in record["results"] if "absent" in row}
    assert set(absent.values()) == {"not asked for (--peers)"}
    assert len(absent) == 6
    assert {"humming-kernels", "gemlite", "triton_kernels"} <= record["versions"].keys()


def test_bounds_are_of_bytes_read_and_of_products(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call of a graph takes a microsecond."""
    module = load("gpu_linear")
    monkeypatch.setattr(module, "copies", lambda size: 2)
    monkeypatch.setattr(module, "graph_microseconds", lambda run, calls: len(run()) / calls)
    launched: list[tuple[Any, ...]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda words, found, size, block: launched.append((grid, words.numel(), found.numel(), size, block))

    monkeypatch.setattr(module, "_read_kernel", Kernel())
    monkeypatch.setattr(module.torch, "_scaled_mm", lambda x, w, *scales, **options: x.float() @ w.float())
    rows = list(module.measure_bounds([(128, 1024)], [16, 2048], "cpu"))
    assert rows == [
        {"bound": "launches", "us": 1.0},
        {"bound": "reading", "shape": "128x1024", "us": 1.0, "tb_s": 0.07},
        {"bound": "FP8 product", "shape": "128x1024", "rows": 2048, "us": 1.0},
    ]
    # Codes and scales, 4.25 bits a weight, of two copies.
    assert launched == [((3,), 17408, 3, 17408, 8192)] * 2


def test_an_absent_peer_is_recorded(gpu_linear: ModuleType, load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(gpu_linear, "PEERS", [peer(load, "Other W4A16", None, "no_such_package")])
    gpu_linear.main(["--shapes", SHAPE, "--rows", "1"])
    (line,) = [row for row in recorded(tmp_path)["results"] if "absent" in row]
    assert line == {"version": "Other W4A16", "absent": "ModuleNotFoundError: No module named 'no_such_package'"}


def test_a_failing_peer_is_recorded(gpu_linear: ModuleType, load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def build(w: torch.Tensor) -> Any:
        def fail(x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError(f"no kernel\nfor {len(x)} rows")

        return lambda x: fail(x) if len(x) > 1 else x @ quantize(w, "mxfp4").dequantize().mT

    monkeypatch.setattr(gpu_linear, "PEERS", [peer(load, "Other W4A16", build)])
    gpu_linear.main(["--shapes", SHAPE, "--rows", "1", "3"])
    one, three = [row for row in recorded(tmp_path)["results"] if row.get("version") == "Other W4A16"]
    assert one["us"] == 2
    assert one["error"] < 4e-3
    assert three == {
        "shape": SHAPE,
        "rows": 3,
        "version": "Other W4A16",
        "failed": "RuntimeError: no kernel for 3 rows",
    }


def test_a_slow_peer_is_left_out(gpu_linear: ModuleType, load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(gpu_linear, "PEERS", [peer(load, "Other W4A16", gpu_linear.plain)])
    gpu_linear.main(["--shapes", SHAPE, "--rows", "1", "3", "--patience", "0"])
    one, three = [row for row in recorded(tmp_path)["results"] if row.get("version") == "Other W4A16"]
    assert one["us"] == 2
    assert three["failed"].startswith("not run: compiling and tuning took more than 0 s")


def test_a_failure_of_our_own_is_not_swallowed(gpu_linear: ModuleType, monkeypatch: pytest.MonkeyPatch):
    def fail(run: Any, calls: int) -> float:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(gpu_linear, "graph_microseconds", fail)
    with pytest.raises(RuntimeError, match="no kernel"):
        gpu_linear.main(["--shapes", SHAPE, "--rows", "1", "--peers"])


def test_torchao_computes_the_same_product(load: Any) -> None:
    """On a CPU only the eager one runs: the others need a GPU."""
    peers = load("peers")
    (torchao,) = [version for version in peers.PEERS if version.name == "torchao W4A4"]
    assert torchao.why_absent() is None
    w, x = torch.randn(64, 128).bfloat16(), torch.randn(5, 128).bfloat16()
    with torch.no_grad():
        y = torchao.build(w)(x)
    taken = quantize(x, "mxfp4", scale_mode=torchao.activation_scale_mode).dequantize()
    exact = taken.float() @ quantize(w, "mxfp4").dequantize().float().mT
    assert (y.float() - exact).norm() < 4e-3 * exact.norm()


def test_the_quantizer_is_measured_where_torchao_fails(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    quantizer = load("gpu_quantizer")

    def fail(*arguments: object) -> None:
        raise NotImplementedError("no such dtype")

    monkeypatch.setattr(quantizer, "ROWS", (2,))
    monkeypatch.setattr(quantizer, "COLUMNS", 64)
    monkeypatch.setattr(quantizer, "compiled_to_mx", fail)
    monkeypatch.setattr(quantizer, "graph_microseconds", lambda run, calls: float(bool(run())))
    mxfp4, mxfp6, _, nvfp4 = quantizer.measure_quantizer("cpu")
    # 256 bytes read, 64 of codes and 4 of scales written; a copy moves 512.
    assert mxfp4 == {
        "quantize": "mxfp4",
        "rows": 2,
        "columns": 64,
        "us": 1.0,
        "tb_s": 0.0,
        "of_copy": 0.633,
        "rotated_us": 1.0,
        "torchao_failed": "NotImplementedError: no such dtype",
    }
    assert mxfp6.keys() == mxfp4.keys() - {"torchao_failed"}
    assert nvfp4.keys() == mxfp6.keys() - {"rotated_us"}


# Goals


def row(version: str, us: float, rows: int = 1, shape: str = "28672x8192") -> dict[str, Any]:
    return {"shape": shape, "rows": rows, "version": version, "us": us}


def goals_of(load: Any, *results: dict[str, Any]) -> dict[str, tuple[str, float, bool]]:
    record = load("record").Record("gpu_linear", "", "", results=list(results))
    load("gpu_linear").check_goals(record)
    return {goal["what"]: (goal["goal"], goal["measured"], goal["met"]) for goal in record.goals}


def test_goals_compare_times_of_one_shape_and_number_of_rows(load: Any) -> None:
    found = goals_of(
        load,
        row("bf16", 100),
        row("W4A4", 32),
        row("W4A16", 50),
        row("Humming W4A8", 33),
        row("Humming W4A8", 1, rows=64),
        row("bf16", 30, shape="8192x8192"),
        row("W4A16", 12, shape="8192x8192"),
    )
    assert found == {
        "W4A4 times bf16, 28672x8192, M=1": (">= 3.1", 3.125, True),
        "W4A4 times Humming W4A8, 28672x8192, M=1": (">= 1.1", 1.0312, False),
        "W4A16 times bf16, 28672x8192, M=1": (">= 2.6", 2.0, False),
        "W4A16 times bf16, 8192x8192, M=1": (">= 2.21", 2.5, True),
    }


def test_goals_ignore_what_failed_or_is_absent(load: Any) -> None:
    failed = {"shape": "28672x8192", "rows": 1, "version": "Humming W4A16", "failed": "RuntimeError"}
    absent = {"version": "triton_kernels W4A16", "absent": "ModuleNotFoundError"}
    found = goals_of(load, row("bf16", 100), row("W4A16", 40), failed, absent)
    assert list(found) == ["W4A16 times bf16, 28672x8192, M=1"]


def test_goals_of_the_quantizer(load: Any) -> None:
    few = {"quantize": "mxfp4", "rows": 16, "columns": 8192, "us": 4.5, "of_copy": 0.2}
    many = {"quantize": "mxfp4", "rows": 2048, "columns": 8192, "us": 20, "of_copy": 0.9, "torchao_us": 30}
    assert goals_of(load, few, many) == {
        "quantize to mxfp4, 16x8192, us": ("<= 4", 4.5, False),
        "quantize to mxfp4, 2048x8192, of a copy's rate": (">= 0.85", 0.9, True),
        "quantize to mxfp4, 2048x8192, times torchao compiled": (">= 1.0", 1.5, True),
    }


# GPTQ on a GPU


def test_each_place_and_mode_of_calibration_is_recorded(
    load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a CPU, of a model of a few weights; bytes on a GPU are counted from none to 10."""
    pytest.importorskip("transformers")
    module = load("calibration")
    monkeypatch.setattr(module, "GPU", "cpu")
    monkeypatch.setattr(module, "SIZES", {"SmolLM2-135M": module.Size(64, 96, 2, 1, 2)})
    for name, value in (("memory_allocated", 0), ("max_memory_allocated", 10)):
        monkeypatch.setattr(module.torch.cuda, name, lambda value=value: value)
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(module.torch.cuda, name, lambda: None)
    monkeypatch.setattr(load("record"), "FOLDER", tmp_path)
    module.main(["--device", "cuda", "--sizes", "SmolLM2-135M", "--tokens", "512"])
    rows = json.loads((tmp_path / "results" / "gpu_calibration.json").read_text())["results"]
    assert [(row["place"], row["mode"]) for row in rows] == [
        (place, mode) for place in ("gpu", "device") for mode in ("parallel", "sequential")
    ]
    assert all(row["seconds"] > 0 for row in rows)
    assert [row["peak_bytes"] - 10 for row in rows] == [rows[0]["model_bytes"]] * 2 + [0] * 2
