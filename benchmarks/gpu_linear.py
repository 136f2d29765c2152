"""How fast is a quantized linear on a GPU, against bf16 nn.Linear in the same run?

    python benchmarks/gpu_linear.py

Each version is captured in a CUDA graph that runs over enough copies of its weight to leave nothing in the L2 cache,
and replayed; activations are quantized inside. Medians of the replays, and ratios to bf16. Also the host's time for one
eager call, and the quantizer against a copy. Needs a GPU.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from record import Record
from torch import nn

from mxquant import MXFP4Config, explain, quantize, quantize_

SHAPES = ((28672, 8192), (8192, 8192), (4096, 14336), (14336, 4096), (4096, 4096))
ROWS = (1, 16, 32, 64, 128, 256, 512, 2048, 8192)
CONFIGS = {"W4A4": MXFP4Config(), "W4A16": MXFP4Config(activation=None)}
# What one capture reads at least, several times the L2 cache of any GPU so far.
BYTES = 400 << 20


def microseconds(run: Callable[[], object], runs: int, replays: int = 20) -> float:
    """Median time of one of the `runs` calls that `run` makes, from replays of a CUDA graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / runs)
    return statistics.median(times)


def host_microseconds(layer: nn.Module, x: torch.Tensor, calls: int = 300) -> float:
    """What one eager call costs before the GPU has done anything."""
    for _ in range(20):
        layer(x)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        layer(x)
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed / calls * 1e6


def copies_of(shape: tuple[int, int], bytes_a_weight: float, config: MXFP4Config | None) -> list[nn.Linear]:
    n, k = shape
    layers = []
    for _ in range(max(1, round(BYTES / (n * k * bytes_a_weight)))):
        layer = nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
        if config is not None:
            quantize_(layer, config)
        layers.append(layer)
    return layers


def measure(shape: tuple[int, int], rows: Sequence[int], record: Record) -> None:
    versions = {"bf16": copies_of(shape, 2, None)}
    versions |= {name: copies_of(shape, 17 / 32, config) for name, config in CONFIGS.items()}
    for m in rows:
        x = torch.randn(m, shape[1], device="cuda", dtype=torch.bfloat16)
        times = {}
        for name, layers in versions.items():
            times[name] = microseconds(lambda layers=layers, x=x: [layer(x) for layer in layers], len(layers))
        for name, taken in times.items():
            backend = "cuBLAS" if name == "bf16" else explain(versions[name][0]).chosen
            row = {"shape": f"{shape[0]}x{shape[1]}", "rows": m, "version": name, "backend": backend}
            record.results.append({**row, "us": round(taken, 2), "times_bf16": round(times["bf16"] / taken, 3)})
        line = "  ".join(f"{name} {taken:8.1f} us ({times['bf16'] / taken:4.2f}x)" for name, taken in times.items())
        print(f"{shape[0]:5}x{shape[1]:<5} M={m:<5} {line}", flush=True)
    x = torch.randn(1, shape[1], device="cuda", dtype=torch.bfloat16)
    hosts = {name: round(host_microseconds(layers[0], x), 1) for name, layers in versions.items()}
    print(f"{shape[0]:5}x{shape[1]:<5} host, one eager call, us: {hosts}", flush=True)
    record.results.append({"shape": f"{shape[0]}x{shape[1]}", "host_us": hosts})


def measure_quantizer(record: Record) -> None:
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(x)
    copied = 2 * x.nbytes / microseconds(lambda: target.copy_(x), 1)
    for name in ("mxfp4", "mxfp6_e2m3", "mxfp8_e4m3"):
        result = quantize(x, name)
        rate = (x.nbytes + result.nbytes) / microseconds(lambda name=name: quantize(x, name), 1)
        print(f"quantize 8192x8192 to {name}: {rate / 1e6:.2f} TB/s, {rate / copied:.0%} of a copy's")
        record.results.append({"quantize": name, "tb_s": round(rate / 1e6, 3), "of_copy": round(rate / copied, 3)})


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    arguments = parser.parse_args(argv)
    record = Record("gpu_linear", "time of a quantized linear on a GPU, bf16 inputs", "medians of CUDA graph replays")
    for shape in SHAPES:
        measure(shape, arguments.rows, record)
    measure_quantizer(record)
    record.save()


if __name__ == "__main__":
    main()
