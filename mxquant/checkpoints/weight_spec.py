"""One quantized weight as a file stores it: which tensors it is made of, and how they become an MXTensor.

Bytes are copied or viewed, never requantized. What the headers declare is checked before anything is read.

Sources: the writers named at each producer's file beside this one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mxquant.backends.base import Operand
from mxquant.checkpoints.files import TensorInfo
from mxquant.formats import Format, get_format
from mxquant.formats.pack import pack_codes
from mxquant.tensor import Metadata, MXTensor
from mxquant.tensor.checks import check_operand
from mxquant.tensor.metadata import logical_shape, physical_shape

PACKED, BLOCKS, SWIZZLED = "packed", "blocks", "swizzled"
_BYTES = ("U8",)
_CODE_DTYPES = {"e4m3": ("U8", "F8_E4M3"), "e5m2": ("U8", "F8_E5M2")}
"""By element format; codes of the others are stored as bytes alone."""
_SCALE_DTYPES = {"e8m0": ("U8", "F8_E8M0"), "e4m3": ("F8_E4M3", "U8")}


@dataclass(frozen=True, kw_only=True)
class WeightSpec:
    """The tensors of one quantized weight, by their names in the files."""

    name: str
    """Of the weight itself, such as "model.layers.0.mlp.up_proj.weight"."""
    format: str
    qdata: str
    scale: str
    per_tensor_scale: str | None = None
    activation: str | None = None
    activation_scale_mode: str | None = None
    activation_scale: str | None = None
    divisor: bool = False
    """Whether the fp32 scales are divided by, not multiplied with."""
    axis: int = -1
    """The blocked axis of the logical weight; physically it is last."""
    arrangement: str = PACKED
    """"packed"; "blocks": [..., blocks, bytes of a block] (gpt-oss); "swizzled": torchao's 128 x 4 tiles of scales."""
    unpacked: bool = False
    """Whether codes of 6 bits are one a byte."""
    declared: tuple[Metadata, tuple[int, ...]] | None = None
    """Metadata and logical shape, where the file has them (mxquant's own); else they follow from the tensors."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of its tensors."""
        optional = (self.per_tensor_scale, self.activation_scale)
        return (self.qdata, self.scale, *(name for name in optional if name is not None))


def check_stored(stored: WeightSpec, tensors: Mapping[str, TensorInfo]) -> tuple[int, ...]:
    """The physical shape (the blocked axis last) of a weight whose tensors fit each other.

    Raises:
        ValueError: a tensor is missing, or of the wrong dtype or shape.
    """
    for part in stored.parts:
        if part not in tensors:
            raise ValueError(f"tensor {part!r} is missing: {stored.name!r} is quantized to {stored.format}")
    fmt = get_format(stored.format)
    qdata, scale = tensors[stored.qdata], tensors[stored.scale]
    _check_dtype(stored.qdata, qdata, _CODE_DTYPES.get(fmt.element.name, _BYTES), fmt)
    _check_dtype(stored.scale, scale, _SCALE_DTYPES[fmt.scale_format], fmt)
    if stored.per_tensor_scale is not None:
        _check_dtype(stored.per_tensor_scale, tensors[stored.per_tensor_scale], ("F32",), fmt)
    if stored.activation_scale is not None:
        _check_dtype(stored.activation_scale, tensors[stored.activation_scale], ("F32", "BF16", "F16"), fmt)
    if stored.declared is not None:
        return _check_declared(stored, qdata, scale, fmt, *stored.declared)
    shape = _physical_shape(stored, qdata.shape, fmt)
    expected = (*shape[:-1], fmt.num_blocks(shape[-1]))
    if stored.arrangement == SWIZZLED:
        count = math.prod(expected[:-2]) * _tiles(expected[-2], 128) * 128 * _tiles(expected[-1], 4) * 4
        fits = math.prod(scale.shape) == count
    else:
        fits = scale.shape == expected
    if not fits:
        raise ValueError(
            f"{stored.scale!r} of shape {scale.shape} does not fit {stored.qdata!r} of shape {qdata.shape}: "
            f"{fmt.name} of shape {shape} has scales {expected}"
        )
    return shape


def _check_declared(
    stored: WeightSpec, qdata: TensorInfo, scale: TensorInfo, fmt: Format, metadata: Metadata, shape: tuple[int, ...]
) -> tuple[int, ...]:
    if not -len(shape) <= metadata.axis < 0:
        raise ValueError(f"{stored.name!r}: axis {metadata.axis} is out of range for shape {shape}")
    physical = physical_shape(shape, metadata.axis)
    lead, end = physical[:-1], metadata.block_offset + physical[-1]
    for name, info, last in (
        (stored.qdata, qdata, fmt.packed_size(end)),
        (stored.scale, scale, fmt.num_blocks(end)),
    ):
        if info.shape != (*lead, last):
            raise ValueError(
                f"{name!r} has shape {info.shape}; {fmt.name} of shape {shape} along axis {metadata.axis} has "
                f"{(*lead, last)}"
            )
    return physical


