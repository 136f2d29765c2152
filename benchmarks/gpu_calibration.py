"""How long does GPTQ take on a GPU, and how much of its memory, with the model there and with the model on the CPU?

Llama models of transformers with random bf16 weights, in the sizes of real ones: times do not depend on the values.
`device`: the model stays on the CPU, and its blocks go to the GPU one after the other, by `quantize_(..., device=...)`.
The peak is that of torch's allocations while `quantize_` runs, beyond those before it; where the model is on the GPU,
the model's own are added.

    python benchmarks/gpu_calibration.py
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from record import Record
from transformers import LlamaConfig, LlamaForCausalLM

from mxquant import GPTQ, MXFP4Config, quantize_

DEVICE = "cuda"


class Size(NamedTuple):
    hidden: int
    intermediate: int
    heads: int
    key_value_heads: int
    blocks: int


SIZES = {"SmolLM2-135M": Size(576, 1536, 9, 3, 30), "8 blocks of Llama-3.1-8B": Size(4096, 14336, 32, 8, 8)}
PLACES = ("gpu", "device")
MODES = {"parallel": False, "sequential": True}


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


def measure(size: Size, place: str, sequential: bool, tokens: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = model_of(size)
    model_bytes = sum(parameter.nbytes for parameter in model.parameters())
    if place == "gpu":
        model.to(DEVICE)
    ids = torch.randint(0, 4096, (tokens // 512, 512))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    quantize_(
        model,
        MXFP4Config(rotation=32, algorithm=GPTQ(sequential=sequential)),
        calibration=ids.split(8),
        device=None if place == "gpu" else DEVICE,
    )
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() - before + (model_bytes if place == "gpu" else 0)
    return {"tokens": tokens, "model_bytes": model_bytes, "peak_bytes": peak, "seconds": round(seconds, 2)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=12_288, help="to calibrate on, a multiple of 512 (default 12288)")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--places", nargs="+", choices=PLACES, default=list(PLACES))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    arguments = parser.parse_args(argv)
    if DEVICE == "cuda" and not torch.cuda.is_available():
        parser.error("needs a GPU that torch can use; calibrated_accuracy.py measures a CPU")

    record = Record(
        "gpu_calibration",
        "seconds and peak memory of rotated GPTQ on a GPU, the model there or on the CPU",
        f"MXFP4, rotation 32, random bf16 weights, {arguments.tokens} tokens in batches of 8 x 512; one run after one "
        "that is not measured",
    )
    warm = Size(64, 128, 2, 1, 1)
    for place in arguments.places:
        measure(warm, place, True, 512)  # compiles kernels, starts libraries
    for name in arguments.sizes:
        for place in arguments.places:
            for mode in arguments.modes:
                row = measure(SIZES[name], place, MODES[mode], arguments.tokens)
                record.results.append({"size": name, "place": place, "mode": mode} | row)
                peak = row["peak_bytes"] / row["model_bytes"]
                print(f"{name}, {place}, {mode}: {row['seconds']} s, peak {peak:.2f} of the model's bytes")
    record.save()


if __name__ == "__main__":
    main()
