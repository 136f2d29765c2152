"""What does one eager call of a quantized linear or expert block cost the host, and where does that time go?

    python benchmarks/host_overhead.py
    python benchmarks/host_overhead.py --rows 16 --shape 8192 8192

Microseconds until the call returns, before the GPU has done anything: best of several rounds, between which the GPU is
waited for. Each Triton kernel of a call is launched alone, too, and a whole call as it is while a profiler listens:
Triton itself launches then. With `--device cpu` there are no kernels, and the emulated product is part of the time.
"""

import argparse
import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from record import Record
from torch import Tensor, nn

from mxquant import MXFP4Config, experts_forward, explain, quantize_, register_backend, register_experts_layout
from mxquant.backends import Backend, Groups, Operand, Problem, get_backend, unregister_backend
from mxquant.tensor import MXTensor, grouped_product
from mxquant.tensor.choose import describe
from mxquant.tensor.product import product

CONFIGS = {"W4A4": MXFP4Config(), "W4A16": MXFP4Config(activation=None)}


def best_host_microseconds(call: Callable[[], object], calls: int = 200, rounds: int = 15) -> float:
    """Few enough calls a round that none waits for room in the GPU's queue."""
    best = float("inf")
    for _ in range(rounds):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls)
    return round(best * 1e6, 2)


class DoNothing(Backend):
    """What is left of a call is what every backend pays."""

    name = "do_nothing"
    gates = True
    results: ClassVar[dict[int, Tensor]] = {}
    """By their widths, as making a tensor takes long."""

    def reject(self, problem: Problem) -> str | None:
        return None

    def matmul(self, x: Tensor, weight: Operand, bias: Tensor | None, problem: Problem) -> Tensor:
        return self.results[problem.out_features]

    def grouped_matmul(
        self, x: Tensor, weights: Operand, bias: Tensor | None, groups: Groups, problem: Problem
    ) -> Tensor:
        return self.results[problem.out_features]


class Experts(nn.Module):
    """A block of `count` experts, [count, N, K] each."""

    def __init__(self, count: int, hidden: int, width: int, device: torch.device) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, 2 * width, hidden, dtype=torch.bfloat16, device=device))
        self.down = nn.Parameter(torch.randn(count, hidden, width, dtype=torch.bfloat16, device=device))


register_experts_layout(Experts, {"up": -1, "down": -1}, up="up", down="down", gate_order="halves")


@contextlib.contextmanager
def launched_by_triton() -> Iterator[None]:
    """Somebody listens to launches."""
    import triton

    def hear(data: object) -> None:
        pass

    triton.knobs.runtime.launch_enter_hook.add(hear)
    try:
        yield
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hear)


def launches_of(call: Callable[[], object]) -> list[tuple[str, Callable[[], object]]]:
    """The launches that the plan of a call makes, by the kernels' names."""
    from mxquant.kernels.runtime.plan import Plan

    made: list[tuple[str, Callable[[], object]]] = []
    call_plan = Plan.__call__

    def note(name: str, run: Callable[..., object], *arguments: Any) -> None:
        made.append((name, functools.partial(run, *arguments)))

    def noting(plan: Plan, *given: Tensor) -> Tensor:
        launches, names = plan._launches, [step.kernel.ordinary.__name__ for step in plan._steps]
        plan._launches = [
            (functools.partial(note, name, run), pick) for name, (run, pick) in zip(names, launches, strict=True)
        ]
        try:
            return call_plan(plan, *given)
        finally:
            plan._launches = launches

    Plan.__call__ = noting  # type: ignore[method-assign]
    try:
        call()
    finally:
        Plan.__call__ = call_plan  # type: ignore[method-assign]
    return made


class Report:
    """Prints each figure as it is measured, and keeps it."""

    def __init__(self, record: Record) -> None:
        self.record = record

    def __call__(self, version: str, part: str, call: Callable[[], object]) -> float:
        taken = best_host_microseconds(call)
        print(f"{version:8} {part:44} {taken:8.2f} us", flush=True)
        self.record.results.append({"version": version, "part": part, "us": taken})
        return taken


