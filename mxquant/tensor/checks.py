"""Checks of the plain tensors that an MXTensor is made of."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mxquant.backends.base import Operand
from mxquant.formats.spec import Format, get_format
from mxquant.ops import is_traced
from mxquant.tensor.metadata import Metadata, physical_shape

_BIT_DTYPES = {torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu}


def check_operand(operand: Operand, metadata: Metadata, shape: Sequence[int]) -> Operand:
    """`operand`, in the canonical layout, with a per-tensor scale of one element made 0-dim.

    Raises:
        ValueError: a shape or device does not fit, or a per-tensor scale is missing or superfluous.
        TypeError: codes or scales are not uint8, or the per-tensor scale is not fp32.
    """
    fmt, physical = get_format(metadata.scheme.weight), physical_shape(shape, metadata.axis)
    end, device = metadata.block_offset + physical[-1], operand.qdata.device
    for name, given, last in (
        ("qdata", operand.qdata, fmt.packed_size(end)),
        ("scale", operand.scale, fmt.num_blocks(end)),
    ):
        if tuple(given.shape) != (*physical[:-1], last):
            raise ValueError(
                f"{name} of shape {tuple(given.shape)} does not fit a {fmt.name} tensor of shape {tuple(shape)} "
                f"blocked along axis {metadata.axis}: its shape must be {(*physical[:-1], last)}"
            )
        if given.dtype != torch.uint8:
            raise TypeError(f"{name} is a tensor of uint8 bytes; got {given.dtype}")
        if given.device != device:
            raise ValueError(f"{name} is on {given.device}, qdata on {device}; put them on one device")
    return _check_per_tensor_scale(operand, fmt)


def _check_per_tensor_scale(operand: Operand, fmt: Format) -> Operand:
    given, lead = operand.per_tensor_scale, operand.qdata.shape[:-1]
    if given is None:
        if fmt.per_tensor:
            raise ValueError(f"per_tensor_scale is missing: {fmt.name} has an fp32 multiplier")
        return operand
    if not fmt.per_tensor:
        raise ValueError(f"per_tensor_scale is superfluous for {fmt.name}, only nvfp4 has one; leave it out")
    check_multiplier("per_tensor_scale", given, operand.qdata.device)
    if given.numel() == 1:
        return operand._replace(per_tensor_scale=given.detach().reshape(()))
    if (
        given.dim() != len(lead) + 1
        or given.shape[-1] != 1
        or any(a not in (1, b) for a, b in zip(given.shape, lead, strict=False))
    ):
        raise ValueError(
            f"per_tensor_scale of shape {tuple(given.shape)} does not fit qdata of shape {tuple(operand.qdata.shape)}: "
            "give one element, or the same rank with 1 last and other sizes 1 or equal"
        )
    return operand


def check_multiplier(name: str, scale: Tensor, device: torch.device) -> None:
    """Refuse what cannot be a scale that values are multiplied with.

    Raises:
        TypeError: not an fp32 tensor on `device`.
        ValueError: not positive and finite (not checked while a graph is traced).
    """
    if not isinstance(scale, Tensor) or scale.dtype != torch.float32 or scale.device != device:
        given = f"{scale.dtype} on {scale.device}" if isinstance(scale, Tensor) else repr(scale)
        raise TypeError(f"{name} is a float32 tensor on {device}; got {given}")
    if not is_traced(scale) and not bool(((scale > 0) & scale.isfinite()).all()):
        raise ValueError(f"{name} is positive and finite; got {scale.flatten()[:4].tolist()}")


def as_bits(name: str, tensor: Tensor) -> Tensor:
    """A tensor of uint8 or of an 8-bit float, viewed as uint8; a TypeError for others."""
    if not isinstance(tensor, Tensor) or tensor.dtype not in _BIT_DTYPES:
        given = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{name} is a tensor of bytes (uint8, or an 8-bit float taken as its bits); got {given}")
    return tensor.detach().view(torch.uint8)
