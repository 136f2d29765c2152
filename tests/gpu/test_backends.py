"""The native backends against float64, on every kind of data, shape and number of rows that they accept."""

import pytest
import torch
import torch.nn.functional as F
from matmul_reference import ACTIVATIONS, FORMATS, activation64, assert_product, decode64, operands, quantized
from torch import Tensor, nn

from mxquant import MXTensor, explain, quantize, quantize_
from mxquant.tensor import as_weight

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
ROWS = [1, 2, 15, 16, 17, 31, 33, 64, 65, 128, 129, 200, 256, 257, 700]


def w4a4(w: Tensor, backend: str = "auto") -> MXTensor:
    return as_weight(quantize(w, "mxfp4").with_activation("mxfp4"), backend)


def check(y: Tensor, x: Tensor, weight: MXTensor, bias: Tensor | None = None) -> None:
    expected = activation64(x.cpu(), weight.activation)
    assert_product(y.cpu(), expected, decode64(weight.cpu()), None if bias is None else bias.cpu())


@hopper
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", ["gaussian", "positive", "cancelling", "student_t", "loud_channels"])
@pytest.mark.parametrize("n, k", [(64, 256), (192, 768), (320, 2048)])
def test_fp8(n: int, k: int, kind: str, rows: int) -> None:
    x, w = operands("gaussian" if kind == "student_t" else kind, rows, k, n)
    if kind == "student_t":
        x = torch.distributions.StudentT(2.0).sample((rows, k))
    x, w = x.bfloat16().cuda(), w.bfloat16().cuda()
    weight, bias = w4a4(w), torch.randn(n, device="cuda").bfloat16()
    assert explain(weight).chosen == "fp8"
    check(F.linear(x, weight), x, weight)
    check(F.linear(x, weight, bias), x, weight, bias)


@hopper
@pytest.mark.parametrize("rows", [16, 64, 200, 700])
def test_fp8_where_single_products_rule(rows: int) -> None:
    """Both operands over a uniform variable: tails without a mean. FP8 tensor cores align 32 products to the largest
    with 14 bits, which no promotion mends: 2.2e-3 of |x| |w|^T was the most seen, twice that is granted.
    """
    x, w = (t.bfloat16().cuda() for t in operands("heavy_tailed", rows, 768, 192))
    weight = w4a4(w)
    x64, w64 = activation64(x.cpu(), "mxfp4"), decode64(weight.cpu().canonical())
    error = (F.linear(x, weight).cpu().double() - x64 @ w64.mT).abs() - 2**-8 * (x64 @ w64.mT).abs()
    assert (error <= 4.4e-3 * (x64.abs() @ w64.abs().mT)).all()


@hopper
@pytest.mark.parametrize("rows", [1, 40, 128, 300])
@pytest.mark.parametrize("span", [20, 28, 29, 60, 240])
def test_rows_that_fp8_cannot_hold_are_exact(span: int, rows: int) -> None:
    """One block far below the rest, met by weights as far above: dropping it, or clamping it, would show."""
    x, w = torch.randn(rows, 512), torch.randn(128, 512)
    x[:, :32] *= 2.0 ** -min(span, 122)
    x[:, 32:] *= 2.0 ** max(0, span - 122)
    x = x.bfloat16().cuda()
    w[:, :32] *= 2.0**12
    weight = w4a4(w.bfloat16().cuda())
    check(F.linear(x, weight), x, weight)


@hopper
def test_weights_that_fp8_cannot_hold_go_to_another_backend() -> None:
    w = torch.randn(128, 512)
    w[:, :32] *= 2.0**-20
    weight, x = w4a4(w.bfloat16().cuda()), torch.randn(5, 512).bfloat16().cuda()
    assert explain(weight).chosen == "triton"
    check(F.linear(x, weight), x, weight)
    with pytest.raises(ValueError, match="does not fit"):
        w4a4(w.bfloat16().cuda(), "fp8")


@hopper
def test_nan_and_inf_rows_stay_their_own() -> None:
    x, w = torch.randn(40, 256).bfloat16().cuda(), torch.randn(64, 256).bfloat16().cuda()
    weight = w4a4(w)
    clean = F.linear(x, weight)
    x[3, 5], x[20, 9] = torch.nan, torch.inf
    y = F.linear(x, weight)
    others = [row for row in range(40) if row not in (3, 20)]
    assert y[[3, 20]].isnan().all()
    # A row beside an unfit one is recomputed block by block: the same operands, added up in another order.
    assert (y[others].double() - clean[others].double()).abs().max() <= 2**-8 * clean.abs().max()


