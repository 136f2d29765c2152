"""Scales: E8M0 bytes by integer arithmetic on fp32 bits, NVFP4's E4M3 scales, and their values.

Uses no log2, no exp2 and no half-precision arithmetic: there implementations disagree by one. Sources:
OCP MX v1.0 section 5.4.1 (E8M0: byte b is 2^(b-127), 255 is NaN, there is no zero) and 6.3 (`floor`); `even`: AMD
Quark, torchao EVEN; `ceil`: torchao CEIL; `rceil`: NVIDIA cuBLAS, torchao RCEIL; `even_fp4`: compressed-tensors'
MXFP8, which uses FP4's rounding constant for every element format; NVFP4: NVIDIA ModelOpt; one scale a row: the
per-token dynamic quantization of vLLM and compressed-tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mxquant.formats.convert import chunk_elements, divide, to_fp32
from mxquant.formats.element import decode, encode
from mxquant.formats.spec import ELEMENT_FORMATS, ElementFormat, Format

NAN_BYTE = 255
_INFINITY_BITS = 0x7F800000
_MIN_NORMAL_BITS = 0x800000
_MANTISSA_MASK = 0x7FFFFF
_FP4_MANTISSA_BITS = ELEMENT_FORMATS["e2m1"].mantissa_bits
_E4M3 = ELEMENT_FORMATS["e4m3"]
_E4M3_MIN = 2.0**-9
_E2M1_MAX = ELEMENT_FORMATS["e2m1"].max_value
# The largest block scale in four_over_six: times 6/4, for a maximum of 4 instead of 6, it is still a value of E4M3.
_FOUR_OVER_SIX_MAX = 256.0
_FP32_MIN_NORMAL = 2.0**-126


def e8m0_from_amax(amax_bits: Tensor, element: ElementFormat, mode: str) -> Tensor:
    """The E8M0 byte of blocks whose largest magnitude has the fp32 bits `amax_bits`.

    Args:
        amax_bits: int32, sign bit clear.
        mode: "floor", "even", "ceil", "rceil" or "even_fp4".

    Returns:
        int32 in 0..254; 255 where the magnitude is Inf or NaN.
    """
    nonfinite = amax_bits >= _INFINITY_BITS
    if element.max_exponent == 0:
        # Subnormals from 2^-127 on as numbers with exponent 0. Under other element formats all of them get byte 0.
        amax_bits = torch.where(
            amax_bits < _MIN_NORMAL_BITS, (amax_bits * 2 - _MIN_NORMAL_BITS).clamp(min=0), amax_bits
        )
    exponent = amax_bits >> 23
    if mode == "even":
        exponent = (amax_bits + (1 << (22 - element.mantissa_bits))) >> 23
    elif mode == "even_fp4":
        exponent = (amax_bits + (1 << (22 - _FP4_MANTISSA_BITS))) >> 23
    elif mode == "ceil":
        exponent = exponent + ((amax_bits & _MANTISSA_MASK) != 0)
    elif mode == "rceil":
        # The smallest e with amax <= max_value * 2^e: one more where amax has the larger mantissa.
        max_mantissa = int((element.max_value / 2.0**element.max_exponent - 1) * (1 << 23))
        exponent = exponent + ((amax_bits & _MANTISSA_MASK) > max_mantissa)
    elif mode != "floor":
        raise ValueError(f"scale mode {mode!r} is unknown; use floor, even, ceil, rceil or even_fp4")
    byte = (exponent - element.max_exponent).clamp_(0, NAN_BYTE - 1)
    return byte.masked_fill_(nonfinite, NAN_BYTE)


def e8m0_reciprocal(byte: Tensor) -> Tensor:
    """fp32 2^(127-b) of int32 bytes 0..254; -Inf for 255."""
    bits = (254 - byte) << 23
    return bits.masked_fill_(byte == 254, 1 << 22).view(torch.float32)


def e8m0_to_float(byte: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """2^(b-127) of uint8 bytes, NaN for 255, exact in fp32, fp64 and bf16 (byte 0 is their subnormal 2^-127)."""
    bits = byte.to(torch.int32) << 23
    bits.masked_fill_(byte == 0, 1 << 22).masked_fill_(byte == NAN_BYTE, 0x7FC00000)
    return bits.view(torch.float32).to(dtype)


def e4m3_to_float(byte: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Value of uint8 E4M3 bytes: NVFP4's block scales."""
    return decode(byte, _E4M3, dtype)


