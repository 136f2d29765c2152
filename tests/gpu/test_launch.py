"""Cached launches and plans on a GPU give what ordinary launches give: off alignment, at sizes 1 and odd, on streams,
in graphs.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mxquant import MXFP4Config, MXTensor, quantize, quantize_
from mxquant.backends import Groups
from mxquant.reference.gated_activation import GatedActivation
from mxquant.tensor import as_weight
from mxquant.tensor.grouped import grouped_product

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from mxquant.kernels.runtime.launch import cached_launch  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.version.hip is not None, reason="needs an NVIDIA GPU"),
]


@triton.jit
def _scale_and_add(
    x: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    factor: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (column < columns) & (row < rows)
    value = tl.load(x + row * row_stride + column * column_stride, mask=inside, other=0).to(tl.float32) * factor
    if bias is not None:
        value += tl.load(bias + column, mask=inside, other=0).to(tl.float32)
    tl.store(out + row * columns + column, value.to(out.dtype.element_ty), mask=inside)


_cached = cached_launch(_scale_and_add)


def launch(kernel: Any, x: Tensor, bias: Tensor | None, factor: int = 3) -> Tensor:
    rows, columns = x.shape
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    kernel[(triton.cdiv(columns, 64), rows)](x, bias, out, rows, columns, *x.stride(), factor=factor, BLOCK=64)
    return out


def ordinary_launches(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Grows by one at each launch that goes Triton's own way."""
    count: list[None] = []
    run = _scale_and_add.run

    def counting(*arguments: Any, **options: Any) -> Any:
        count.append(None)
        return run(*arguments, **options)

    monkeypatch.setattr(_scale_and_add, "run", counting)
    return count


SIZES = [1, 2, 15, 16, 17, 64, 100, 128]


def test_it_is_a_cached_launch() -> None:
    assert _cached is not _scale_and_add


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sizes_alignments_and_strides(dtype: torch.dtype) -> None:
    memory = torch.randn(40000, device="cuda").to(dtype)
    for _, rows, columns in itertools.product(range(2), (1, 3, 16), SIZES):
        for offset, bias_offset, step in itertools.product((0, 1, 64), (None, 0, 1), (1, 2)):
            x = memory[offset : offset + rows * columns * step].view(rows, columns * step)[:, ::step]
            bias = None if bias_offset is None else memory[bias_offset : bias_offset + columns]
            expected = x.float() * 3 + (0 if bias is None else bias.float())
            got = launch(_cached, x, bias)
            assert torch.equal(got, launch(_scale_and_add, x, bias))
            assert torch.allclose(got.float(), expected, rtol=2**-7, atol=1e-5)


def test_the_second_launch_is_cached_and_a_misaligned_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.randn(1024, device="cuda")
    x, misaligned = memory[:640].view(10, 64), memory[1:641].view(10, 64)
    launch(_cached, x, None)
    count = ordinary_launches(monkeypatch)
    for _ in range(3):
        launch(_cached, x, None)
    assert len(count) == 0
    launch(_cached, misaligned, None)
    assert len(count) == 1


def test_the_current_stream() -> None:
    """The other stream is held up; what is launched on it must come after."""
    x, late = torch.ones(4, 64, device="cuda"), torch.zeros(4, 64, device="cuda")
    launch(_cached, x, None)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        late.copy_(x)
        y = launch(_cached, late, None)
    torch.cuda.synchronize()
    assert (y == 3).all()


