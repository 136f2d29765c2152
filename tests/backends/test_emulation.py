"""The emulation backend by itself: sums over long rows, and weights decoded in several chunks."""

import pytest
import torch
import torch.nn.functional as F
from matmul_reference import FORMATS, activation64, assert_product, decode64, operands, quantized

from mxquant.backends import emulation

PAIRS = [("mxfp4", None), ("mxfp4", "mxfp4"), ("mxfp8_e5m2", None), ("nvfp4", None), ("nvfp4", "nvfp4")]


@pytest.mark.parametrize("rows", [1, 2, 33])
@pytest.mark.parametrize("kind", ["positive", "gaussian", "heavy_tailed"])
@pytest.mark.parametrize("format, activation", PAIRS)
def test_long_sums_in_bfloat16_lose_only_the_output_rounding(
    format: str, activation: str | None, kind: str, rows: int
) -> None:
    """Accumulated in bfloat16, a sum of 4096 positive products would stop growing after 256 of them.

    4e-4 in Frobenius norm is what accumulation may add to the rounding of the exact result to bfloat16.
    """
    x, w = (t.bfloat16() for t in operands(kind, rows, 4096, 64))
    weight = quantized(w, format, activation)
    y64 = activation64(x, activation) @ decode64(weight).mT
    rounding = (y64.bfloat16().double() - y64).norm()
    assert (F.linear(x, weight).double() - y64).norm() <= rounding + 4e-4 * y64.norm()


@pytest.mark.parametrize("format", FORMATS)
def test_a_weight_of_several_chunks(format: str) -> None:
    """Larger than what is decoded at a time, and no multiple of it."""
    x, w = operands("gaussian", 3, 1056, 1100)
    assert w.nbytes > emulation._CPU_CHUNK
    weight = quantized(w, format)
    bias = torch.randn(1100)
    assert_product(F.linear(x, weight, bias), x.double(), decode64(weight), bias)
    grad = torch.randn(3, 1100)
    assert_product(grad @ weight, grad.double(), decode64(weight).mT)


@pytest.mark.parametrize("chunk", [1, 400, 4000])
@pytest.mark.parametrize("columns", [slice(None), slice(32, None), slice(7, 90)], ids=["whole", "from block 1", "off"])
@pytest.mark.parametrize("format", FORMATS)
def test_chunks_of_any_size_give_the_same_product(
    monkeypatch: pytest.MonkeyPatch, format: str, columns: slice, chunk: int
) -> None:
    """Chunks of one row or one block; borders of chunks and of slices fall anywhere."""
    monkeypatch.setattr(emulation, "_CPU_CHUNK", chunk)
    weight = quantized(torch.randn(11, 100), format)[:, columns]
    w64, k = decode64(weight), weight.shape[1]
    x, grad, bias = torch.randn(3, k), torch.randn(3, 11), torch.randn(11)
    assert_product(F.linear(x, weight, bias), x.double(), w64, bias)
    assert_product(grad @ weight, grad.double(), w64.mT)
    assert_product(torch.addmm(torch.ones(k), grad, weight), grad.double(), w64.mT, torch.ones(k))
    for dtype in (torch.bfloat16, torch.float64):
        assert_product(F.linear(x.to(dtype), weight), x.to(dtype).double(), w64)


@pytest.mark.parametrize("activation", ["mxfp4", "mxfp6_e2m3", "nvfp4", "fp8_e4m3"])
def test_activations_quantized_in_chunks(monkeypatch: pytest.MonkeyPatch, activation: str) -> None:
    """A row's operand is the same wherever the chunk that it falls in begins."""
    from mxquant.reference import fake_quantize

    monkeypatch.setattr(fake_quantize, "chunk_elements", lambda x: 250)
    x, w = operands("gaussian", 9, 100, 5)
    weight = quantized(w, "mxfp4", activation)
    assert_product(F.linear(x, weight), activation64(x, activation), decode64(weight))
