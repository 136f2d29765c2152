"""torch.compile without a graph break, bit-equal to eager, and without a recompilation for every batch size."""

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from matmul_reference import quantized, quantized_linear
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from mxquant import MXTensor, quantize, quantize_
from mxquant.backends import Groups
from mxquant.tensor import grouped_product

PAIRS = [("mxfp4", None), ("mxfp4", "mxfp4"), ("nvfp4", "nvfp4"), ("mxfp6_e2m3", "fp8_e4m3")]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def stack(format: str, activation: str | None, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Three quantized Linears, a nonlinearity between them."""
    return nn.Sequential(
        quantized_linear(40, 64, format, activation, dtype=dtype),
        nn.ReLU(),
        quantized_linear(64, 48, format, activation, dtype=dtype),
        nn.ReLU(),
        quantized_linear(48, 8, format, activation, dtype=dtype),
    )


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("format, activation", PAIRS)
def test_layers_compile_without_a_graph_break_to_the_same_bits(format: str, activation: str | None, grad: bool) -> None:
    model = stack(format, activation)
    x = torch.randn(3, 40, requires_grad=grad)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    with contextlib.nullcontext() if grad else torch.no_grad():
        expected, result = model(x), compiled(x)
    assert torch.equal(result, expected)
    assert counter.frame_count == 1
    if grad:
        (expected_grad,) = torch.autograd.grad(expected.square().sum(), x)
        bias_grads = [p.grad for p in model.parameters() if p.requires_grad]
        assert not any(g is not None for g in bias_grads)
        result.square().sum().backward()
        assert torch.equal(x.grad, expected_grad)
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inductor_gives_the_bits_of_eager(dtype: torch.dtype) -> None:
    """Bare Linears in a row, nothing that inductor could fuse with other roundings."""
    model = nn.Sequential(*(quantized_linear(40, 40, "mxfp4", "mxfp4", dtype=dtype) for _ in range(3)))
    x = torch.randn(3, 40, dtype=dtype)
    with torch.no_grad():
        assert torch.equal(torch.compile(model, fullgraph=True)(x), model(x))


def test_inductor_with_grad() -> None:
    model = stack("mxfp4", "mxfp4")
    x, y = (torch.ones(3, 40).requires_grad_() for _ in range(2))
    expected, result = model(x), torch.compile(model, fullgraph=True)(y)
    assert torch.equal(result, expected)
    expected.sum().backward()
    result.sum().backward()
    assert torch.allclose(y.grad, x.grad)


@pytest.mark.parametrize("activation", [None, "mxfp4", "nvfp4"])
def test_changing_batch_sizes_compile_at_most_twice(activation: str | None) -> None:
    """Once for the first size and once for all others; 1 is torch's own special case and is left out."""
    model = stack("mxfp4", activation)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    with torch.no_grad():
        for batch in (5, 3, 64, 7, 300):
            x = torch.randn(batch, 40)
            assert torch.equal(compiled(x), model(x))
    assert counter.frame_count <= 2


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 8).requires_grad_(False)

    def forward(self, x: Tensor, double: bool = False) -> Tensor:
        return self.linear(x) * (2 if double else 1)


@pytest.mark.parametrize(
    "calls",
    [
        [((1, 64), False), ((3, 64), False), ((1, 64), False), ((7, 64), False), ((1, 64), False)],
        [((1, 5, 64), False), ((2, 5, 64), False), ((1, 1, 64), False), ((3, 1, 64), False), ((3, 9, 64), False)],
        [((3, 64), False), ((3, 64), True), ((3, 64), False), ((3, 64), True)],
    ],
    ids=["batch of 1", "sequence of 1", "bool argument"],
)
def test_special_cases_compile_as_often_as_for_a_plain_linear(calls: list[tuple[tuple[int, ...], bool]]) -> None:
    counts = []
    for format in (None, "mxfp4"):
        model, counter = Scaled(), CompileCounterWithBackend("aot_eager")
        if format is not None:
            quantize_(model, format)
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend=counter)
        counts.append([])
        for shape, double in calls:
            x = torch.randn(*shape)
            assert torch.equal(compiled(x, double), model(x, double))
            counts[-1].append(counter.frame_count)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("grad", [False, True])