def scale_to_float(byte: Tensor, scale_format: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Value of a block format's uint8 scale bytes."""
    return (e4m3_to_float if scale_format == "e4m3" else e8m0_to_float)(byte, dtype)


def row_scale(x: Tensor, fmt: Format) -> Tensor:
    """FP8's fp32 scales [..., 1] of the rows of `x` [..., K], amax / max_value computed in fp32 for every dtype: 1 for
    an all-zero row, NaN for one that holds NaN or Inf.
    """
    amax = to_fp32(x).abs().amax(-1, keepdim=True)
    scale = divide(amax, fmt.element.max_value).clamp_(min=_FP32_MIN_NORMAL)
    return scale.masked_fill_(amax == 0, 1.0).masked_fill_(~amax.isfinite(), torch.nan)


def nvfp4_per_tensor_scale(x: Tensor, mode: str | None = None) -> Tensor:
    """NVFP4's fp32 scale, 0-dim, a multiplier in decoding: amax / (448 * 6) of the finite elements, ModelOpt's
    `weight_scale_2`; in mode `four_over_six` amax / (256 * 6), as in its paper.

    An all-zero tensor and an empty one get 1. The scale is at least fp32's smallest normal number, since it divides.
    """
    if x.numel() == 0:
        return torch.ones((), dtype=torch.float32, device=x.device)
    chunks = x.flatten().split(chunk_elements(x))
    return _nvfp4_scale(torch.stack([_largest_finite(chunk) for chunk in chunks]).amax(), mode)


def nvfp4_row_scale(x: Tensor, mode: str | None = None) -> Tensor:
    """`nvfp4_per_tensor_scale` of each row of `x` [..., K], for activations: fp32 [..., 1]."""
    return _nvfp4_scale(_largest_finite(x, dim=-1, keepdim=True), mode)


def _largest_finite(x: Tensor, **of: Any) -> Tensor:
    """The largest finite magnitude, fp32, in two passes over `x` in its own dtype. `of`: as for `torch.aminmax`."""
    values = to_fp32(x) if x.dtype == torch.float64 else x
    low, high = torch.aminmax(values.nan_to_num(0.0, 0.0, 0.0), **of)
    return torch.maximum(high, -low).to(torch.float32)


def _nvfp4_scale(amax: Tensor, mode: str | None) -> Tensor:
    largest = _FOUR_OVER_SIX_MAX if mode == "four_over_six" else _E4M3.max_value
    scale = divide(amax, _E2M1_MAX * largest).clamp_(min=_FP32_MIN_NORMAL)
    return scale.masked_fill_(amax == 0, 1.0)


def e4m3_from_amax(amax: Tensor, per_tensor_scale: Tensor, largest: float = _E2M1_MAX) -> Tensor:
    """NVFP4's E4M3 block scale bytes, as ModelOpt: amax / (6 * per_tensor_scale) in [2^-9, 448], 1.0 for an all-zero
    block.

    Args:
        amax: fp32 [..., blocks]; Inf or NaN gives byte 255.
        per_tensor_scale: fp32, broadcastable.
        largest: the value that the block's maximum becomes.
    """
    ratio = (amax / (largest * per_tensor_scale)).masked_fill_(amax == 0, 1.0)
    return encode(ratio.clamp_(_E4M3_MIN, _E4M3.max_value), _E4M3).masked_fill_(~amax.isfinite(), NAN_BYTE)