def measure(name: str, layer: nn.Linear, x: Tensor, report: Report, triton: bool) -> float:
    weight = layer.weight
    backend = get_backend(explain(layer).chosen)
    problem, operand, rows = describe(weight, x.dtype), weight.operand, x.reshape(-1, x.shape[-1])
    total = report(name, f"layer(x), backend {backend.name}", lambda: layer(x))
    report(name, "  F.linear", lambda: F.linear(x, weight))
    with torch._C.DisableTorchFunctionSubclass():
        report(name, "    product", lambda: product(x, weight, -1))
        report(name, "      describe", lambda: describe(weight, x.dtype))
    report(name, "      backend.matmul", lambda: backend.matmul(rows, operand, None, problem))
    if not triton:
        return total
    for kernel, launch in launches_of(lambda: layer(x)):
        report(name, f"        {kernel}", launch)
    with launched_by_triton():
        report(name, "layer(x), launched by Triton", lambda: layer(x))
    return total


def measure_nothing(n: int, x: Tensor, report: Report) -> None:
    """A linear, an expert block and one product of it, of a backend that does nothing."""
    experts, hidden, width, k = 8, 64, 96, 2
    block = Experts(experts, hidden, width, x.device)
    layer = nn.Linear(x.shape[-1], n, bias=False, device=x.device, dtype=torch.bfloat16).requires_grad_(False)
    token = torch.randn(1, hidden, dtype=torch.bfloat16, device=x.device)
    ids, weights = torch.arange(k, device=x.device).view(1, k), torch.rand(1, k, device=x.device)
    offsets = torch.tensor([1, *[k] * (experts - 1)], dtype=torch.int32, device=x.device)
    groups = Groups(offsets, torch.zeros(k, dtype=torch.int64, device=x.device))
    shapes = {n: x.shape[0], 2 * width: k, hidden: k}
    DoNothing.results = {size: x.new_zeros(rows, size) for size, rows in shapes.items()}
    register_backend(DoNothing)
    for module in (layer, block):
        quantize_(module, MXFP4Config(backend=DoNothing.name))
    up = block.up
    assert isinstance(up, MXTensor)
    report("W4A4", "layer(x), of a backend that does nothing", lambda: layer(x))
    report("W4A4", "experts, of a backend that does nothing", lambda: experts_forward(block, token, ids, weights))
    report("W4A4", "  one of its two products", lambda: grouped_product(token, up, -1, groups))
    unregister_backend(DoNothing.name)


def measure_parts(x: Tensor, n: int, report: Report) -> None:
    """Of torch, what a call is made of."""
    words = torch.empty(1024, dtype=torch.uint8, device=x.device)
    module = nn.Identity()
    report("torch", "an empty nn.Module's call", lambda: module(x))
    report("torch", "torch.empty", lambda: torch.empty(x.shape[0], n, dtype=x.dtype, device=x.device))
    report("torch", "view as int32", lambda: words.view(torch.int32))
    report("torch", "reshape to the same shape", lambda: x.reshape(x.shape))

    def change_device() -> None:
        with torch.cuda.device_of(x):
            pass

    report("torch", "torch.cuda.device_of", change_device)


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--shape", type=int, nargs=2, default=(4096, 4096), metavar=("N", "K"))
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args(argv)
    if torch.device(arguments.device).type == "cuda" and not torch.cuda.is_available():
        parser.error("needs a GPU that torch can use; cpu_linear.py measures a CPU")
    (n, k), device = arguments.shape, torch.device(arguments.device)
    record = Record("host_overhead", "host time of one eager call of a linear", "best of rounds of 200 calls, no_grad")
    report = Report(record)

    def linear(config: MXFP4Config | None) -> nn.Linear:
        layer = nn.Linear(k, n, bias=False, device=device, dtype=torch.bfloat16).requires_grad_(False)
        if config is not None:
            quantize_(layer, config)
        return layer

    x = torch.randn(arguments.rows, k, device=device, dtype=torch.bfloat16)
    plain = linear(None)
    totals = {"bf16": report("bf16", "layer(x)", lambda: plain(x))}
    for name, config in CONFIGS.items():
        totals[name] = measure(name, linear(config), x, report, device.type == "cuda")
    measure_nothing(n, x, report)
    measure_parts(x, n, report)
    for name in CONFIGS:
        record.goal(f"{name}, M={arguments.rows}: host us beyond bf16", totals[name] - totals["bf16"], at_most=30)
    record.save()


if __name__ == "__main__":
    main()