@hopper
def test_a_row_does_not_depend_on_its_batch_mates() -> None:
    x, w = torch.randn(16, 512).bfloat16().cuda(), torch.randn(64, 512).bfloat16().cuda()
    weight = w4a4(w)
    assert torch.equal(F.linear(x, weight)[3], F.linear(x[3:4], weight)[0])


@hopper
def test_prepared_weights_save_and_slice_as_canonical_bytes() -> None:
    w = torch.randn(128, 512).bfloat16().cuda()
    plain, weight = quantize(w, "mxfp4"), w4a4(w)
    assert weight.metadata.layout == "mxfp4_tiles"
    assert weight.nbytes == plain.nbytes
    for part in (weight.canonical(), weight.cpu().canonical()):
        assert torch.equal(part.qdata.cpu(), plain.qdata.cpu())
        assert torch.equal(part.scale.cpu(), plain.scale.cpu())
    assert torch.equal(weight[64:].dequantize(), plain[64:].dequantize())
    x = torch.randn(3, 512).bfloat16().cuda()
    check(F.linear(x, weight[64:]), x, weight[64:])


@hopper
@pytest.mark.parametrize("rows", [1, 16, 100, 300])
def test_compiled_captured_and_on_another_stream(rows: int) -> None:
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 64)).to("cuda", torch.bfloat16)
    quantize_(model, "mxfp4")
    x = torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        expected = model(x)
        assert torch.equal(torch.compile(model, fullgraph=True)(x), expected)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            assert torch.equal(model(x), expected)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = model(x)
        captured.fill_(torch.nan)
        graph.replay()
    assert torch.equal(captured, expected)


@hopper
def test_gradients_pass() -> None:
    layer = nn.Linear(256, 64, bias=False).to("cuda", torch.bfloat16)
    quantize_(layer, "mxfp4")
    x = torch.randn(9, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(9, 64, device="cuda", dtype=torch.bfloat16)
    layer(x).backward(grad)
    assert x.grad is not None
    assert_product(x.grad.cpu(), grad.double().cpu(), decode64(layer.weight.cpu().canonical()).mT)


@pytest.mark.parametrize("n, k", [(40, 96), (130, 232), (176, 640), (16, 2880)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("format", FORMATS)
def test_triton(format: str, activation: str | None, n: int, k: int) -> None:
    for rows, kind in ((1, "gaussian"), (37, "heavy_tailed"), (65, "loud_channels"), (3, "positive")):
        x, w = (t.bfloat16().cuda() for t in operands(kind, rows, k, n))
        weight, bias = quantized(w, format, activation), torch.randn(n, device="cuda").bfloat16()
        assert explain(weight).chosen == "triton"
        check(F.linear(x, weight, bias), x, weight, bias)
        check(F.linear(x.mT.contiguous().mT, weight), x, weight)
        if activation is not None and kind in ("gaussian", "positive"):  # whose results fp16 holds
            check(F.linear(x.half(), weight), x.half(), weight)


@pytest.mark.parametrize("format", FORMATS)
def test_triton_on_slices_and_across_the_blocks(format: str) -> None:
    w = torch.randn(48, 200).bfloat16().cuda()
    weight = quantized(w, format)
    for part in (weight[5:30], weight[:, 64:], weight[:, 7:150]):
        x = torch.randn(4, part.shape[1]).bfloat16().cuda()
        check(F.linear(x, part), x, part)
    grad = torch.randn(4, 48).bfloat16().cuda()
    assert_product((grad @ weight).cpu(), grad.double().cpu(), decode64(weight.cpu()).mT)


@pytest.mark.parametrize("dropped", ["bias", "activation"])
def test_the_check_notices(dropped: str) -> None:
    """A dropped bias and a skipped quantization of the activations fail it."""
    x, w = (t.bfloat16().cuda() for t in operands("gaussian", 5, 256, 64))
    weight, bias = w4a4(w), torch.randn(64, device="cuda").bfloat16()
    y = F.linear(x, weight) if dropped == "bias" else F.linear(x, weight.with_activation(None), bias)
    with pytest.raises(AssertionError):
        check(y, x, weight, bias)
