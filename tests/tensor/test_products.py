"""y = x W^T + b against the float64 product of the quantized operands: every format, activation, dtype and data.

Each check is followed by its negative controls: a product that lost its bias, its activation quantization or its
orientation has to fail the same check.
"""

import pytest
import torch
import torch.nn.functional as F
from matmul_reference import ACTIVATIONS, DATA, FORMATS, activation64, assert_product, decode64, operands, quantized

M, N, K = 7, 10, 96


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", DATA)
def test_linear_computes_what_the_config_says(kind: str, format: str, activation: str | None) -> None:
    x, w = operands(kind, M, K, N)
    bias = torch.randn(N)
    weight = quantized(w, format, activation)
    y = F.linear(x, weight, bias)
    assert y.dtype == torch.float32
    assert_product(y, activation64(x, activation), decode64(weight), bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("format", FORMATS)
def test_linear_in_every_dtype(format: str, activation: str | None, dtype: torch.dtype) -> None:
    x, w = operands("gaussian", M, K, N)
    x, w, bias = x.to(dtype), w.to(dtype), torch.randn(N).to(dtype)
    weight = quantized(w, format, activation)
    for b in (bias, None):
        y = F.linear(x, weight, b)
        assert y.dtype == dtype
        assert_product(y, activation64(x, activation), decode64(weight), b)


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("format, activation", [("mxfp4", "mxfp4"), ("nvfp4", "nvfp4"), ("mxfp8_e5m2", "fp8_e4m3")])
def test_bfloat16_outputs_stay_within_their_own_rounding(kind: str, format: str, activation: str) -> None:
    x, w = (t.bfloat16() for t in operands(kind, M, K, N))
    weight = quantized(w, format, activation)
    assert_product(F.linear(x, weight), activation64(x, activation), decode64(weight))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_input_decides_the_dtype_of_the_output(format: str, dtype: torch.dtype) -> None:
    """A weight quantized from one dtype serves activations of another: its codes have no dtype of their own."""
    x, w = operands("gaussian", M, K, N)
    weight = quantized(w.bfloat16(), format)
    y = F.linear(x.to(dtype), weight)
    assert y.dtype == dtype
    assert_product(y, x.to(dtype).double(), decode64(weight))


@pytest.mark.parametrize("mode", ["floor", "even", "ceil", "rceil"])
@pytest.mark.parametrize("activation", ["mxfp4", "mxfp6_e3m2", "mxfp8_e4m3"])
def test_activation_scale_mode_is_used(activation: str, mode: str) -> None:
    x, w = operands("gaussian", M, K, N)
    weight = quantized(w, "mxfp4").with_activation(activation, scale_mode=mode)
    assert_product(F.linear(x, weight), activation64(x, activation, mode), decode64(weight))


def test_activation_scale_modes_differ() -> None:
    """The control of the test above: on this data one mode cannot pass for another."""
    x, w = operands("gaussian", M, K, N)
    weight = quantized(w, "mxfp4").with_activation("mxfp4", scale_mode="floor")
    with pytest.raises(AssertionError):
        assert_product(F.linear(x, weight), activation64(x, "mxfp4", "ceil"), decode64(weight))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_assert_product_catches_wrong_products(format: str, activation: str | None, dtype: torch.dtype) -> None:
    """Square operands, so that a transposed weight is caught by its values and not by its shape."""
    n = 64
    x, w = (t.to(dtype) for t in operands("gaussian", M, n, n))
    bias = torch.randn(n).to(dtype)
    weight = quantized(w, format, activation)
    y = F.linear(x, weight, bias)
    x64, w64 = activation64(x, activation), decode64(weight)
    assert_product(y, x64, w64, bias)

    with pytest.raises(AssertionError):
        assert_product(y, x64, w64, None)
    with pytest.raises(AssertionError):
        assert_product(y, x64, w64.mT, bias)
    with pytest.raises(AssertionError):
        assert_product(y, x64, w.double(), bias)
    for other in ACTIVATIONS:
        # Activations of E4M3 in blocks and in rows nearly agree; bfloat16's own rounding may hide the difference.
        if other != activation and dtype == torch.float32:
            with pytest.raises(AssertionError):
                assert_product(y, activation64(x, other), w64, bias)
    if activation is not None:
        with pytest.raises(AssertionError):
            assert_product(y, x.double(), w64, bias)


@pytest.mark.parametrize("format, activation", [("mxfp4", "mxfp4"), ("nvfp4", None), ("mxfp8_e4m3", "fp8_e5m2")])
def test_a_tensor_from_quantize_multiplies_like_a_weight_of_quantize_(format: str, activation: str | None) -> None:
    """`as_weight` chooses the class ahead of time; a plain MXTensor chooses its backend at the call."""
    from mxquant import quantize

    x, w = operands("gaussian", M, K, N)
    plain = quantize(w, format).with_activation(activation)
    assert torch.equal(F.linear(x, plain), F.linear(x, quantized(w, format, activation)))


@pytest.mark.parametrize("activation", ["mxfp4", "nvfp4", "fp8_e4m3"])
def test_a_static_activation_scale_is_used_as_given(activation: str) -> None:
    """A checkpoint's own scale replaces the dynamic one: NVFP4's per-tensor scale, FP8's row scale."""
    from mxquant.formats import get_format
    from mxquant.formats.block import dequantize_blocks, quantize_blocks

    x, w = operands("gaussian", M, K, N)
    scale = torch.tensor(0.0625)
    weight = quantized(w, "mxfp4")
    if activation == "mxfp4":
        with pytest.raises(ValueError, match="scale"):
            weight.with_activation(activation, scale=scale)
        return
    weight = weight.with_activation(activation, scale=scale)
    if activation == "nvfp4":
        nvfp4 = get_format("nvfp4")
        codes, block_scale = quantize_blocks(x, nvfp4, per_tensor_scale=scale)
        x64 = dequantize_blocks(codes, block_scale, nvfp4, K, per_tensor_scale=scale).double()
    else:
        x64 = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale.double()
    assert_product(F.linear(x, weight), x64, decode64(weight))
