"""What a product with a quantized weight must give, in float64, from `mxquant.formats` alone.

The operands are decoded as code x scale x per-tensor scale in float64; nothing here goes through MXTensor's own
`dequantize` or through a backend, so that a fault there cannot hide behind itself.
"""

import torch
from torch import Tensor, nn

from mxquant import MXTensor, quantize
from mxquant.formats import ACTIVATION_FORMATS, WEIGHT_FORMATS, get_format
from mxquant.formats.block import dequantize_blocks, quantize_blocks
from mxquant.formats.element import decode, encode
from mxquant.formats.scale import nvfp4_row_scale, row_scale
from mxquant.tensor import as_weight

FORMATS = WEIGHT_FORMATS
ACTIVATIONS = (None, *ACTIVATION_FORMATS)
BLOCK = {name: get_format(name).block_size for name in FORMATS}


# Building weights


def quantized(w: Tensor, format: str, activation: str | None = None, **options: object) -> MXTensor:
    """`w` in `format`, as a weight whose activations are taken in `activation`, served by what this machine has."""
    return as_weight(quantize(w, format, **options).with_activation(activation))  # type: ignore[arg-type]


def quantized_linear(
    in_features: int,
    out_features: int,
    format: str = "mxfp4",
    activation: str | None = None,
    *,
    bias: bool = True,
    dtype: torch.dtype = torch.bfloat16,
) -> nn.Linear:
    """An nn.Linear with a frozen quantized weight."""
    linear = nn.Linear(in_features, out_features, bias=bias, dtype=dtype)
    weight = quantized(linear.weight.detach(), format, activation)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def dense(x: Tensor) -> Tensor:
    """`x` as a plain tensor."""
    return x.dequantize() if isinstance(x, MXTensor) else x


def same_bytes(a: MXTensor, b: MXTensor) -> bool:
    """Whether two quantized tensors hold the same codes and scales, and mean the same by them."""
    inner = ((a.qdata, b.qdata), (a.scale, b.scale), (a.per_tensor_scale, b.per_tensor_scale))
    for left, right in inner:
        if (left is None) != (right is None):
            return False
        if left is not None and right is not None and not torch.equal(left, right):
            return False
    return a.shape == b.shape and a.metadata == b.metadata


# Decoding in float64


def decode64(weight: MXTensor) -> Tensor:
    """A weight whose blocked axis is its last, decoded in float64."""
    return dequantize_blocks(
        weight.qdata,
        weight.scale,
        get_format(weight.format),
        weight.shape[-1],
        block_offset=weight.metadata.block_offset,
        per_tensor_scale=weight.per_tensor_scale,
        dtype=torch.float64,
    )


def activation64(x: Tensor, activation: str | None, scale_mode: str | None = None) -> Tensor:
    """`x` after activation quantization along its last axis, in float64."""
    if activation is None:
        return x.double()
    format = get_format(activation, activation=True)
    if format.block_size is None:
        scale = row_scale(x, format)
        return decode(encode(x.float() / scale, format.element), format.element, torch.float64) * scale.double()
    # NVFP4: each row brings its own "per-tensor" scale, so that a row does not depend on its batch mates.
    global_scale = nvfp4_row_scale(x, scale_mode) if format.per_tensor else None
    codes, scale = quantize_blocks(x.float(), format, scale_mode, per_tensor_scale=global_scale)
    return dequantize_blocks(codes, scale, format, x.shape[-1], per_tensor_scale=global_scale, dtype=torch.float64)


# Judging a product

# Half a unit in the last place of the output, relative to the value: what rounding to the output dtype may add.
OUTPUT_ROUNDING = {torch.bfloat16: 2**-9, torch.float16: 2**-11, torch.float32: 2**-24, torch.float64: 2**-24}
# The smallest rounding step of a subnormal output, halved.
OUTPUT_FLOOR = {torch.bfloat16: 2**-134, torch.float16: 2**-25, torch.float32: 2**-150, torch.float64: 2**-150}


def assert_product(y: Tensor, x64: Tensor, w64: Tensor, bias: Tensor | None = None) -> None:
    """`y` is x @ w^T + bias, as near as its dtype and its accumulation allow.

    A half-precision output may be off by its own rounding and by 2e-3 of (|x| |w|^T), the accumulation error that
    FP8 tensor cores reach and that every backend is held to. A float32 or float64 output is for backends that keep
    fp32 accuracy: K products summed in any order are off by at most K x 2^-24 of (|x| |w|^T), and a few more
    roundings are granted for decoding NVFP4 (scale x per-tensor scale), for the bias and for the output. In relative
    Frobenius norm float32 outputs also stay within 4e-4, cancellation aside.
    """
    y64 = x64 @ w64.mT
    magnitude = x64.abs() @ w64.abs().mT
    if bias is not None:
        y64 = y64 + bias.double()
        magnitude = magnitude + bias.double().abs()
    assert y.shape == y64.shape
    half = y.dtype in (torch.bfloat16, torch.float16)
    accumulation = 2e-3 if half else (x64.shape[-1] + 8) * 2**-24
    bound = accumulation * magnitude + OUTPUT_ROUNDING[y.dtype] * y64.abs() + OUTPUT_FLOOR[y.dtype]
    error = (y.double() - y64).abs()
    worst = (error / bound).max().item() if error.numel() else 0.0
    assert worst <= 1, f"the worst output is off by {worst:.3g} times what is allowed"
    if not half and y64.norm() > 1e-2 * magnitude.norm():
        assert error.norm() <= 4e-4 * y64.norm()


# Data that tells right from wrong

DATA = ("gaussian", "positive", "cancelling", "heavy_tailed", "loud_channels")


def operands(kind: str, rows: int, in_features: int, out_features: int) -> tuple[Tensor, Tensor]:
    """Float32 activations [rows, in_features] and weight [out_features, in_features] of one kind."""
    x = torch.randn(rows, in_features)
    w = torch.randn(out_features, in_features)
    if kind == "positive":
        return x.abs(), w.abs()
    if kind == "cancelling":
        # Each product meets its near opposite in the other half of K.
        half = in_features // 2
        x[:, half : 2 * half] = -x[:, :half] * (1 + 2**-6 * torch.rand(rows, half))
        w[:, half : 2 * half] = w[:, :half]
    elif kind == "heavy_tailed":
        x, w = x / torch.rand_like(x).clamp_min(1e-3), w / torch.rand_like(w).clamp_min(1e-3)
    elif kind == "loud_channels":
        x[:, ::11] *= 3000
        w[::3] *= 3000
    return x, w
