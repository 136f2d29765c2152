"""Writes a benchmark's result beside the machine, the versions and the command that it came from.

Not a benchmark itself: the scripts in this folder import `Record`, fill it, and call `save`, which prints the
goals and writes `results/<name>.json`.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent


def cpu_model() -> str:
    """The processor's name and, where the kernel tells, its family and model: virtual machines often hide the name."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor() or platform.machine()
    lines = (line.split(":", 1) for line in cpuinfo.read_text().splitlines() if ":" in line)
    facts = {key.strip(): value.strip() for key, value in lines}
    name = facts.get("model name", platform.machine())
    return f"{name} (family {facts['cpu family']}, model {facts['model']})" if "cpu family" in facts else name


def machine() -> dict[str, Any]:
    extensions = torch.backends.cpu.get_cpu_capability()
    return {
        "cpu": cpu_model(),
        "cpu_capability": extensions,
        "logical_cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "system": f"{platform.system()} {platform.machine()}",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def versions(others: Iterable[str] = ()) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("torch", "triton", "torchao", "transformers", "mxquant", *others):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def commit() -> str:
    """The commit that was measured, with "+" for a tree that has changes on top of it."""
    try:
        run = ["git", "-C", str(FOLDER), "describe", "--always", "--dirty=+", "--exclude=*"]
        return subprocess.run(run, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "none"


def command() -> str:
    """What to type for the same run, with the variables that change how torch's threads behave."""
    variables = [f"{name}={os.environ[name]}" for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY") if name in os.environ]
    return " ".join([*variables, "python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])


@dataclass
class Record:
    """One run of one benchmark."""

    name: str
    question: str
    method: str
    packages: tuple[str, ...] = ()
    """Distributions whose versions are recorded too."""
    results: list[dict[str, Any]] = field(default_factory=list)
    goals: list[dict[str, Any]] = field(default_factory=list)
    revision: str = field(default_factory=commit)
    """Asked at the start: writing the results changes the tree."""

    def goal(self, what: str, measured: float, *, at_most: float | None = None, at_least: float | None = None) -> None:
        met = (at_most is None or measured <= at_most) and (at_least is None or measured >= at_least)
        limit = f"<= {at_most}" if at_most is not None else f">= {at_least}"
        self.goals.append({"what": what, "goal": limit, "measured": round(measured, 4), "met": met})

    def save(self) -> None:
        for goal in self.goals:
            print(f"{'met   ' if goal['met'] else 'MISSED'}  {goal['what']}: {goal['measured']} (goal {goal['goal']})")
        print(f"written: benchmarks/results/{self.write().name}")

    def write(self) -> Path:
        """The file of what was measured so far."""
        content = {
            "benchmark": self.name,
            "question": self.question,
            "method": self.method,
            "command": command(),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "commit": self.revision,
            "machine": machine(),
            "versions": versions(self.packages),
            "goals": self.goals,
            "results": self.results,
        }
        path = FOLDER / "results" / f"{self.name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        return path
