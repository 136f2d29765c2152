"""Quantizing ordinary tensors to MXTensors.

While a graph is traced, quantizing is an opaque operator: a compiler's own arithmetic (fused multiply-adds, approximate
divisions) would not give the same bytes. In eager the function is called directly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mxquant.backends.base import Operand
from mxquant.formats.scale import NAN_BYTE, nvfp4_per_tensor_scale
from mxquant.formats.spec import Format, get_format, resolve_scale_mode
from mxquant.ops import hadamard, is_traced, quantize_blocks
from mxquant.scheme import Scheme
from mxquant.tensor.checks import check_multiplier
from mxquant.tensor.metadata import DTYPES, Metadata
from mxquant.tensor.mxtensor import MXTensor

_NONFINITE = ("nan", "raise")


def quantize(
    x: Tensor,
    format: str,
    *,
    scale_mode: str | None = None,
    axis: int = -1,
    nonfinite: str = "nan",
    per_tensor_scale: Tensor | None = None,
    canonical_zero: bool = False,
    rotation: int | None = None,
) -> MXTensor:
    """Quantize a tensor to a microscaling format, in blocks along one axis.

    The bytes depend only on the values: the same for bf16, fp16 and fp32, on every device, in eager and compiled.
    Rounding is to nearest even and saturates (OCP MX v1.0 section 6.3). Not differentiable.

    Args:
        x: bf16, fp16, fp32, or fp64 within fp32's range; any rank from 1, any strides; not empty.
        format: "mxfp4", "mxfp6_e2m3" (or "mxfp6"), "mxfp6_e3m2", "mxfp8_e4m3" (or "mxfp8"), "mxfp8_e5m2" or "nvfp4".
        scale_mode: "floor" (OCP), "even" (AMD Quark, vLLM, compressed-tensors), "ceil", "rceil" (NVIDIA), "even_fp4"
            (compressed-tensors' MXFP8), "mse" (of even's exponent and the one below, that of the least squared error);
            None: the format's default, even, for MXFP8 rceil. NVFP4 has "even" and "four_over_six".
        axis: the axis that blocks run along; its length need not be a multiple of the block.
        nonfinite: "nan": a block that holds NaN or Inf decodes to NaN (scale byte 255, codes 0). "raise": raise a
            ValueError that names the first one.
        per_tensor_scale: NVFP4 only: the fp32 multiplier, of one element, or of the shape of `x` with some sizes 1,
            the blocked axis among them. None: amax / 2688 (amax / 1536 in mode four_over_six) of the finite elements
            of `x`.
        canonical_zero: encode -0 as +0, as AMD Quark does.
        rotation: None, or the format's block size: rotate each block by a Hadamard matrix in fp32 before quantizing
            (`mxquant.reference.hadamard`). `dequantize` rotates back; a matmul rotates its other operand.

    Returns:
        An MXTensor of x's shape, dtype and device, weight-only.

    Raises:
        TypeError: `x` is not a tensor of these dtypes.
        ValueError: an unknown option, an empty tensor, an axis out of range, a per-tensor scale for another format,
            fp64 beyond fp32's range, or a rotation that does not fit.
        NotImplementedError: `x` is on the meta device or already quantized.
    """
    scheme = Scheme(format, scale_mode=scale_mode, rotation=rotation)
    fmt = get_format(scheme.weight)
    mode = resolve_scale_mode(fmt, scale_mode)
    assert mode is not None, "every weight format has scale modes"
    _check_input(x, axis, nonfinite)
    axis = axis if axis < 0 else axis - x.dim()
    scheme.check_length(x.shape[axis])
    physical = x.detach().movedim(axis, -1)
    if per_tensor_scale is not None:
        per_tensor_scale = _physical_per_tensor_scale(fmt, per_tensor_scale, x, axis)
    raises = nonfinite == "raise"
    run = torch.ops.mxquant.quantize if is_traced(physical) else _quantize_last_axis
    qdata, scale, *rest = run(physical, fmt.name, mode, per_tensor_scale, canonical_zero, raises, rotation)
    operand = Operand(qdata, scale, *(rest or [per_tensor_scale]))
    return MXTensor(operand, Metadata(scheme, axis, x.dtype), x.shape)


def _check_input(x: Tensor, axis: int, nonfinite: str) -> None:
    if isinstance(x, MXTensor):
        raise NotImplementedError(f"{x!r} is quantized already; call .dequantize() first to quantize it anew")
    if not isinstance(x, Tensor) or x.dtype not in DTYPES:
        given = f"a tensor of dtype {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(
            f"only bfloat16, float16, float32 and float64 tensors can be quantized; got {given}. Convert it first"
        )
    if x.device.type == "meta":
        raise NotImplementedError(
            f"a meta tensor of shape {tuple(x.shape)} has no values to quantize; load or materialize it first"
        )
    if type(axis) is not int:
        raise TypeError(f"axis is one integer; got {axis!r}")
    if x.dim() == 0 or not -x.dim() <= axis < x.dim():
        raise ValueError(
            f"axis {axis} is out of range for a tensor of shape {tuple(x.shape)}; blocks need an axis to run along"
        )
    if x.numel() == 0:
        raise ValueError(f"a tensor of shape {tuple(x.shape)} is empty: there is nothing to quantize; leave it out")
    if nonfinite not in _NONFINITE:
        raise ValueError(f"nonfinite={nonfinite!r} is unknown; use one of {', '.join(_NONFINITE)}")


def _physical_per_tensor_scale(fmt: Format, scale: Tensor, x: Tensor, axis: int) -> Tensor:
    """A given per-tensor scale as it is stored: 0-dim, or with the blocked axis, of size 1, last."""
    if not fmt.per_tensor:
        raise ValueError(f"per_tensor_scale is superfluous for {fmt.name}, only nvfp4 has one; leave it out")
    check_multiplier("per_tensor_scale", scale, x.device)
    if scale.numel() == 1:
        return scale.reshape(())
    fits = scale.dim() == x.dim() and all(a in (1, b) for a, b in zip(scale.shape, x.shape, strict=True))
    if not fits or scale.shape[axis] != 1:
        raise ValueError(
            f"per_tensor_scale of shape {tuple(scale.shape)} does not fit {tuple(x.shape)}: give one element, or the "
            f"same rank with sizes 1 or equal, 1 along the blocked axis {axis}"
        )
    return scale.movedim(axis, -1)


def _quantize_last_axis(
    x: Tensor,
    format: str,
    mode: str,
    per_tensor_scale: Tensor | None,
    canonical_zero: bool,
    raises: bool,
    rotation: int | None,
) -> list[Tensor]:
    """Codes and scales of `x` along its last axis, and for NVFP4 the per-tensor scale if none was given."""
    fmt, computed = get_format(format), []
    if fmt.per_tensor and per_tensor_scale is None:
        if rotation is not None:  # the scale is of the rotated values
            x, rotation = hadamard(x, rotation, torch.promote_types(x.dtype, torch.float32)), None
        per_tensor_scale = nvfp4_per_tensor_scale(x, mode)
        computed.append(per_tensor_scale)
    qdata, scale = quantize_blocks(
        x, fmt, mode, per_tensor_scale=per_tensor_scale, canonical_zero=canonical_zero, rotation=rotation
    )
    if raises and (bad := scale == NAN_BYTE).any():
        first = tuple(bad.nonzero()[0].tolist())
        raise ValueError(
            f"NaN or Inf in {int(bad.sum())} blocks, the first at block index {first} (the blocked axis last); "
            'clean the tensor, or pass nonfinite="nan" to have such blocks decode to NaN'
        )
    return [qdata, scale, *computed]


@torch.library.custom_op("mxquant::quantize", _quantize_last_axis, mutates_args=()).register_fake
def _(x: Tensor, format: str, mode: str, per_tensor_scale: Tensor | None, *rest: Any) -> list[Tensor]:
    fmt, (*lead, length) = get_format(format), x.shape
    qdata = x.new_empty(*lead, fmt.packed_size(length), dtype=torch.uint8)
    scale = x.new_empty(*lead, fmt.num_blocks(length), dtype=torch.uint8)
    computes_scale = fmt.per_tensor and per_tensor_scale is None
    return [qdata, scale, *([x.new_empty((), dtype=torch.float32)] if computes_scale else [])]
