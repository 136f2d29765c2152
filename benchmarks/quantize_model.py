"""How long does quantizing a whole model take, and how much memory?

Three measurements: the seconds that `quantize_` takes for SmolLM2-135M-Instruct (fp32, 210 linears) on two
threads; the bits a weight that each format really holds; and the peak of what torch allocates while one layer
is quantized, as a multiple of the layer's own bytes. The peak is what torch's profiler sees from the CPU
allocator; the original is kept alive meanwhile, so it counts what comes on top of it, the result included.

    python benchmarks/quantize_model.py
"""

import argparse
import copy
import statistics
import time
from collections.abc import Sequence

import torch
from example_scripts import load
from record import Record
from torch.profiler import ProfilerActivity, profile

from mxquant import MXFP4Config, MXTensor, quantize, quantize_

BITS = {"mxfp4": 4.25, "mxfp6_e2m3": 6.25, "mxfp6_e3m2": 6.25, "mxfp8_e4m3": 8.25, "mxfp8_e5m2": 8.25, "nvfp4": 4.5}
SIZE = 4096


def peak_allocated(layer: torch.nn.Module, format_name: str) -> int:
    """The most bytes that torch's CPU allocator held at once for quantizing the layer, beyond what it held before."""
    original = layer[0].weight
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        quantize_(layer, format_name)
    changes = [event for event in run.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    del original  # alive until here, since its release would take as many bytes off the peak
    return peak


def measure_layer(record: Record, dtype: torch.dtype) -> None:
    """Bits a weight and peak allocations for one linear of 4096 x 4096, in each format."""
    for name, bits in BITS.items():
        layer = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE, bias=False, dtype=dtype)).requires_grad_(False)
        own = layer[0].weight.nbytes
        quantize(torch.randn(32, 32, dtype=dtype), name)  # tables that are built once are no part of the peak
        peak = peak_allocated(layer, name)
        weight = layer[0].weight
        assert isinstance(weight, MXTensor)
        held = 8 * (weight.qdata.nbytes + weight.scale.nbytes) / weight.numel()
        short = str(dtype).removeprefix("torch.")
        row = {"layer": f"{SIZE} x {SIZE}", "dtype": short, "format": name, "bits_a_weight": held}
        record.results.append({**row, "peak_over_own_bytes": round(peak / own, 3)})
        print(f"{short:9} {name:11} {held:5.2f} bits a weight   peak {peak / own:5.2f} x the layer's own bytes")
        record.goal(f"{name}, {short}: bits a weight", held, at_most=bits)
        record.goal(f"{name}, {short}: peak over the layer's own bytes", peak / own, at_most=3)


def measure_model(record: Record, runs: int) -> None:
    """Seconds to quantize the whole of SmolLM2 to MXFP4."""
    model, _ = load("smollm2_perplexity").load_smollm2()
    times = []
    for _ in range(runs):
        fresh = copy.deepcopy(model)
        start = time.perf_counter()
        quantize_(fresh, MXFP4Config())
        times.append(time.perf_counter() - start)
    median = statistics.median(times)
    row = {"model": "SmolLM2-135M-Instruct", "format": "mxfp4", "median_s": round(median, 3)}
    record.results.append({**row, "all_s": [round(value, 3) for value in times]})
    print(f"SmolLM2-135M-Instruct whole: median {median:.2f} s ({min(times):.2f} to {max(times):.2f})")
    record.goal("SmolLM2 whole, seconds", median, at_most=5.0)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args(argv)

    torch.set_num_threads(arguments.threads)
    record = Record(
        "quantize_model",
        "seconds to quantize SmolLM2-135M whole; bits a weight; peak allocations for one layer",
        f"median of {arguments.runs} runs on fp32 weights; peak by torch's profiler, result included, original not",
    )
    for dtype in (torch.bfloat16, torch.float32):
        measure_layer(record, dtype)
    measure_model(record, arguments.runs)
    record.save()


if __name__ == "__main__":
    main()
