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
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from gpu_quantizer import measure_quantizer
from gpu_timing import copies, host_microseconds
from peers import PACKAGES, PEERS, Linear, Version, described
from record import Record
from torch import Tensor, nn

from mxquant import MXFP4Config, explain, quantize, quantize_
from mxquant.tuning import graph_microseconds

SHAPES = ("28672x8192", "8192x8192", "4096x14336", "14336x4096", "4096x4096")
ROWS = (1, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
DEVICE = "cuda"
FP8_ROWS = 2048
"""Rows from which an FP8 product takes longer than dequantizing the weight."""
READ_WORDS = 8192
"""Words of a program that reads: 32 KiB, 16 bytes a thread at a time."""


@dataclass(frozen=True)
class Goal:
    """`version` is to be `at_least` so many times as fast as `baseline`, wherever both were measured."""

    version: str
    baseline: str
    rows: range
    at_least: float


DECODE, FEW, SOME, MANY = range(1, 17), range(32, 65), range(128, 513), range(1024, 1 << 20)
GOALS = (
    Goal("W4A16", "bf16", DECODE, 2.6),
    Goal("W4A16", "Humming W4A16", DECODE, 1.15),
    Goal("W4A16", "triton_kernels W4A16", DECODE, 1.2),
    Goal("W4A16", "bf16", FEW, 1.8),
    Goal("W4A16", "Humming W4A16", FEW, 1.1),
    Goal("W4A16", "triton_kernels W4A16", FEW, 1.1),
    Goal("W4A16", "bf16", SOME, 1.1),
    Goal("W4A16", "bf16", MANY, 0.95),
    Goal("W4A16", "triton_kernels W4A16", MANY, 1.15),
    Goal("W4A4", "bf16", DECODE, 3.1),
    Goal("W4A4", "Humming W4A8", DECODE, 1.1),
    Goal("W4A4", "bf16", range(64, 65), 2.5),
    Goal("W4A4", "Humming W4A8", range(64, 65), 1.05),
    Goal("W4A4", "bf16", range(128, 129), 1.9),
    Goal("W4A4", "bf16", range(512, 513), 1.45),
    Goal("W4A4", "bf16", range(2048, 2049), 1.65),
    Goal("W4A4", "Humming W4A8", range(2048, 2049), 1.15),
    Goal("W4A4", "torchao W4A4", range(2048, 2049), 10),
    Goal("W4A4", "bf16", range(8192, 8193), 1.85),
)
SHAPE = "28672x8192"
ELSEWHERE = 0.85
"""How much of a goal is wanted at the other shapes."""


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


def measure_bounds(shapes: Iterable[tuple[int, int]], rows: Iterable[int], device: str) -> Iterator[dict[str, Any]]:
    """What no linear can be faster than.

    Launches that depend on each other; reading the weight's codes and scales; for many rows of W4A4 on FP8 tensor
    cores, cuBLAS's FP8 product with promoted sums.
    """
    yield {"bound": "launches", "us": round(launches(device), 2)}
    many = [m for m in rows if m >= FP8_ROWS]
    for n, k in shapes:
        shape = f"{n}x{k}"
        taken = reading(n * k * 17 // 32, device)
        yield {
            "bound": "reading",
            "shape": shape,
            "us": round(taken, 2),
            "tb_s": round(n * k * 17 / 32 / taken / 1e6, 2),
        }
        for m in many:
            yield {"bound": "FP8 product", "shape": shape, "rows": m, "us": round(fp8_product(m, n, k, device), 2)}


def launches(device: str) -> float:
    """Of a W4A4 linear with next to nothing to compute."""
    layer = nn.Linear(256, 64, bias=False, device=device, dtype=torch.bfloat16)
    quantize_(layer, MXFP4Config())
    x = torch.randn(1, 256, device=device, dtype=torch.bfloat16)
    return graph_microseconds(lambda: [layer(x) for _ in range(100)], 100)


def reading(size: int, device: str) -> float:
    """Bytes that are not in the cache, into registers."""
    buffers = [torch.zeros(size // 4, dtype=torch.int32, device=device) for _ in range(copies(size))]
    grid = (triton.cdiv(size // 4, READ_WORDS),)
    found = torch.empty(grid[0], dtype=torch.int32, device=device)
    return graph_microseconds(
        lambda: [_read_kernel[grid](b, found, size // 4, READ_WORDS) for b in buffers], len(buffers)
    )


@triton.jit
def _read_kernel(words: tl.tensor, found: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    largest = tl.max(tl.load(words + at, mask=at < size, other=0), 0)
    if largest != 0:  # never: nothing is written
        tl.store(found + tl.program_id(0), largest)


def fp8_product(m: int, n: int, k: int, device: str) -> float:
    """By cuBLAS, with one scale a row on both sides."""

    def operand(rows: int) -> tuple[Tensor, Tensor]:
        values = torch.randn(rows, k, device=device, dtype=torch.bfloat16).to(torch.float8_e4m3fn)
        return values, torch.ones(rows, 1, device=device)

    (x, x_scale), (w, w_scale) = operand(m), operand(n)
    options = {"out_dtype": torch.bfloat16, "use_fast_accum": False}
    return graph_microseconds(lambda: [torch._scaled_mm(x, w.t(), x_scale, w_scale.t(), **options)], 1)


def check_goals(record: Record) -> None:
    """Add to the record each goal that its results tell about."""
    check_linears(record)
    check_quantizer(record)


def check_linears(record: Record) -> None:
    measured = [row for row in record.results if "version" in row and "us" in row]
    times = {(row["shape"], row["rows"], row["version"]): row["us"] for row in measured}
    for goal in GOALS:
        for (shape, rows, version), taken in times.items():
            baseline = times.get((shape, rows, goal.baseline))
            if version == goal.version and rows in goal.rows and baseline is not None:
                at_least = goal.at_least if shape == SHAPE else round(goal.at_least * ELSEWHERE, 3)
                record.goal(f"{version} times {goal.baseline}, {shape}, M={rows}", baseline / taken, at_least=at_least)


def check_quantizer(record: Record) -> None:
    for row in (row for row in record.results if "quantize" in row):
        what = f"quantize to {row['quantize']}, {row['rows']}x{row['columns']}"
        if row["rows"] <= 16:
            record.goal(f"{what}, us", row["us"], at_most=4)
        if row["rows"] * row["columns"] >= 16_000_000:
            record.goal(f"{what}, of a copy's rate", row["of_copy"], at_least=0.85)
            if "rotated_us" in row:
                record.goal(f"{what}, rotated, times as long", row["rotated_us"] / row["us"], at_most=1.15)
        if "torchao_us" in row:
            record.goal(f"{what}, times torchao compiled", row["torchao_us"] / row["us"], at_least=1.0)


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