def test_a_batch_marked_dynamic_compiles_once(grad: bool) -> None:
    model = stack("nvfp4", "nvfp4")
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for batch in (5, 3, 64):
        x = torch.randn(batch, 40, requires_grad=grad)
        torch._dynamo.mark_dynamic(x, 0)
        y = compiled(x)
        assert torch.equal(y, model(x))
        if grad:
            y.sum().backward()
            assert x.grad is not None
    assert counter.frame_count == 1


def test_linears_of_different_sizes_compile_one_by_one() -> None:
    """Regional compilation: the code of nn.Linear is compiled again for each size, and dynamo takes sizes that change
    from call to call as symbols. A weight's own sizes are what a backend is chosen by, so they are taken as numbers.
    """
    layers = [quantized_linear(k, n, "mxfp4", "mxfp4", dtype=torch.float32) for n, k in [(8, 64), (16, 64), (24, 96)]]
    inputs = [torch.randn(3, layer.in_features) for layer in layers]
    expected = [layer(x) for layer, x in zip(layers, inputs)]
    for layer in layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    for layer, x, y in zip(layers, inputs, expected):
        assert torch.equal(layer(x), y)


def test_weights_of_different_sizes_through_one_function() -> None:
    compiled = torch.compile(F.linear, fullgraph=True, backend="aot_eager")
    for n, k in [(8, 64), (16, 64), (24, 96), (8, 100)]:
        x, weight = torch.randn(3, k), quantized(torch.randn(n, k), "nvfp4", "nvfp4")
        assert torch.equal(compiled(x, weight), F.linear(x, weight))


@pytest.mark.parametrize("format, activation", PAIRS)
def test_all_sizes_dynamic(format: str, activation: str | None) -> None:
    model = stack(format, activation)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch.no_grad():
        for x in (torch.randn(3, 40), torch.randn(2, 5, 40)):
            assert torch.equal(compiled(x), model(x))


def test_slices_of_symbolic_size_compile() -> None:
    def head(x: Tensor, weight: Tensor, rows: int) -> Tensor:
        return F.linear(x, weight[:rows])

    compiled = torch.compile(head, fullgraph=True, backend="aot_eager", dynamic=True)
    x, weight = torch.randn(3, 64), quantized(torch.randn(8, 64), "mxfp4", "mxfp4")
    for rows in (3, 5, 7):
        assert torch.equal(compiled(x, weight, rows), head(x, weight, rows))


def test_compiled_in_inference_mode() -> None:
    model = stack("mxfp4", "mxfp4")
    x = torch.randn(3, 40)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        assert torch.equal(compiled(x), model(x))


@pytest.mark.parametrize("training", [False, True])
def test_a_compiled_encoder_layer(training: bool) -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 96, dropout=0.0, batch_first=True).train(training)
    for linear in (layer.linear1, layer.linear2, layer.self_attn.out_proj):
        weight = quantized(linear.weight.detach(), "mxfp4", "mxfp4")
        linear.weight = nn.Parameter(weight, requires_grad=False)
    x = torch.randn(2, 5, 64)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(layer, backend="aot_eager")(x), layer(x))


