"""`tune`: measure which of a backend's kernels is the fastest for the products of a model, and keep that on disk.

Timing waits for the GPU, which a matmul must not do unasked, and cannot do while a CUDA graph is captured.
"""

from __future__ import annotations

import html
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from mxquant.backends import KernelChoice, Operand, Problem, TunableBackend, tuning_cache
from mxquant.backends.kernel_choice import forget_selected
from mxquant.tables import html_table, text_table
from mxquant.tensor import MXTensor, describe
from mxquant.tensor.choose import choose_backend

ROWS = (1, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
# Another kernel than the default has to be faster by this factor. Less lies within the spread of medians.
_MIN_SPEEDUP = 1.02

Timer = Callable[[KernelChoice, Tensor, Operand, Problem], float]
"""Microseconds of a product of an input with a weight by one kernel."""


@dataclass(frozen=True)
class Product:
    """A product that a backend has several kernels for, of one or more weights of a model."""

    backend: TunableBackend
    problem: Problem
    precision: str
    weight: Operand
    """The first one, in the layout of the backend."""
    names: list[str] = field(default_factory=list)
    """Of the weights."""

    def measure(self, rows: int, timer: Timer) -> Measurement:
        """Time each kernel for so many rows."""
        problem, device = self.problem, self.problem.device
        generator = torch.Generator(device).manual_seed(0)  # NOTE: torch's own is the user's
        x = torch.randn(rows, problem.in_features, generator=generator, dtype=problem.dtype, device=device)
        choices = self.backend.kernel_choices(problem, rows)
        times = {choice.name: timer(choice, x, self.weight, problem) for choice in choices}
        return Measurement(self, rows, times)


@dataclass(frozen=True)
class Measurement:
    """Times of a product's kernels for a number of rows."""

    product: Product
    rows: int
    microseconds: dict[str, float]
    """Of each kernel by its name; the backend's default comes first."""

    @property
    def default(self) -> str:
        return next(iter(self.microseconds))

    @property
    def fastest(self) -> str:
        """What later calls use: the default, unless another kernel is faster by more than the spread."""
        best = min(self.microseconds, key=self.microseconds.__getitem__)
        return best if self.microseconds[self.default] > _MIN_SPEEDUP * self.microseconds[best] else self.default


@dataclass(frozen=True)
class TuningReport:
    """What `tune` measured and what it did not. Prints as text, renders as HTML in a notebook."""

    measured: list[Measurement]
    left: dict[str, list[str]]
    """Reasons why weights were not tuned, with the names of the weights."""
    paths: list[Path]
    """The files that were written, one for each kind of device."""

    def __str__(self) -> str:
        return "\n\n".join([*(text_table(headers, rows) for headers, rows in self._tables()), self._written()])

    def _repr_html_(self) -> str:
        tables = "".join(html_table(headers, rows) for headers, rows in self._tables())
        return f"<div>{tables}<p>{html.escape(self._written())}</p></div>"

    def _written(self) -> str:
        return "\n".join(f"written: {path}" for path in self.paths) or "nothing was tuned"

    def _tables(self) -> Iterator[tuple[list[str], list[list[str]]]]:
        if self.measured:
            kernels = list(dict.fromkeys(name for one in self.measured for name in one.microseconds))
            headers = ["weights", "shape", "W/A", "backend", "rows", *(f"{name} us" for name in kernels)]
            yield [*headers, "default", "fastest"], [_measured_row(one, kernels) for one in self.measured]
        if self.left:
            yield ["not tuned", "reason"], [[_in_short(names), reason] for reason, names in self.left.items()]


def tune(model: nn.Module, rows: Sequence[int] = ROWS) -> TuningReport:
    """Time every kernel of every matmul of a quantized model on its GPU, and let later calls use the fastest.

    The choices hold in this process and in later ones, for every model with products of the same shapes and formats, on
    this kind of device, with these versions of mxquant, torch and triton. They are written to a file of the user's
    cache (`$MXQUANT_CACHE`, else `~/.cache/mxquant`), beside those of other models. A CUDA graph that was captured
    before keeps its kernels. A number of rows that was not timed uses the choice of the next larger one that was;
    beyond the largest, the default.

    Kernels sum in fp32 in different orders, so tuning can change the last bit of a result. Without a tuned file,
    results depend on the versions and the kind of GPU alone.

    It compiles all kernels and synchronizes. That takes some seconds a shape, more where nothing is compiled yet.

    Args:
        model: its matmuls along the blocked axis are timed, without a bias. Experts are left alone, as there is nothing
            to choose.
        rows: numbers of rows to time, all dimensions of an input but the last multiplied.

    Returns:
        the times of each kernel in microseconds, and what was not tuned and why: its backend has one kernel, or it
        lies on no CUDA GPU.

    Raises:
        TypeError: `model` is not a module, or `rows` not a sequence of ints.
        ValueError: nothing in the model is quantized, or `rows` is empty or holds a number below 1.
        OSError: the file cannot be written.
    """
    rows = _check_rows(rows)
    if not isinstance(model, nn.Module):
        raise TypeError(f"tune takes an nn.Module; got {type(model).__name__}")
    products, left = find_products(model)
    measured = measure_all(products, rows, gpu_microseconds)
    return TuningReport(measured, left, keep(measured))


def _check_rows(rows: Sequence[int]) -> list[int]:
    if not isinstance(rows, Sequence) or isinstance(rows, (str, bytes)) or not all(type(m) is int for m in rows):
        raise TypeError(f"rows is a sequence of numbers such as (1, 64); got {rows!r}")
    if not rows or min(rows) < 1:
        raise ValueError(f"rows holds numbers from 1 on, at least one; got {rows!r}")
    return sorted(set(rows))


def find_products(model: nn.Module) -> tuple[list[Product], dict[str, list[str]]]:
    """The different products of a model that a backend has several kernels for; and why the other weights are left
    out. Raises as `tune`.
    """
    products: dict[tuple[str, str], Product] = {}
    left: dict[str, list[str]] = {}
    for name, weight in _multiplied_weights(model):
        if weight.dim() < 2:
            left.setdefault("has one axis, and is no matrix to multiply with", []).append(name)
            continue
        problem = describe(weight)
        if problem.experts:
            left.setdefault("experts are multiplied in groups, with no kernel to choose", []).append(name)
            continue
        backend, in_layout = choose_backend(weight, problem)
        if not isinstance(backend, TunableBackend):
            left.setdefault(f"backend {backend.name} has one kernel", []).append(name)
        elif problem.device.type != "cuda":
            left.setdefault(f"lies on {problem.device}, and only CUDA devices are timed", []).append(name)
        else:
            key = tuning_cache.device_name(problem.device), tuning_cache.product_key(backend.name, problem)
            product = Product(backend, problem, problem.scheme.precision, in_layout.operand)
            products.setdefault(key, product).names.append(name)
    if not products and not left:
        kind = type(model).__name__
        raise ValueError(f"{kind} has no quantized weight but those of embeddings; quantize its linears with quantize_")
    return list(products.values()), left


def _multiplied_weights(model: nn.Module) -> Iterator[tuple[str, MXTensor]]:
    """Each quantized weight that is multiplied with, once."""
    seen = set()
    for name, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if isinstance(parameter, MXTensor) and not isinstance(module, nn.Embedding) and id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{name}.{attribute}".lstrip("."), parameter


def measure_all(products: Sequence[Product], rows: Sequence[int], timer: Timer) -> list[Measurement]:
    """Each product for each number of rows; an OSError before that, if the results could not be written."""
    from tqdm.auto import tqdm

    for product in products:
        tuning_cache.check_writable(tuning_cache.path_of(tuning_cache.device_name(product.problem.device)))
    each = [(product, m) for product in products for m in rows]
    return [product.measure(m, timer) for product, m in tqdm(each, desc="tuning", delay=1, leave=False)]


def keep(measured: Sequence[Measurement]) -> list[Path]:
    """Write the fastest kernels, and use them from here on; returns the files."""
    tables: dict[str, dict[str, dict[int, str]]] = {}
    for one in measured:
        backend, problem = one.product.backend, one.product.problem
        products = tables.setdefault(tuning_cache.device_name(problem.device), {})
        products.setdefault(tuning_cache.product_key(backend.name, problem), {})[one.rows] = one.fastest
    paths = [tuning_cache.record(device, products) for device, products in tables.items()]
    forget_selected()
    return paths


def gpu_microseconds(choice: KernelChoice, x: Tensor, weight: Operand, problem: Problem) -> float:
    """Median time of a product on a GPU. Copies of the weight take turns, so that none is read from the L2 cache."""
    with torch.cuda.device_of(x):
        cache = torch.cuda.get_device_properties(x.device).L2_cache_size
        others = math.ceil(2 * cache / (weight.qdata.nbytes + weight.scale.nbytes))
        weights = [weight, *(weight.map(torch.clone) for _ in range(others))]

        def multiply_all() -> None:
            for one in weights:
                choice.multiply(x, one, None, problem)

        return graph_microseconds(multiply_all, len(weights))


def graph_microseconds(run: Callable[[], object], calls: int, replays: int = 20) -> float:
    """Median time of one of the `calls` that `run` makes, replayed as a CUDA graph on the current device."""
    run()  # compiles kernels, which is not allowed during capture
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
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times) * 1e3 / calls


def _measured_row(one: Measurement, kernels: Sequence[str]) -> list[str]:
    problem = one.product.problem
    rotation = f", rotation {problem.rotation}" if problem.rotation else ""
    shape = f"{problem.out_features} x {problem.in_features}"
    times = (f"{one.microseconds[name]:,.1f}" if name in one.microseconds else "" for name in kernels)
    product = _in_short(one.product.names), shape, one.product.precision + rotation, one.product.backend.name
    return [*product, f"{one.rows:,}", *times, one.default, one.fastest]


def _in_short(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
