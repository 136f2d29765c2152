"""docs/performance.md and its plot show what benchmarks/results/gpu_linear.json says."""

import importlib
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
GENERATOR = ROOT / "docs" / "generate_performance.py"
LARGEST_PLOT = 150_000


def linear(version: str, rows: int = 1, **measured: Any) -> dict[str, Any]:
    return {"shape": "128x256", "rows": rows, "version": version, **measured}


def measured(us: float, times_bf16: float, error: float) -> dict[str, float]:
    return {"us": us, "times_bf16": times_bf16, "error": error}


RECORD = {
    "command": "python benchmarks/gpu_linear.py",
    "commit": "0123456",
    "date": "2026-01-02T03:04:05+00:00",
    "machine": {"gpu": "NVIDIA H200", "cpu": "a CPU", "logical_cpus": 16},
    "versions": {"torch": "2.11.0", "gemlite": "not installed"},
    "goals": [
        {"what": "W4A4 times bf16", "goal": ">= 3", "measured": 2.5, "met": False},
        {"what": "W4A16 times bf16", "goal": ">= 1", "measured": 1.5, "met": True},
    ],
    "results": [
        {"version": "gemlite W4A16", "absent": "ModuleNotFoundError: No module named 'gemlite'"},
        linear("bf16", **measured(1000, 1, 1.5e-3), host_us=20),
        linear("W4A4", **measured(400, 2.5, 1.6e-3), host_us=200),
        linear("Humming W4A8", failed="RuntimeError: no kernel"),
        linear("bf16", 1024, **measured(3000, 1, 1.7e-3)),
        linear("W4A4", 1024, **measured(2000, 1.5, 1.8e-3)),
        {"quantize": "mxfp4", "rows": 1, "columns": 8192, "us": 2.5, "tb_s": 1, "of_copy": 0.9, "torchao_us": 4},
        {"prepared": "W4A4", "seconds": 12.34},
        {"bound": "launches", "us": 2.5},
        {"bound": "reading", "shape": "128x256", "us": 10, "tb_s": 4.1},
        {"bound": "FP8 product", "shape": "128x256", "rows": 1024, "us": 1500},
    ],
}


def test_page_and_plot_show_the_recorded_results() -> None:
    done = subprocess.run([sys.executable, str(GENERATOR), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (ROOT / "docs" / "gpu_linear.svg").stat().st_size < LARGEST_PLOT


def test_page_tells_what_was_measured_and_what_not() -> None:
    lines = runpy.run_path(str(GENERATOR))["page"](RECORD).splitlines()
    expected = [
        "- command: `python benchmarks/gpu_linear.py`, at commit `0123456`, 2026-01-02",
        "- machine: one NVIDIA H200; host: a CPU, 16 logical CPUs",
        "- versions: torch 2.11.0",
        "| M | bf16 | W4A4 | Humming W4A8 |",
        "| 1 | 1,000.0 | 400.0 (2.50) | - |",
        "| 1,024 | 3,000.0 | 2,000.0 (1.50) |  |",
        "| W4A4 | 200 | 200 |",
        "| W4A4 | 12.3 |",
        "| W4A4 | 1.6e-03 | 1.8e-03 |",
        "| `mxfp4` | 1 x 8,192 | 2.5 | 1.00 | 90% |  | 4.0 |",
        "| 128x256 | 10.0 | 4.10 | 12.5 | 400.0 (2.50) |  | 1,000.0 |",
        "| 128x256 | 1,024 | 1,500.0 | 2,000.0 (1.50) | 3,000.0 |",
        "Met: 1 of 2. The others:",
        "| W4A4 times bf16 | >= 3 | 2.50 |",
        "- gemlite W4A16: ModuleNotFoundError: No module named 'gemlite'.",
        "- Humming W4A8 at 128x256 M=1: RuntimeError: no kernel",
    ]
    assert [line for line in expected if line not in lines] == []


@pytest.mark.parametrize("changed, stale", [("PAGE", "performance.md"), ("RESULTS", "gpu_linear.svg")])
def test_what_is_out_of_date_is_noticed(
    changed: str, stale: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A page with another line; results with another byte, of which the page would be the same."""
    namespace = runpy.run_path(str(GENERATOR))
    main, original = namespace["main"], namespace[changed]
    copy = tmp_path / original.name
    copy.write_text(original.read_text() + "\n")
    monkeypatch.setitem(main.__globals__, changed, copy)
    monkeypatch.setattr(sys, "argv", [GENERATOR.name, "--check"])
    assert main() == 1
    assert f"{stale} is out of date" in capsys.readouterr().err


def test_plot_is_the_same_each_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    plot = importlib.import_module("plot_gpu_linear")
    drawn = []
    for name in ("one.svg", "two.svg"):
        monkeypatch.setattr(plot, "PLOT", tmp_path / name)
        plot.main()
        drawn.append((tmp_path / name).read_bytes())
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) < LARGEST_PLOT