def test_in_a_captured_graph() -> None:
    x = torch.ones(4, 64, device="cuda")
    launch(_cached, x, x[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = launch(_cached, x, x[0])
    for value in (2.0, 5.0):
        x.fill_(value)
        graph.replay()
        assert (y == 4 * value).all()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_second_device() -> None:
    for index in (0, 1, 0, 1):
        with torch.cuda.device(index):
            x = torch.randn(3, 64, device=f"cuda:{index}")
            assert torch.equal(launch(_cached, x, None), x * 3)


def test_a_tensor_that_is_not_on_the_gpu_is_refused() -> None:
    x, bias = torch.ones(4, 64, device="cuda"), torch.ones(64, device="cuda")
    launch(_cached, x, bias)
    with pytest.raises(ValueError, match="cannot be accessed from Triton"):
        launch(_cached, x, bias.cpu())
    assert (launch(_cached, x, bias) == 4).all()


def test_launch_hooks_hear_of_it() -> None:
    x, names = torch.ones(4, 64, device="cuda"), []
    launch(_cached, x, None)
    hook: Callable[[Any], None] = lambda data: names.append(data.get()["name"])  # noqa: E731
    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        launch(_cached, x, None)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    launch(_cached, x, None)
    assert names == ["_scale_and_add"]


@pytest.mark.parametrize("rows", [1, 17, 300])
@pytest.mark.parametrize("activation", ["same", None])
def test_a_linear_is_the_same_at_every_call(activation: str | None, rows: int) -> None:
    """The first call launches the ordinary way, others do not; an odd address of the input changes nothing."""
    layer = nn.Linear(512, 384, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    quantize_(layer, MXFP4Config(activation=activation))
    memory = torch.randn(rows * 512 + 1, device="cuda").bfloat16()
    misaligned = memory[1:].view(rows, 512)
    x = misaligned.clone()
    first = layer(x)
    # Weight-only, the input goes to cuBLAS, which may add up in another order where it is misaligned.
    for given in (x, x, x if activation is None else misaligned, x):
        assert torch.equal(layer(given), first)


# Plans: of `fp8`, whose activations are quantized, and of `fp16`

ACTIVATIONS = ["mxfp4", None]


@contextlib.contextmanager
def launched_by_triton() -> Iterator[None]:
    """Somebody listens, so nothing is cached and nothing planned."""
    hook: Callable[[Any], None] = lambda data: None  # noqa: E731
    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        yield
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)


def prepared(activation: str | None, *shape: int, device: str = "cuda") -> MXTensor:
    w = torch.randn(shape, device=device).bfloat16()
    weight = as_weight(quantize(w, "mxfp4").with_activation(activation))
    assert weight.metadata.layout == "mxfp4_tiles"
    return weight


def at(memory: Tensor, offset: int, *size: int, gap: int = 0) -> Tensor:
    return memory.as_strided(size, (size[-1] + gap, 1)[-len(size) :], offset)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_plan_is_for_one_kind_of_call(activation: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of many kinds in turn; those on aligned tensors are never launched by Triton again."""
    n, k = 384, 512
    weight, floats = prepared(activation, n, k), torch.randn(20000, device="cuda")
    halves = floats.bfloat16()
    given = {
        "plain": (at(halves, 0, 2, k), None),
        "one row": (at(halves, 0, 1, k), None),
        "more rows": (at(halves, 0, 17, k), None),
        "elsewhere": (at(halves, 8, 2, k), None),
        "far apart": (at(halves, 0, 2, k, gap=24), None),
        "an odd number apart": (at(halves, 0, 2, k, gap=3), None),
        "bias": (at(halves, 0, 2, k), halves[:n]),
        "bias in fp32": (at(halves, 0, 2, k), floats[:n]),
        "misaligned": (at(halves, 1, 2, k), None),
        "misaligned bias": (at(halves, 0, 2, k), halves[1 : n + 1]),
    }
    with launched_by_triton():
        expected = {name: F.linear(x, weight, bias) for name, (x, bias) in given.items()}
    assert len({tuple(y.flatten().tolist()) for y in expected.values()}) == len(given)
    for _ in range(2):
        for name, (x, bias) in given.items():
            assert torch.equal(F.linear(x, weight, bias), expected[name]), name
    monkeypatch.setattr(triton.runtime.JITFunction, "run", None)
    for name, (x, bias) in given.items():
        if "misaligned" not in name:
            assert torch.equal(F.linear(x, weight, bias), expected[name]), name


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_misaligned_codes(activation: str | None) -> None:
    """A weight whose bytes begin anywhere, as those of a file that is mapped into memory."""
    weight, x = prepared(activation, 128, 512), torch.randn(700, 512, device="cuda").bfloat16()

    def moved(inner: Tensor) -> Tensor:
        memory = torch.empty(inner.nbytes + 4, dtype=torch.uint8, device="cuda")[4:]
        return memory.view(inner.dtype).view(inner.shape).copy_(inner)

    other = weight.rewrap(weight.operand.map(moved))
    assert other.qdata.data_ptr() % 16 == 4
    for rows in (3, 100, 700):  # each way of the backends
        expected = F.linear(x[:rows], weight)
        for given in (other, weight, other):
            assert torch.equal(F.linear(x[:rows], given), expected)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_two_streams_at_once_share_no_workspace(activation: str | None) -> None:
    """One is held up until the other has made its products, over and over."""
    weight, xs = prepared(activation, 256, 2048), torch.randn(2, 4, 2048, device="cuda").bfloat16()
    expected = [F.linear(x, weight) for x in xs]
    assert not torch.equal(*expected)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    results: list[list[Tensor]] = [[], []]
    for _ in range(20):
        for x, stream, ys in zip(xs, streams, results, strict=True):
            with torch.cuda.stream(stream):
                if stream is streams[0]:
                    torch.cuda._sleep(2_000_000)
                ys.append(F.linear(x, weight))
    torch.cuda.synchronize()
    for ys, y in zip(results, expected, strict=True):
        assert all(torch.equal(one, y) for one in ys)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_planned_call_in_a_captured_graph(activation: str | None) -> None:
    weight, given = prepared(activation, 256, 2048), torch.randn(3, 4, 2048, device="cuda").bfloat16()
    expected = [F.linear(x, weight) for x in given]
    x = given[0].clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = F.linear(x, weight)
    for value, result in zip(given, expected, strict=True):
        x.copy_(value)
        graph.replay()
        F.linear(given[0], weight)  # in memory of its own
        assert torch.equal(y, result)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_plans_on_a_second_device(activation: str | None) -> None:
    """Whichever is the current one."""
    there, x = prepared(activation, 256, 512, device="cuda:1"), torch.randn(4, 512).bfloat16()
    here = there.to("cuda:0")
    expected = F.linear(x.to("cuda:0"), here)
    for current, device in itertools.product((0, 1, 0), (0, 1, 1, 0)):
        with torch.cuda.device(current):
            y = F.linear(x.to(f"cuda:{device}"), (here, there)[device])
        assert y.device.index == device
        assert torch.equal(y.to("cuda:0"), expected)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_plan_of_groups_is_for_one_kind_of_call(activation: str | None) -> None:
    weights, memory = prepared(activation, 4, 128, 512), torch.randn(50000, device="cuda").bfloat16()
    order = torch.randperm(40, device="cuda")
    bias = at(memory, 0, 4, 128)

    def result(
        rows: int,
        *,
        offset: int = 0,
        gathered: bool = True,
        bias: Tensor | None = None,
        gate: GatedActivation | None = None,
        device: str = "cuda",
    ) -> Tensor:
        ends = torch.tensor([0, rows // 2, rows // 2, rows], dtype=torch.int32, device=device)
        groups = Groups(ends, order[:rows] if gathered else None)
        x = at(memory, offset, 40 if gathered else rows, 512 if gate is None else 1024)
        return grouped_product(x, weights, -1, groups, bias, gate)

    kinds: list[dict[str, Any]] = [
        {"rows": 3}, {"rows": 1}, {"rows": 40}, {"rows": 3, "offset": 1}, {"rows": 3, "gathered": False},
        {"rows": 3, "bias": bias}, {"rows": 3, "bias": bias.float()}, {"rows": 3, "gate": GatedActivation(False)},
        {"rows": 3, "gate": GatedActivation(True)}, {"rows": 3, "gate": GatedActivation(True, 7.0, 1.702)},
    ]  # fmt: skip
    with launched_by_triton():
        expected = [result(**kind) for kind in kinds]
    for _ in range(3):
        for kind, y in zip(kinds, expected, strict=True):
            assert torch.equal(result(**kind), y), kind
    for kind in kinds:
        with pytest.raises(ValueError, match="cannot be accessed from Triton"):
            result(**kind, device="cpu")