def test_the_weight_can_change_without_a_recompilation() -> None:
    """The codes are an input of the graph, not a constant in it."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(F.linear, fullgraph=True, backend=counter)
    x = torch.randn(3, 64)
    for _ in range(3):
        weight = quantized(torch.randn(8, 64), "mxfp4", "mxfp4")
        assert torch.equal(compiled(x, weight), F.linear(x, weight))
    assert counter.frame_count == 1


@pytest.mark.parametrize("format", ["mxfp4", "mxfp6_e3m2", "mxfp8_e4m3", "nvfp4"])
def test_the_quantizer_compiles_and_gives_the_bytes_of_eager(format: str) -> None:
    def codes(x: Tensor) -> tuple[Tensor, Tensor]:
        result = quantize(x, format)
        return result.qdata, result.scale

    for x in (torch.randn(4, 72, dtype=torch.bfloat16), torch.randn(4, 72) * 2.0**-120, torch.zeros(2, 40)):
        eager = codes(x)
        result = torch.compile(codes, fullgraph=True, backend="aot_eager")(x)
        assert all(torch.equal(a, b) for a, b in zip(eager, result))


def test_the_quantizer_under_inductor_gives_the_bytes_of_eager() -> None:
    """Where a compiler would contract or reassociate, scales and ties would move."""

    def round_trip(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        result = quantize(x, "mxfp4")
        return result.qdata, result.scale, result.dequantize()

    x = torch.randn(64, 72) * torch.exp2(torch.randint(-40, 40, (64, 1)).float())
    assert all(torch.equal(a, b) for a, b in zip(torch.compile(round_trip, fullgraph=True)(x), round_trip(x)))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: x @ w.t(),
        lambda x, w: torch.addmm(torch.ones(8), x, w.t()),
        lambda x, w: F.linear(x[:, :32], w[2:6, :32]),
        lambda x, w: F.linear(x, w.view(2, 4, 64)[1]),
        lambda x, w: x[:, :8] @ w,
        lambda x, w: torch.bmm(x[None], w.unsqueeze(0).mT),
        lambda x, w: w.dequantize().sum() + x.sum(),
    ],
    ids=["matmul", "addmm", "slices", "view", "unblocked", "bmm", "dequantize"],
)
def test_each_operator_compiles_to_the_same_bits(function: object) -> None:
    x, weight = torch.randn(3, 64), quantized(torch.randn(8, 64), "mxfp4", "mxfp4")
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")  # type: ignore[call-overload]
    assert torch.equal(compiled(x, weight), function(x, weight))  # type: ignore[operator]


def test_grouped_mm_compiles_to_the_same_bits() -> None:
    x, w = torch.randn(6, 64, dtype=torch.bfloat16), torch.randn(3, 16, 64, dtype=torch.bfloat16)
    weight, offs = quantized(w, "mxfp4", "mxfp4"), torch.tensor([2, 2, 6], dtype=torch.int32)

    def experts(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        return torch._grouped_mm(x, weight.transpose(-2, -1), offs=offs)

    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, weight, offs), experts(x, weight, offs))


def test_static_activation_scales_and_rotation_compile_to_the_same_bits() -> None:
    """The operator is told of them by its tensors and its text, not by an MXTensor."""
    x, offsets = torch.randn(5, 64), torch.tensor([2, 5], dtype=torch.int32)
    weight = quantize(torch.randn(8, 64), "nvfp4", rotation=16).with_activation("nvfp4", scale=torch.tensor(0.003))
    scales = torch.tensor([0.01, 0.02])
    experts = quantize(torch.randn(2, 8, 64), "mxfp4").with_activation("fp8_e4m3", scale=scales)

    def products(x: Tensor, weight: MXTensor, experts: MXTensor) -> list[Tensor]:
        y = F.linear(x, weight)
        batch = torch.bmm(x.expand(2, 5, 64), experts.transpose(-2, -1))
        return [y, y @ weight, batch, grouped_product(x, experts, -1, Groups(offsets))]

    with torch.no_grad():
        compiled = torch.compile(products, fullgraph=True, backend="aot_eager")(x, weight, experts)
        eager = products(x, weight, experts)
        dynamic = products(x, weight.with_activation("nvfp4"), experts.with_activation("fp8_e4m3"))
    for one, same, other in zip(compiled, eager, dynamic, strict=True):
        assert torch.equal(one, same)
        assert not torch.equal(one, other)


def test_compiled_under_autocast() -> None:
    model = stack("mxfp4", "mxfp4")
    x = torch.randn(3, 40)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(compiled(x), model(x))


def test_no_warning_about_the_compile_cache(recwarn: pytest.WarningsRecorder) -> None:
    """torch warns of a subclass whose metadata it cannot hash stably."""
    torch.compile(stack("mxfp4", None), fullgraph=True, backend="aot_eager")(torch.randn(2, 40))
    assert not [w for w in recwarn if "hash" in str(w.message) or "mxquant" in str(w.message)]
