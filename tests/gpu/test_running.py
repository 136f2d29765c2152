"""How a product runs: on any stream and device, in graphs, compiled, without synchronizing, deterministically."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from matmul_reference import FORMATS
from native_cases import CASES, EMULATION_CASES, ONE_CASE_A_PATH, Case, needs_gpu
from torch import Tensor, nn

from mxquant import MXTensor, quantize

pytestmark = needs_gpu

# One of each way that a tensor-core backend has: tiles of 16 and of 128 rows, two of those, and expansion.
ROWS = [1, 100, 200, 300]
# Clock cycles, some 200 ms and 4 s: longer than it takes to launch what follows, the latter also where other processes
# keep the host and the GPU busy.
A_WHILE, LONG = 400_000_000, 8_000_000_000


def layer(case: Case, device: torch.device) -> tuple[Tensor, MXTensor, Tensor]:
    """Rows of x, a weight and a bias."""
    n, k = case.shape
    x, w = torch.randn(max(ROWS), k, device=device), torch.randn(n, k, device=device)
    return x.bfloat16(), case.weight(w.bfloat16()), torch.randn(n, device=device).bfloat16()


@pytest.fixture
def triton_compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that Triton compiles, or looks up among compiled ones, from here on."""
    triton = pytest.importorskip("triton")
    seen: list[str] = []

    def hook(*, fn: Any, **_: Any) -> bool:
        seen.append(fn.name)
        return False

    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", hook)
    return seen


# Streams and devices


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("case", ONE_CASE_A_PATH)
def test_on_a_stream_of_its_own(case: Case, rows: int, device: torch.device) -> None:
    """The input arrives late on a side stream. Work there sees it; work on another stream, as the control shows, does
    not.
    """
    x, weight, bias = layer(case, device)
    x = x[:rows]
    expected = F.linear(x, weight, bias)
    late, side, arrived = torch.empty_like(x), torch.cuda.Stream(device), torch.cuda.Event()
    torch.cuda.synchronize(device)
    with torch.cuda.stream(side):
        F.linear(late, weight, bias)  # what cuBLAS sets up for each stream
    for cycles in (A_WHILE, LONG):
        late.fill_(torch.nan)
        torch.cuda.synchronize(device)
        with torch.cuda.stream(side):
            torch.cuda._sleep(cycles)
            late.copy_(x)
            arrived.record()
            y = F.linear(late, weight, bias)
        too_early = F.linear(late, weight, bias)
        torch.cuda.current_stream(device).synchronize()
        was_early = not arrived.query()
        torch.cuda.synchronize(device)
        assert torch.equal(y, expected)
        if was_early:
            break
    assert was_early
    assert too_early.isnan().all()


