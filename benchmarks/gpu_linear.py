"""How fast is a quantized linear on a GPU, against bf16 nn.Linear and other projects' kernels in the same run?

    python benchmarks/gpu_linear.py
    python benchmarks/gpu_linear.py --shapes 28672x8192 --rows 1 16 2048 --peers humming-kernels triton_kernels

Each version is captured in a CUDA graph that runs over enough copies of its weight to leave nothing in the L2 cache,
and replayed; activations are quantized inside. Medians of the replays, ratios to bf16, and the error of one output.
At one row also the host's time for an eager call; before all that, the quantizer against a copy, and what no linear
can be faster than. A peer that is not installed, or fails, is recorded with the reason. Needs a GPU.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from gpu_bounds import measure_bounds
from gpu_goals import check_goals
from gpu_quantizer import measure_quantizer
from gpu_timing import copies, graph_microseconds, host_microseconds
from peers import PACKAGES, PEERS, Linear, Version, described
from record import Record
from torch import Tensor, nn

from mxquant import MXFP4Config, explain, quantize, quantize_

SHAPES = ("28672x8192", "8192x8192", "4096x14336", "14336x4096", "4096x4096")
ROWS = (1, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
DEVICE = "cuda"


def plain(w: Tensor) -> nn.Linear:
    layer = nn.Linear(w.shape[1], w.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(w.clone(), requires_grad=False)
    return layer


def w4a4(w: Tensor) -> nn.Linear:
    layer = plain(w)
    quantize_(layer, MXFP4Config())
    return layer


def w4a16(w: Tensor) -> nn.Linear:
    layer = plain(w)
    quantize_(layer, MXFP4Config(activation=None))
    return layer


BF16 = Version("bf16", "torch", plain)
OWN = (BF16, Version("W4A4", "mxquant", w4a4, activation_scale_mode="even"), Version("W4A16", "mxquant", w4a16))


class Contest:
    """The versions at one shape, each with copies of one weight, built when it is first called."""

    def __init__(self, shape: tuple[int, int], preparing: dict[str, float]) -> None:
        self.w = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) * shape[1] ** -0.5
        self.on_grid = quantize(self.w, "mxfp4").dequantize()
        self.layers: dict[str, list[Linear]] = {}
        self.preparing = preparing

    def measure(self, version: Version, x: Tensor) -> dict[str, Any]:
        y = self.prepare(version, x)
        layers = self.layers[version.name]
        row: dict[str, Any] = {"backend": backend_of(version, layers[0])}
        row["us"] = round(graph_microseconds(lambda: [layer(x) for layer in layers], len(layers)), 2)
        row["error"] = float(f"{self.error(version, x, y):.2g}")
        if x.shape[0] == 1:
            row["host_us"] = round(host_microseconds(lambda: layers[0](x)), 1)
        return row

    def prepare(self, version: Version, x: Tensor) -> Tensor:
        """The output of a first call, for which a version may compile and tune; its time is counted."""
        start = time.perf_counter()
        try:
            if version.name not in self.layers:
                count = copies(self.w.numel() * (2 if version is BF16 else 17 / 32))
                self.layers[version.name] = [version.build(self.w) for _ in range(count)]
            y = self.layers[version.name][0](x)
            torch.cuda.synchronize()
        finally:
            self.preparing[version.name] += time.perf_counter() - start
        return y

    def error(self, version: Version, x: Tensor, y: Tensor) -> float:
        """Relative to the float32 product of the weight that it stands for and the activations that it takes."""
        mode = version.activation_scale_mode
        taken = x if mode is None else quantize(x, "mxfp4", scale_mode=mode).dequantize()
        exact = taken.float() @ (self.w if version is BF16 else self.on_grid).float().mT
        return ((y.reshape(exact.shape).float() - exact).norm() / exact.norm()).item()


def backend_of(version: Version, layer: Linear) -> str | None:
    if version is BF16:
        return "cuBLAS"
    return explain(layer).chosen if version in OWN else version.package


def measure(
    shape: str, rows: Iterable[int], versions: Sequence[Version], preparing: dict[str, float], patience: float
) -> Iterator[dict[str, Any]]:
    """A result for each number of rows and version; `preparing` counts the seconds that versions took to get ready."""
    contest = Contest(size_of(shape), preparing)
    for m in rows:
        x = torch.randn(m, contest.w.shape[1], device=DEVICE, dtype=torch.bfloat16)
        bf16 = 0.0
        for version in versions:
            row: dict[str, Any] = {"shape": shape, "rows": m, "version": version.name}
            if version not in OWN and preparing[version.name] > patience:
                yield row | {"failed": f"not run: compiling and tuning took more than {patience:g} s (--patience)"}
                continue
            try:
                row |= contest.measure(version, x)
            except Exception as error:
                if version in OWN:
                    raise
                yield row | {"failed": described(error)}
                continue
            bf16 = row["us"] if version is BF16 else bf16
            yield row | {"times_bf16": round(bf16 / row["us"], 3)}


def present(packages: Sequence[str], record: Record) -> list[Version]:
    """The peers to measure; a line of the record for each other."""
    found = []
    for peer in PEERS:
        reason = peer.why_absent() if peer.package in packages else "not asked for (--peers)"
        if reason is None:
            found.append(peer)
        else:
            record.results.append({"version": peer.name, "absent": reason})
            print(f"{peer.name}: {reason}", flush=True)
    return found


def size_of(shape: str) -> tuple[int, int]:
    n, k = map(int, shape.split("x"))
    return n, k


@torch.no_grad()
@torch._dynamo.config.patch(recompile_limit=len(SHAPES) * len(ROWS))  # torchao's, for each shape and number of rows
def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="out features x in features, as in 4096x14336")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--peers", nargs="*", choices=PACKAGES, default=PACKAGES, help="default: all that are there")
    parser.add_argument(
        "--patience", type=float, default=60, help="seconds of compiling and tuning after which a peer is left out"
    )
    arguments = parser.parse_args(argv)
    if DEVICE == "cuda" and not torch.cuda.is_available():
        parser.error("needs a GPU that torch can use; cpu_linear.py measures a CPU")
    method = "medians of CUDA graph replays; error: relative to the float32 product, in Frobenius norm"
    record = Record("gpu_linear", "time of a quantized linear on a GPU, bf16 inputs", method, PACKAGES)
    versions = [*OWN, *present(arguments.peers, record)]
    bounds = measure_bounds(map(size_of, arguments.shapes), arguments.rows, DEVICE)
    for row in (*measure_quantizer(DEVICE), *bounds):
        record.results.append(row)
        print(row, flush=True)
    preparing: defaultdict[str, float] = defaultdict(float)
    for shape in arguments.shapes:
        for row in measure(shape, arguments.rows, versions, preparing, arguments.patience):
            record.results.append(row)
            outcome = row.get("failed") or f"{row['us']:9.1f} us  {row['times_bf16']:5.2f}x  error {row['error']:.1e}"
            print(f"{shape:>11} M={row['rows']:<5} {row['version']:22} {outcome}", flush=True)
        record.write()
    for name, seconds in preparing.items():
        record.results.append({"prepared": name, "seconds": round(seconds, 1)})
        print(f"{name}: {seconds:.1f} s of building, compiling and tuning", flush=True)
    check_goals(record)
    record.save()


if __name__ == "__main__":
    main()
