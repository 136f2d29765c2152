"""How long does `python -m mxquant quantize` take from disk to disk, and how much memory?

SmolLM2-135M-Instruct, saved in bf16 as one file, is quantized into another folder. Each run is a process of its own,
which imports what the command needs and tells the seconds from there on, and the peak of its resident memory (Linux's
VmHWM, pages of mapped files included) above what the imports left resident. The seconds of the whole process are
recorded too.

    python benchmarks/quantize_checkpoint.py
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from example_scripts import load
from record import Record

COMMANDS = {
    "mxfp4": ["--format", "mxfp4"],
    "nvfp4": ["--format", "nvfp4"],
    "mxfp4 as compressed-tensors": ["--format", "mxfp4", "--as", "compressed-tensors"],
}
CHILD = """
import json, sys, time
from transformers import LlamaForCausalLM
import mxquant.integrations.streaming, mxquant.integrations.transformers
from mxquant.cli import main

def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))

before = status("VmRSS")
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # VmHWM starts anew
start = time.perf_counter()
code = main(["quantize", *sys.argv[1:]])
work = time.perf_counter() - start
print(json.dumps({"work_s": work, "peak_bytes": status("VmHWM") - before}), file=sys.stderr)
sys.exit(code)
"""


def run(source: Path, destination: Path, options: Sequence[str], threads: int) -> dict[str, float]:
    """One process; the bytes written are forced to the disk by the command itself."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    start = time.perf_counter()
    command = [sys.executable, "-c", CHILD, str(source), str(destination), *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{' '.join(options)} failed with {done.returncode}: {done.stderr[-2000:]}")
    measured: dict[str, float] = json.loads(done.stderr.splitlines()[-1])
    return measured | {"process_s": time.perf_counter() - start}


def measure(record: Record, source: Path, folder: Path, runs: int, threads: int) -> None:
    shard = max(file.stat().st_size for file in source.glob("*.safetensors"))
    for name, options in COMMANDS.items():
        found = [run(source, folder / f"{name}-{i}", options, threads) for i in range(runs)]
        row: dict[str, Any] = {"command": " ".join(options), "largest_shard_bytes": shard}
        for key in ("work_s", "process_s"):
            row[key] = round(statistics.median(one[key] for one in found), 2)
            row[f"all_{key}"] = [round(one[key], 2) for one in found]
        row["peak_bytes"] = int(max(one["peak_bytes"] for one in found))
        record.results.append(row)
        share = row["peak_bytes"] / shard
        print(
            f"{name:28} {row['work_s']:5.2f} s of work, {row['process_s']:5.2f} s with imports, peak above them "
            f"{row['peak_bytes'] / 1e6:5.0f} MB, {share:.2f} of the largest shard"
        )
        record.goal(f"{name}: seconds from disk to disk", row["work_s"], at_most=10.0)
        record.goal(f"{name}: peak memory over the largest shard", share, at_most=1.5)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args(argv)

    torch.set_num_threads(arguments.threads)  # what is recorded of this process, and what the others get
    record = Record(
        "quantize_checkpoint",
        "seconds and peak memory of quantizing SmolLM2-135M from disk to disk",
        f"median seconds and highest peak of {arguments.runs} processes; bf16, one file; page cache warm",
        packages=("safetensors",),
    )
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        model, _ = load("smollm2_perplexity").load_smollm2()
        model.to(torch.bfloat16).save_pretrained(source)
        del model
        measure(record, source, Path(folder), arguments.runs, arguments.threads)
    record.save()


if __name__ == "__main__":
    main()