@pytest.mark.parametrize("case", EMULATION_CASES)
def test_tables_made_on_one_stream_serve_another(case: Case, device: torch.device) -> None:
    """Emulation keeps tables: the first call makes them, on whichever stream it runs."""
    from mxquant.reference import lookup

    x, weight, bias = layer(case, device)
    expected = F.linear(x, weight, bias)
    side = torch.cuda.Stream(device)
    lookup._element_table.cache_clear()
    lookup._scale_table.cache_clear()
    torch.cuda.synchronize(device)
    with torch.cuda.stream(side):
        torch.cuda._sleep(A_WHILE)
        F.linear(x, weight, bias)
    y = F.linear(x, weight, bias)
    torch.cuda.synchronize(device)
    assert torch.equal(y, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("case", CASES)
def test_on_a_second_device(case: Case, device: torch.device) -> None:
    """While the first is the current one."""
    second = torch.device("cuda", 1)
    x, weight, bias = layer(case, device)
    there = weight.to(second)
    assert there.metadata.layout == weight.metadata.layout
    for rows in ROWS:
        y = F.linear(x[:rows].to(second), there, bias.to(second))
        assert y.device == second
        case.check(y, x[:rows].to(second), there, bias.to(second))
    assert torch.cuda.current_device() == 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("format", FORMATS)
def test_quantizing_on_a_second_device(format: str, device: torch.device) -> None:
    w = torch.randn(48, 200, device=device)
    here, there = quantize(w, format), quantize(w.to("cuda:1"), format)
    assert torch.equal(there.qdata.to(device), here.qdata)
    assert torch.equal(there.scale.to(device), here.scale)
    assert torch.equal(there.dequantize().to(device), here.dequantize())


# Graphs


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("case", ONE_CASE_A_PATH)
def test_in_a_cuda_graph_without_compiling_again(
    case: Case, rows: int, device: torch.device, triton_compilations: list[str]
) -> None:
    model, x = case.model(device), torch.randn(rows, case.shape[1], device=device).bfloat16()
    with torch.no_grad():
        model(x)
        triton_compilations.clear()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = model(x)
        for _ in range(2):
            x.copy_(torch.randn_like(x))
            captured.fill_(torch.nan)
            graph.replay()
            assert torch.equal(captured, model(x))
    assert triton_compilations == []


def test_a_compilation_is_noticed(device: torch.device, triton_compilations: list[str]) -> None:
    """The control of the test above."""
    for length in (1000, 33):
        quantize(torch.randn(3, length, device=device), "mxfp6_e3m2", scale_mode="ceil")
    assert triton_compilations


@pytest.mark.parametrize("case", [*ONE_CASE_A_PATH[:4], *EMULATION_CASES[:1]])
def test_compiled_for_every_number_of_rows(case: Case, device: torch.device, triton_compilations: list[str]) -> None:
    torch._dynamo.reset()
    model = case.model(device)
    compiled = torch.compile(model, fullgraph=True)
    batches = [torch.randn(rows, case.shape[1], device=device).bfloat16() for rows in (300, 16, 17, 100, 200, 256, 299)]
    with torch.no_grad():
        expected = [model(x) for x in batches]
        # Once for the first size, once for all others.
        assert all(torch.equal(compiled(x), y) for x, y in zip(batches[:2], expected))
        triton_compilations.clear()
        with torch._dynamo.config.patch(error_on_recompile=True):
            for x, y in zip(batches[2:], expected[2:]):
                assert torch.equal(compiled(x), y)
    ours = [name for name in triton_compilations if not name.startswith("triton_")]
    assert ours == [], "only what inductor made may be specialized again"


@pytest.mark.parametrize("case", [*ONE_CASE_A_PATH[:4], *EMULATION_CASES[:1]])
def test_compiled_into_a_cuda_graph(case: Case, device: torch.device) -> None:
    torch._dynamo.reset()
    model = case.model(device)
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for rows in (1, 300):
            for _ in range(3):  # run, record, replay
                x = torch.randn(rows, case.shape[1], device=device).bfloat16()
                assert torch.equal(compiled(x).clone(), model(x))


def test_compiled_quantization_gives_the_bytes_of_a_cpu(device: torch.device) -> None:
    x = torch.randn(64, 256)
    compiled = torch.compile(lambda t: quantize(t, "nvfp4").dequantize(), fullgraph=True)
    assert torch.equal(compiled(x.to(device)).cpu(), quantize(x, "nvfp4").dequantize())


# Synchronization and determinism


@contextlib.contextmanager
def no_synchronization() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_synchronization_is_noticed(device: torch.device) -> None:
    with pytest.raises(RuntimeError, match="synchroniz"), no_synchronization():
        torch.ones((), device=device).item()


@pytest.mark.parametrize("case", [*CASES, *EMULATION_CASES])
def test_no_hidden_synchronization(case: Case, device: torch.device) -> None:
    x, weight, bias = layer(case, device)
    x[1, :32] *= 2.0**-60  # one row is repaired where there are repairs
    for rows in ROWS:
        expected = F.linear(x[:rows], weight, bias)  # what is compiled and kept at the first call
        with no_synchronization():
            y = F.linear(x[:rows], weight, bias)
        assert torch.equal(y, expected)


@pytest.mark.parametrize("format", FORMATS)
def test_quantizing_does_not_synchronize(format: str, device: torch.device) -> None:
    x = torch.randn(40, 100, device=device)
    expected = quantize(x, format).dequantize()
    with no_synchronization():
        values = quantize(x, format).dequantize()
    assert torch.equal(values, expected)


@contextlib.contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """torch refuses what is not deterministic, and fills fresh memory with NaN and the largest integers."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def test_what_is_not_deterministic_is_refused(device: torch.device) -> None:
    """The control of the test below."""
    with pytest.raises(RuntimeError, match="deterministic"), deterministic_algorithms():
        torch.ones(3, device=device).put_(torch.zeros(3, dtype=torch.long, device=device), torch.ones(3, device=device))


@pytest.mark.parametrize("case", [*CASES, *EMULATION_CASES])
def test_deterministic_algorithms(case: Case, device: torch.device) -> None:
    """Nothing is refused, and the bits are the same ones, there and without, every time."""
    x, weight, bias = layer(case, device)
    x[1, :32] *= 2.0**-60
    for rows in ROWS:
        expected = F.linear(x[:rows], weight, bias)
        with deterministic_algorithms():
            results = [F.linear(x[:rows], weight, bias) for _ in range(3)]
        assert all(torch.equal(y, expected) for y in results)
    values = weight.dequantize()
    once = case.weight(values)
    with deterministic_algorithms():
        again = case.weight(values)
    assert torch.equal(again.qdata, once.qdata)
    assert torch.equal(again.scale, once.scale)


@pytest.mark.parametrize("case", CASES)
def test_gradients_under_deterministic_algorithms(case: Case, device: torch.device) -> None:
    x, w = torch.randn(40, case.shape[1], device=device), torch.randn(*case.shape, device=device)
    linear = nn.Linear(case.shape[1], case.shape[0], device=device, dtype=torch.bfloat16)
    linear.weight = nn.Parameter(case.weight(w.bfloat16(), "auto"), requires_grad=False)
    gradients = []
    with deterministic_algorithms():
        for _ in range(2):
            leaf = x.bfloat16().requires_grad_()
            linear(leaf).float().square().sum().backward()
            gradients.append(leaf.grad)
    assert torch.equal(*gradients)
