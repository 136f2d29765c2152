"""How long does an emulated linear take on a CPU, against bf16 `nn.Linear` and against torchao's emulation?

One bf16 linear of 4096 x 4096, in four versions: as it is, W4A16 and W4A4 (MXFP4) by this package's emulation,
and W4A4 by torchao's (it has no weight-only MX on a CPU). In each round every version is timed once, one right
after the other, so that a busy machine slows all of them alike. Reported for each number of rows M: the median
time, and the ratio of the medians to bf16's, with the quartiles of the ratios within a round.

    python benchmarks/cpu_linear.py
    python benchmarks/cpu_linear.py --rows 1 --rounds 40
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from record import Record
from torchao.prototype.mx_formats import MXDynamicActivationMXWeightConfig
from torchao.quantization import quantize_ as torchao_quantize_
from torchao.quantization.quantize_.common import KernelPreference

from mxquant import MXFP4Config, quantize_

VERSIONS = ("bf16", "W4A16", "W4A4", "torchao W4A4")
GOALS = {(1, "W4A16"): 4.5, (128, "W4A16"): 1.6, (1, "W4A4"): 6.0, (128, "W4A4"): 2.0}
"""The largest ratio to bf16 that is wanted, by number of rows and version."""


def make_versions(size: int) -> dict[str, torch.nn.Module]:
    """The same linear in each version, within an nn.Sequential, since only submodules are quantized."""
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(size, size, bias=False)).to(torch.bfloat16).requires_grad_(False)
    versions = {name: copy.deepcopy(plain) for name in VERSIONS}
    quantize_(versions["W4A16"], MXFP4Config(activation=None, backend="emulation"))
    quantize_(versions["W4A4"], MXFP4Config(backend="emulation"))
    theirs = MXDynamicActivationMXWeightConfig(
        activation_dtype=torch.float4_e2m1fn_x2,
        weight_dtype=torch.float4_e2m1fn_x2,
        kernel_preference=KernelPreference.EMULATED,
    )
    torchao_quantize_(versions["torchao W4A4"], theirs)
    return versions


def seconds(call: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


@torch.inference_mode()
def measure(versions: dict[str, torch.nn.Module], x: torch.Tensor, rounds: int) -> dict[str, list[float]]:
    """Seconds a call: for each version a value for each round."""
    calls = {}
    for name, version in versions.items():
        version(x)  # whatever is built once, such as decoding tables
        calls[name] = max(1, round(0.02 / seconds(lambda version=version: version(x), 1)))  # 20 ms or more a sample
    times: dict[str, list[float]] = {name: [] for name in versions}
    for _ in range(rounds):
        for name, version in versions.items():
            times[name].append(seconds(lambda version=version: version(x), calls[name]))
    return times


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4096, help="in and out features (default 4096)")
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1, 16, 128], help="rows of the input (default 1 16 128)"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args(argv)

    torch.set_num_threads(arguments.threads)
    versions = make_versions(arguments.size)
    record = Record(
        "cpu_linear",
        f"time of an emulated linear, {arguments.size} x {arguments.size}, bf16, on a CPU",
        f"medians of {arguments.rounds} rounds, each timing every version in turn; ratios to bf16 nn.Linear",
    )
    for rows in arguments.rows:
        x = torch.randn(rows, arguments.size, dtype=torch.bfloat16)
        times = measure(versions, x, arguments.rounds)
        median = {name: statistics.median(values) for name, values in times.items()}
        for name, values in times.items():
            ratio = median[name] / median["bf16"]
            low, _, high = statistics.quantiles((a / b for a, b in zip(values, times["bf16"], strict=True)), n=4)
            print(f"M={rows:<4} {name:14} {median[name] * 1e3:9.2f} ms  {ratio:6.2f} x bf16  ({low:.2f} to {high:.2f})")
            row = {"rows": rows, "version": name, "median_ms": round(median[name] * 1e3, 3), "ratio": round(ratio, 3)}
            record.results.append({**row, "ratio_quartiles": [round(low, 3), round(high, 3)]})
            if arguments.size == 4096 and (rows, name) in GOALS:
                record.goal(f"{name}, M={rows}, times bf16", ratio, at_most=GOALS[rows, name])
        if arguments.size == 4096 and rows == 1:
            record.goal("W4A4, M=1, times faster than torchao", median["torchao W4A4"] / median["W4A4"], at_least=10)
    record.save()


if __name__ == "__main__":
    main()
