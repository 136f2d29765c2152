"""`tune` on a GPU: its times are kept and used, and every kernel that it chooses from computes the same product."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo
from matmul_reference import activation64, assert_product, decode64
from native_cases import needs_gpu
from torch import Tensor, nn

import mxquant
from mxquant import explain, quantize_, tune
from mxquant.backends import KernelChoice, Problem, TunableBackend, get_backend, tuning_cache
from mxquant.backends.kernel_choice import forget_selected, select_kernel
from mxquant.tensor import MXTensor, describe
from mxquant.tuning import TuningReport

pytestmark = [
    *needs_gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]

N, K = 8192, 2048
KERNELS = {"split_k", "warp_specialized", "dequantize"}
ACTIVATIONS = pytest.mark.parametrize("activation", ["mxfp4", None], ids=["fp8", "fp16"])


def layer(activation: str | None, device: torch.device, rotation: int | None = None) -> nn.Linear:
    linear = nn.Linear(K, N, device=device, dtype=torch.bfloat16).requires_grad_(False)
    assert linear.bias is not None
    linear.bias.normal_()  # torch's own is too small to be missed in a product of half precision
    quantize_(linear, mxquant.mxfp4(activation=activation, rotation=rotation))
    return linear


def inputs(rows: int, device: torch.device) -> Tensor:
    return torch.randn(rows, K, device=device).bfloat16()


def choices_of(linear: nn.Linear, rows: int) -> tuple[TunableBackend, Problem, tuple[KernelChoice, ...]]:
    assert isinstance(linear.weight, MXTensor)
    problem = describe(linear.weight)
    backend = get_backend("fp8" if problem.activation else "fp16")
    assert isinstance(backend, TunableBackend)
    return backend, problem, backend.kernel_choices(problem, rows)


def force(linear: nn.Linear, device: torch.device, rows: int, kernel: str) -> None:
    """As if `kernel` had been the fastest for up to so many rows."""
    backend, problem, _ = choices_of(linear, rows)
    tuning_cache.record(
        tuning_cache.device_name(device), {tuning_cache.product_key(backend.name, problem): {rows: kernel}}
    )
    forget_selected()


def snapshot(model: nn.Module) -> list[Tensor]:
    return [
        tensor.clone() for p in model.parameters() for tensor in (p.operand[:2] if isinstance(p, MXTensor) else [p])
    ]


def told(linear: nn.Linear, rows: int) -> str:
    answer = explain(linear, (rows, K))
    assert answer.chosen is not None
    return dict(answer.backends)[answer.chosen]


def assert_alike(y: Tensor, other: Tensor) -> None:
    """Each may be off by 4e-4 in relative Frobenius norm, as every product, and rounding to bf16 costs 1.7e-3."""
    assert (y.double() - other.double()).norm() <= 2 * (4e-4 + 1.7e-3) * other.double().norm()


@ACTIVATIONS
@pytest.mark.parametrize("rows", [1, 16, 17, 64, 300, 1024, 3000])
def test_every_kernel_computes_the_same_product(activation: str | None, rows: int, device: torch.device) -> None:
    """Within the bounds of all products against float64, so also for rows that it is not the default for; a row out
    of range included.
    """
    linear, x = layer(activation, device), inputs(rows, device)
    x[0, :32] *= 2.0**-60
    assert isinstance(linear.weight, MXTensor)
    assert linear.bias is not None
    w64 = decode64(linear.weight.canonical())
    _, problem, choices = choices_of(linear, rows)
    assert {choice.name for choice in choices} == KERNELS
    results = [choice.multiply(x, linear.weight.operand, linear.bias, problem) for choice in choices]
    for y in results:
        assert_product(y, activation64(x, activation), w64, linear.bias)
        assert_alike(y, results[0])
    other = choices[0].multiply(x, linear.weight.operand, None, problem)
    with pytest.raises(AssertionError):
        assert_product(other, activation64(x, activation), w64, linear.bias)


@ACTIVATIONS
def test_each_kernel_is_deterministic(activation: str | None, device: torch.device) -> None:
    linear = layer(activation, device)
    assert isinstance(linear.weight, MXTensor)
    for rows in (16, 300):
        x = inputs(rows, device)
        _, problem, choices = choices_of(linear, rows)
        for choice in choices:
            first = choice.multiply(x, linear.weight.operand, None, problem)
            assert all(torch.equal(choice.multiply(x, linear.weight.operand, None, problem), first) for _ in range(5))


def test_tuning_a_model(device: torch.device, empty_tuning_cache: None) -> None:
    """Each product once, every kernel timed, the fastest used from then on; and nothing of the model changes."""
    model = nn.ModuleDict(
        {
            "w4a4": layer("mxfp4", device),
            "w4a16": layer(None, device),
            "again": layer("mxfp4", device),
            "rotated": layer("mxfp4", device, rotation=32),
        }
    )
    before = snapshot(model)
    random = torch.cuda.get_rng_state(device)
    report = tune(model, rows=(1, 64, 300, 2048))
    print(report)
    assert torch.equal(torch.cuda.get_rng_state(device), random)
    assert all(map(torch.equal, snapshot(model), before))
    assert [one.rows for one in report.measured] == [1, 64, 300, 2048] * 3
    assert [one.product.names for one in report.measured[::4]] == [
        ["w4a4.weight", "again.weight"], ["w4a16.weight"], ["rotated.weight"],
    ]  # fmt: skip
    assert report.left == {}
    assert report.paths == [tuning_cache.path_of(tuning_cache.device_name(device))]
    for one in report.measured:
        assert one.microseconds.keys() == KERNELS
        assert all(0 < time < 1e5 for time in one.microseconds.values())
        if one.rows == 1:  # where a weight twice or four times as large is written and read again, for one row
            assert one.microseconds["dequantize"] > one.microseconds["split_k"]
        selected = select_kernel(one.product.backend, one.product.problem, one.rows)
        assert (selected.kernel.name, selected.is_tuned) == (one.fastest, True)


def test_a_time_is_that_of_the_work(device: torch.device, empty_tuning_cache: None) -> None:
    """Eight times the rows by the same kernel take at least twice as long where the GPU is full: the clock is not the
    host's, and no graph is empty.
    """
    report: TuningReport = tune(layer("mxfp4", device), rows=(1024, 8192))
    short, long = report.measured
    assert all(long.microseconds[name] > 2 * short.microseconds[name] for name in KERNELS)


FRESH = """
import sys, torch, mxquant
torch.manual_seed(0)
w = torch.randn({n}, {k}, device="cuda").bfloat16()
x = torch.randn(64, {k}, device="cuda").bfloat16()
layer = torch.nn.Linear({k}, {n}, bias=False, device="cuda", dtype=torch.bfloat16)
layer.weight = torch.nn.Parameter(w, requires_grad=False)
mxquant.quantize_(layer, "mxfp4")
y = layer(x)
print(dict(mxquant.explain(layer, (64, {k})).backends)["fp8"])
torch.save(y.cpu(), sys.argv[1])
"""


def test_a_process_that_starts_later_uses_the_file(
    device: torch.device, empty_tuning_cache: None, tmp_path: Path
) -> None:
    linear = layer("mxfp4", device)
    script = FRESH.format(n=N, k=K)
    for kernel in sorted(KERNELS):
        force(linear, device, 64, kernel)
        command = [sys.executable, "-c", script, str(tmp_path / kernel)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == f"chosen; 64 rows use kernel {kernel}, tuned"
    results = [torch.load(tmp_path / kernel) for kernel in sorted(KERNELS)]
    for y in results:
        assert_alike(y, results[0])


@ACTIVATIONS
@pytest.mark.parametrize("kernel", sorted(KERNELS))
def test_a_tuned_kernel_in_a_cuda_graph_and_compiled(
    activation: str | None, kernel: str, device: torch.device, empty_tuning_cache: None
) -> None:
    """The file is read while the graph is captured, where nothing may synchronize."""
    linear, x = layer(activation, device), inputs(64, device)
    force(linear, device, 64, kernel)
    expected = linear(x)
    assert told(linear, 64) == f"chosen; 64 rows use kernel {kernel}, tuned"
    forget_selected()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = linear(x)
    captured.fill_(torch.nan)
    graph.replay()
    assert torch.equal(captured, expected)

    torch._dynamo.reset()
    compiled = torch.compile(linear, fullgraph=True)
    assert torch.equal(compiled(x), expected)
    # What is tuned later is used without compiling again.
    others = sorted(KERNELS - {kernel})
    for other in others:
        force(linear, device, 64, other)
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert torch.equal(compiled(x), linear(x))


def test_another_shape_or_more_rows_use_the_default(device: torch.device, empty_tuning_cache: None) -> None:
    """The default serves a layer of another shape, and rows beyond the largest."""
    linear = layer("mxfp4", device)
    force(linear, device, 64, "dequantize")
    assert told(linear, 3) == "chosen; 3 rows use kernel dequantize, tuned"
    assert told(linear, 65).endswith(", by default")
    other = nn.Linear(K, N // 2, device=device, dtype=torch.bfloat16)
    quantize_(other, "mxfp4")
    assert told(other, 3) == "chosen; 3 rows use kernel split_k, by default"
