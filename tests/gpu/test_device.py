"""On a GPU: the same bytes as on a CPU, the same arithmetic bounds, and weights that move between the two."""

import pytest
import torch
import torch.nn.functional as F
from matmul_reference import DATA, FORMATS, activation64, assert_product, decode64, operands, quantized
from torch import nn

from mxquant import EmulatedMXTensor, MXTensor, dequantize_, quantize, quantize_, summary
from mxquant.formats import FORMATS as ALL_FORMATS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SUITES = {
    "gaussian": lambda: torch.randn(67, 200),
    "wide": lambda: torch.randn(67, 200) * torch.exp2(torch.randint(-120, 120, (67, 1)).float()),
    "subnormal": lambda: torch.randn(67, 200) * 2.0**-130,
    "ties": lambda: torch.randint(-14, 15, (67, 200)).float() / 4,
    "nonfinite": lambda: torch.randn(67, 200).masked_fill(torch.rand(67, 200) < 0.01, torch.inf),
}


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", FORMATS)
def test_bytes_are_those_of_a_cpu(format: str, dtype: torch.dtype, suite: str) -> None:
    x = SUITES[suite]().to(dtype)
    for mode in ALL_FORMATS[format].scale_modes:
        for axis in (-1, 0):
            here, there = (quantize(t, format, scale_mode=mode, axis=axis) for t in (x, x.cuda()))
            assert torch.equal(there.qdata.cpu(), here.qdata)
            assert torch.equal(there.scale.cpu(), here.scale)
            assert torch.equal(there.dequantize().cpu().nan_to_num(7), here.dequantize().nan_to_num(7))


def test_compiled_bytes_are_those_of_a_cpu() -> None:
    x = torch.randn(64, 256)
    compiled = torch.compile(lambda t: quantize(t, "nvfp4").dequantize(), fullgraph=True)
    assert torch.equal(compiled(x.cuda()).cpu(), quantize(x, "nvfp4").dequantize())


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", [None, "mxfp4", "nvfp4", "fp8_e4m3"])
@pytest.mark.parametrize("format", FORMATS)
def test_products(format: str, activation: str | None, dtype: torch.dtype, kind: str) -> None:
    x, w = operands(kind, 5, 256, 48)
    if dtype == torch.float16:
        w = w * 2**-14  # the sums of loud channels would leave fp16's range
    x, w = x.to(dtype).cuda(), w.to(dtype).cuda()
    weight = quantized(w, format, activation)
    expected = activation64(x.cpu(), activation)
    assert_product(F.linear(x, weight).cpu(), expected, decode64(weight.cpu()))


def test_moving_there_and_back() -> None:
    """The class is chosen anew on each device, and the bytes stay."""
    layer = nn.Linear(64, 48)
    quantize_(layer, "mxfp4")
    before = layer.weight.qdata.clone()
    layer.cuda()
    assert layer.weight.qdata.is_cuda
    assert isinstance(layer.weight, MXTensor)
    assert layer(torch.randn(3, 64, device="cuda")).is_cuda
    layer.cpu()
    assert isinstance(layer.weight, EmulatedMXTensor)
    assert torch.equal(layer.weight.qdata, before)


def test_quantize_there_and_leave_it_there() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
    quantize_(model, "nvfp4", device="cuda")
    assert {p.device.type for p in model.parameters()} == {"cuda"}
    assert model(torch.randn(2, 64, device="cuda")).shape == (2, 32)
    assert "nvfp4" in str(summary(model))
    dequantize_(model)
    assert model[0].weight.is_cuda


def test_on_another_stream_and_in_a_cuda_graph() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)).to("cuda", torch.bfloat16)
    quantize_(model, "mxfp4")
    x = torch.randn(4, 64, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        expected = model(x)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            assert torch.equal(model(x), expected)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = model(x)
        graph.replay()
    assert torch.equal(captured, expected)
