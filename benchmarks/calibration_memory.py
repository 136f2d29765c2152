"""How much memory does GPTQ take on a whole model, beyond what the loaded model takes?

The peak of the process's resident memory (the kernel's own count, VmHWM) while `quantize_` runs on
SmolLM2-135M-Instruct, less what is resident when the model is loaded and the calibration tokens are there. Each mode
runs in a process of its own. What the allocator keeps of freed memory after loading is given back first, so that it
cannot be used unseen; what it keeps meanwhile counts. Linux with glibc only.

    python benchmarks/calibration_memory.py
"""

import argparse
import ctypes
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from example_scripts import load
from record import Record

from mxquant import GPTQ, MXFP4Config, quantize_

MODES = {"parallel": False, "sequential": True}
_PROCESS = Path("/proc/self")


def resident_bytes(field: str) -> int:
    """VmRSS, what is resident now, or VmHWM, the most that ever was."""
    (line,) = (line for line in (_PROCESS / "status").read_text().splitlines() if line.startswith(f"{field}:"))
    return 1024 * int(line.split()[1])


def held_bytes() -> int:
    """What is resident when the allocator has given back what is free."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return resident_bytes("VmRSS")


def measure(mode: str, tokens: int, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    example = load("smollm2_gptq")
    example.logging.disable_progress_bar()
    model, tokenizer = example.load_smollm2()
    batches = example.wikipedia_windows(tokenizer, tokens, 0)
    model_bytes = sum(parameter.nbytes for parameter in model.parameters())
    loaded = held_bytes()
    (_PROCESS / "clear_refs").write_text("5")  # sets VmHWM to VmRSS, see proc_pid_clear_refs(5)
    start = time.perf_counter()
    quantize_(model, MXFP4Config(rotation=32, algorithm=GPTQ(sequential=MODES[mode])), calibration=batches)
    seconds = time.perf_counter() - start
    peak = resident_bytes("VmHWM")
    return {
        "model": "SmolLM2-135M-Instruct",
        "mode": mode,
        "tokens": tokens,
        "fp32_model_bytes": model_bytes,
        "loaded_bytes": loaded,
        "peak_above_loaded_bytes": peak - loaded,
        "quantized_bytes": held_bytes(),
        "seconds": round(seconds, 1),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=12_288, help="to calibrate on, a multiple of 512 (default 12288)")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args(argv)

    record = Record(
        "calibration_memory",
        "peak resident memory of rotated GPTQ on SmolLM2-135M whole, beyond the loaded model",
        f"MXFP4, rotation 32, {arguments.tokens} tokens in batches of 8 x 512; VmHWM while quantize_ runs, less VmRSS "
        "before it",
    )
    for mode in arguments.modes:
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            row = process.submit(measure, mode, arguments.tokens, arguments.threads).result()
        record.results.append(row)
        times = row["peak_above_loaded_bytes"] / row["fp32_model_bytes"]
        print(f"{mode}: {row['peak_above_loaded_bytes']:,} bytes above the loaded model, {times:.2f} of its fp32 bytes")
        record.goal(f"{mode}: peak above the loaded model, of the fp32 model", times, at_most=1)
    record.save()


if __name__ == "__main__":
    main()
