"""How long does GPTQ take on a whole model, and how much memory beyond the model's?

    python benchmarks/calibration.py                      # on a CPU: SmolLM2-135M-Instruct (Linux with glibc)
    python benchmarks/calibration.py --device cuda        # on a GPU: random weights in the sizes of real models

On a CPU the peak is that of the process's resident memory (the kernel's own count, VmHWM) while `quantize_` runs, less
what is resident once the model and the calibration tokens are loaded. Each mode runs in a process of its own. Memory
that the allocator keeps after loading is given back first, so that it cannot be used unseen.

On a GPU the model is there (`gpu`), or stays on the CPU while its blocks go to the GPU one at a time (`device`:
`quantize_(..., device=...)`). The peak is that of torch's allocations while `quantize_` runs, less those before it. If
the model is on the GPU, its own bytes are added. Times do not depend on the values of the weights.
"""

import argparse
import ctypes
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from example_scripts import load
from record import Record
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from mxquant import GPTQ, MXFP4Config, quantize_

GPU = "cuda"
MODES = {"parallel": False, "sequential": True}
PLACES = ("gpu", "device")
_PROCESS = Path("/proc/self")


class Size(NamedTuple):
    hidden: int
    intermediate: int
    heads: int
    key_value_heads: int
    blocks: int


SIZES = {"SmolLM2-135M": Size(576, 1536, 9, 3, 30), "8 blocks of Llama-3.1-8B": Size(4096, 14336, 32, 8, 8)}


def bytes_of(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def calibrate(model: nn.Module, mode: str, batches: Sequence[Any], device: str | None = None) -> float:
    """Seconds of rotated GPTQ."""
    start = time.perf_counter()
    config = MXFP4Config(rotation=32, algorithm=GPTQ(sequential=MODES[mode]))
    quantize_(model, config, calibration=batches, device=device)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


# On a CPU


def resident_bytes(field: str) -> int:
    """VmRSS, what is resident now, or VmHWM, the most that ever was."""
    (line,) = (line for line in (_PROCESS / "status").read_text().splitlines() if line.startswith(f"{field}:"))
    return 1024 * int(line.split()[1])


def held_bytes() -> int:
    """What is resident once the allocator has given back what is free."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return resident_bytes("VmRSS")


def measure_cpu(mode: str, tokens: int, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    example = load("smollm2_gptq")
    example.logging.disable_progress_bar()
    model, tokenizer = example.load_smollm2()
    batches = example.wikipedia_windows(tokenizer, tokens, 0)
    model_bytes, loaded = bytes_of(model), held_bytes()
    (_PROCESS / "clear_refs").write_text("5")  # sets VmHWM to VmRSS, see proc_pid_clear_refs(5)
    seconds = calibrate(model, mode, batches)
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


def record_cpu(arguments: argparse.Namespace) -> Record:
    record = Record(
        "calibration_memory",
        "peak resident memory of rotated GPTQ on SmolLM2-135M whole, beyond the loaded model",
        f"MXFP4, rotation 32, {arguments.tokens} tokens in batches of 8 x 512; VmHWM while quantize_ runs, less VmRSS "
        "before it",
    )
    for mode in arguments.modes:
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            row = process.submit(measure_cpu, mode, arguments.tokens, arguments.threads).result()
        record.results.append(row)
        times = row["peak_above_loaded_bytes"] / row["fp32_model_bytes"]
        print(f"{mode}: {row['peak_above_loaded_bytes']:,} bytes above the loaded model, {times:.2f} of its fp32 bytes")
        record.goal(f"{mode}: peak above the loaded model, of the fp32 model", times, at_most=1)
    return record


# On a GPU


def model_of(size: Size) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_value_heads,
        num_hidden_layers=size.blocks,
        vocab_size=4096,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def measure_gpu(size: Size, place: str, mode: str, tokens: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = model_of(size)
    model_bytes = bytes_of(model)
    if place == "gpu":
        model.to(GPU)
    ids = torch.randint(0, 4096, (tokens // 512, 512))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    seconds = calibrate(model, mode, ids.split(8), None if place == "gpu" else GPU)
    peak = torch.cuda.max_memory_allocated() - before + (model_bytes if place == "gpu" else 0)
    return {"tokens": tokens, "model_bytes": model_bytes, "peak_bytes": peak, "seconds": round(seconds, 2)}


def record_gpu(arguments: argparse.Namespace) -> Record:
    record = Record(
        "gpu_calibration",
        "seconds and peak memory of rotated GPTQ on a GPU, the model there or on the CPU",
        f"MXFP4, rotation 32, random bf16 weights, {arguments.tokens} tokens in batches of 8 x 512; one run after one "
        "that is not measured",
    )
    for place in arguments.places:
        measure_gpu(Size(64, 128, 2, 1, 1), place, "sequential", 512)  # compiles kernels, starts libraries
    for name in arguments.sizes:
        for place in arguments.places:
            for mode in arguments.modes:
                row = measure_gpu(SIZES[name], place, mode, arguments.tokens)
                record.results.append({"size": name, "place": place, "mode": mode} | row)
                peak = row["peak_bytes"] / row["model_bytes"]
                print(f"{name}, {place}, {mode}: {row['seconds']} s, peak {peak:.2f} of the model's bytes")
    return record


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tokens", type=int, default=12_288, help="to calibrate on, a multiple of 512 (default 12288)")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--threads", type=int, default=2, help="of a CPU")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="of models on a GPU")
    parser.add_argument("--places", nargs="+", choices=PLACES, default=list(PLACES), help="of models beside a GPU")
    arguments = parser.parse_args(argv)
    if arguments.device == "cpu":
        record_cpu(arguments).save()
        return
    if GPU == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU that torch can use")
    record_gpu(arguments).save()


if __name__ == "__main__":
    main()