def _physical_shape(stored: WeightSpec, shape: tuple[int, ...], fmt: Format) -> tuple[int, ...]:
    if stored.arrangement == BLOCKS:
        assert fmt.block_size is not None
        if len(shape) < 3 or shape[-1] != fmt.packed_size(fmt.block_size):
            raise ValueError(
                f"{stored.qdata!r} has shape {shape}; {fmt.name} blocks are [..., blocks, "
                f"{fmt.packed_size(fmt.block_size)} bytes]"
            )
        shape = (*shape[:-2], shape[-2] * shape[-1])
    if len(shape) < 2 or not all(shape):
        raise ValueError(f"{stored.qdata!r} has shape {shape}; a quantized weight is [rows, bytes] or a stack of such")
    if stored.unpacked or fmt.element.bits == 8:
        return shape
    if shape[-1] % fmt.bytes_per_group:
        raise ValueError(
            f"{stored.qdata!r} has rows of {shape[-1]} bytes; {fmt.name} packs {fmt.codes_per_group} codes in "
            f"{fmt.bytes_per_group}"
        )
    return (*shape[:-1], shape[-1] // fmt.bytes_per_group * fmt.codes_per_group)


def _check_dtype(name: str, info: TensorInfo, accepted: tuple[str, ...], fmt: Format) -> None:
    if info.dtype not in accepted:
        raise ValueError(f"{name!r} is {info.dtype}; for {fmt.name} it is {' or '.join(accepted)}")


def build(
    stored: WeightSpec, tensors: Mapping[str, TensorInfo], dtype: torch.dtype, read: Callable[[str], Tensor]
) -> MXTensor:
    """The MXTensor of a weight, around views of the tensors that `read` gives wherever their bytes lie as they should.

    Args:
        dtype: what the weight stands for.

    Raises:
        ValueError: its tensors are missing, do not fit, or hold a scale that is no positive number.
    """
    physical = check_stored(stored, tensors)
    fmt = get_format(stored.format)
    qdata, scale = read(stored.qdata).view(torch.uint8), read(stored.scale).view(torch.uint8)
    if stored.declared is not None:
        metadata, declared_shape = stored.declared
        scales = (None if name is None else read(name) for name in (stored.per_tensor_scale, stored.activation_scale))
        try:
            operand = check_operand(Operand(qdata, scale, *scales), metadata, declared_shape)
            return MXTensor(operand, metadata, declared_shape)
        except (ValueError, TypeError) as error:
            raise ValueError(f"cannot read {stored.name!r}: {error}") from error
    if stored.arrangement == BLOCKS:
        qdata = qdata.flatten(-2)
    if stored.arrangement == SWIZZLED:
        scale = unswizzle(scale, (*physical[:-1], fmt.num_blocks(physical[-1])))
    if stored.unpacked:
        qdata = pack_six_bit(qdata)
    shape = logical_shape(physical, stored.axis)
    try:
        per_tensor = _multiplier(stored, stored.per_tensor_scale, read)
        if per_tensor is not None and per_tensor.numel() > 1:  # one for each matrix of a stack
            per_tensor = per_tensor.reshape(-1, *[1] * (qdata.dim() - 1))
        tensor = MXTensor.from_qdata(qdata, scale, fmt.name, shape, dtype, stored.axis, per_tensor)
        if stored.activation is None:
            return tensor
        static = _multiplier(stored, stored.activation_scale, read)
        return tensor.with_activation(stored.activation, stored.activation_scale_mode, static)
    except (ValueError, TypeError) as error:
        raise ValueError(f"cannot read {stored.name!r}: {error}") from error


def _multiplier(stored: WeightSpec, name: str | None, read: Callable[[str], Tensor]) -> Tensor | None:
    if name is None:
        return None
    value = read(name)
    return 1 / value if stored.divisor else value.to(torch.float32, copy=True)


def unswizzle(scale: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Scales in tiles of 128 rows x 4 columns (cuBLAS's layout for block scales) as rows again.

    Args:
        scale: uint8, as many as [..., rows up to a multiple of 128, columns up to one of 4].
        shape: [..., rows, columns] without the padding.
    """
    *matrices, rows, columns = shape
    row_tiles, column_tiles = _tiles(rows, 128), _tiles(columns, 4)
    tiles = scale.reshape(-1, row_tiles, column_tiles, 32, 4, 4)
    padded = tiles.permute(0, 1, 4, 3, 2, 5).reshape(*matrices, row_tiles * 128, column_tiles * 4)
    return padded[..., :rows, :columns].contiguous()


def pack_six_bit(codes: Tensor) -> Tensor:
    """Codes of six bits, one a byte, packed four in three bytes.

    Args:
        codes: uint8 [..., K], K a multiple of 4, values below 64.

    Raises:
        ValueError: other values or another length.
    """
    if codes.shape[-1] % 4 or bool((codes > 63).any()):
        raise ValueError("codes of six bits, one a byte, are below 64 and come in fours")
    return pack_codes(codes, 6)


def _tiles(length: int, size: int) -> int:
    return -(-length // size)
