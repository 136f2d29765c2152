"""One quantized weight as files store it: which tensors it consists of, and how they become an MXTensor.

Bytes are copied or viewed, never requantized. `checked` compares what the headers declare; `build` reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mxquant.backends.base import Operand
from mxquant.checkpoints.files import TensorInfo
from mxquant.formats import Format, get_format
from mxquant.formats.pack import pack_codes
from mxquant.scheme import Scheme
from mxquant.tensor import Metadata, MXTensor
from mxquant.tensor.checks import check_operand
from mxquant.tensor.metadata import logical_shape, physical_shape

_FP8_DTYPES = {"e4m3": ("F8_E4M3",), "e5m2": ("F8_E5M2",)}
_SCALE_DTYPES = {"e8m0": ("U8", "F8_E8M0"), "e4m3": ("F8_E4M3", "U8")}


@dataclass(frozen=True, kw_only=True)
class WeightSpec:
    """One quantized weight: its scheme, its tensors by their names in the files, and how they are arranged."""

    name: str
    """Of the weight itself, such as "model.layers.0.mlp.up_proj.weight"."""
    scheme: Scheme
    qdata: str
    scale: str
    per_tensor_scale: str | None = None
    activation_scale: str | None = None
    axis: int = -1
    """The blocked axis of the logical weight, negative; physically it is last."""
    qdata_is_in_blocks: bool = False
    """Whether codes are [..., blocks, bytes of a block], not [..., bytes of a row]."""
    qdata_is_unpacked: bool = False
    """Whether 6-bit codes are stored one a byte."""
    scale_is_swizzled: bool = False
    """Whether scales lie in tiles of 128 x 4; see `unswizzle`."""
    scales_are_divisors: bool = False
    """Whether values are divided by the fp32 scales, not multiplied."""
    declared: tuple[Metadata, tuple[int, ...]] | None = None
    """Metadata and logical shape, if the file has them; else they follow from the tensors."""
    physical_shape: tuple[int, ...] = ()
    """The shape with the blocked axis last. Set by `checked`."""

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """The weight's tensors: codes and scales, then the fp32 scales that it has."""
        optional = (self.per_tensor_scale, self.activation_scale)
        return (self.qdata, self.scale, *(name for name in optional if name is not None))


def checked(spec: WeightSpec, tensors: Mapping[str, TensorInfo]) -> WeightSpec:
    """The spec with its `physical_shape`, once the headers say that its tensors fit each other.

    Raises:
        ValueError: a tensor is missing, or has the wrong dtype or shape.
    """
    fmt = get_format(spec.scheme.weight)
    for name in spec.tensor_names:
        if name not in tensors:
            raise ValueError(f"tensor {name!r} is missing: {spec.name!r} is quantized to {fmt.name}")
    qdata, scale = tensors[spec.qdata], tensors[spec.scale]
    _check_dtype(spec.qdata, qdata, ("U8", *_FP8_DTYPES.get(fmt.element.name, ())), fmt)
    _check_dtype(spec.scale, scale, _SCALE_DTYPES[fmt.scale_format], fmt)
    if spec.per_tensor_scale is not None:
        _check_dtype(spec.per_tensor_scale, tensors[spec.per_tensor_scale], ("F32",), fmt)
    if spec.activation_scale is not None:
        _check_dtype(spec.activation_scale, tensors[spec.activation_scale], ("F32", "BF16", "F16"), fmt)
    if spec.declared is None:
        shape = _physical_shape(spec, qdata.shape, fmt)
        _check_scale_shape(spec, qdata, scale, fmt, shape)
    else:
        shape = _check_declared(spec, qdata, scale, fmt, *spec.declared)
    return replace(spec, physical_shape=shape)


def _check_scale_shape(
    spec: WeightSpec, qdata: TensorInfo, scale: TensorInfo, fmt: Format, shape: tuple[int, ...]
) -> None:
    expected = (*shape[:-1], fmt.num_blocks(shape[-1]))
    if spec.scale_is_swizzled:
        count = math.prod(expected[:-2]) * _tiles(expected[-2], 128) * 128 * _tiles(expected[-1], 4) * 4
        fits = math.prod(scale.shape) == count
    else:
        fits = scale.shape == expected
    if not fits:
        raise ValueError(
            f"{spec.scale!r} of shape {scale.shape} does not fit {spec.qdata!r} of shape {qdata.shape}: "
            f"{fmt.name} of shape {shape} has scales {expected}"
        )


def _check_declared(
    spec: WeightSpec, qdata: TensorInfo, scale: TensorInfo, fmt: Format, metadata: Metadata, shape: tuple[int, ...]
) -> tuple[int, ...]:
    if not -len(shape) <= metadata.axis < 0:
        raise ValueError(f"{spec.name!r}: axis {metadata.axis} is out of range for shape {shape}")
    physical = physical_shape(shape, metadata.axis)
    lead, end = physical[:-1], metadata.block_offset + physical[-1]
    for name, info, last in (
        (spec.qdata, qdata, fmt.packed_size(end)),
        (spec.scale, scale, fmt.num_blocks(end)),
    ):
        if info.shape != (*lead, last):
            raise ValueError(
                f"{name!r} has shape {info.shape}; {fmt.name} of shape {shape} along axis {metadata.axis} has "
                f"{(*lead, last)}"
            )
    return physical


def _physical_shape(spec: WeightSpec, shape: tuple[int, ...], fmt: Format) -> tuple[int, ...]:
    if spec.qdata_is_in_blocks:
        assert fmt.block_size is not None
        if len(shape) < 3 or shape[-1] != fmt.packed_size(fmt.block_size):
            raise ValueError(
                f"{spec.qdata!r} has shape {shape}; {fmt.name} blocks are [..., blocks, "
                f"{fmt.packed_size(fmt.block_size)} bytes]"
            )
        shape = (*shape[:-2], shape[-2] * shape[-1])
    if len(shape) < 2 or not all(shape):
        raise ValueError(f"{spec.qdata!r} has shape {shape}; a quantized weight is [rows, bytes] or a stack of such")
    if spec.qdata_is_unpacked or fmt.element.bits == 8:
        return shape
    if shape[-1] % fmt.bytes_per_group:
        raise ValueError(
            f"{spec.qdata!r} has rows of {shape[-1]} bytes; {fmt.name} packs {fmt.codes_per_group} codes in "
            f"{fmt.bytes_per_group}"
        )
    return (*shape[:-1], shape[-1] // fmt.bytes_per_group * fmt.codes_per_group)


def _check_dtype(name: str, info: TensorInfo, accepted: tuple[str, ...], fmt: Format) -> None:
    if info.dtype not in accepted:
        raise ValueError(f"{name!r} is {info.dtype}; for {fmt.name} it is {' or '.join(accepted)}")


def build(spec: WeightSpec, dtype: torch.dtype, read: Callable[[str], Tensor]) -> MXTensor:
    """The MXTensor of a weight, around views of its tensors wherever the file arranges them as MXTensor does.

    Args:
        spec: as `checked` returned it.
        dtype: of the values that the weight stands for, unless the file declares it.

    Raises:
        ValueError: a scale is not a positive finite number.
    """
    physical, scheme = spec.physical_shape, spec.scheme
    fmt = get_format(scheme.weight)
    qdata, scale = read(spec.qdata).view(torch.uint8), read(spec.scale).view(torch.uint8)
    if spec.declared is not None:
        metadata, declared_shape = spec.declared
        scales = (None if name is None else read(name) for name in (spec.per_tensor_scale, spec.activation_scale))
        try:
            operand = check_operand(Operand(qdata, scale, *scales), metadata, declared_shape)
            return MXTensor(operand, metadata, declared_shape)
        except (ValueError, TypeError) as error:
            raise ValueError(f"cannot read {spec.name!r}: {error}") from error
    if spec.qdata_is_in_blocks:
        qdata = qdata.flatten(-2)
    if spec.scale_is_swizzled:
        scale = unswizzle(scale, (*physical[:-1], fmt.num_blocks(physical[-1])))
    if spec.qdata_is_unpacked:
        qdata = _pack_six_bit(qdata)
    shape = logical_shape(physical, spec.axis)
    try:
        per_tensor = _multiplier(spec, spec.per_tensor_scale, read)
        if per_tensor is not None and per_tensor.numel() > 1:  # one for each matrix of a stack
            per_tensor = per_tensor.reshape(-1, *[1] * (qdata.dim() - 1))
        tensor = MXTensor.from_qdata(qdata, scale, fmt.name, shape, dtype, spec.axis, per_tensor)
        if scheme.activation is None:
            return tensor
        static = _multiplier(spec, spec.activation_scale, read)
        return tensor.with_activation(scheme.activation, scheme.activation_scale_mode, static)
    except (ValueError, TypeError) as error:
        raise ValueError(f"cannot read {spec.name!r}: {error}") from error


def _multiplier(spec: WeightSpec, name: str | None, read: Callable[[str], Tensor]) -> Tensor | None:
    if name is None:
        return None
    value = read(name)
    return 1 / value if spec.scales_are_divisors else value.to(torch.float32, copy=True)


def unswizzle(scale: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Row-major scales from tiles of 128 rows x 4 columns, cuBLAS's layout for block scales.

    Args:
        scale: uint8; rows are padded to a multiple of 128, columns to a multiple of 4.
        shape: [..., rows, columns] without the padding.
    """
    *matrices, rows, columns = shape
    row_tiles, column_tiles = _tiles(rows, 128), _tiles(columns, 4)
    tiles = scale.reshape(-1, row_tiles, column_tiles, 32, 4, 4)
    padded = tiles.permute(0, 1, 4, 3, 2, 5).reshape(*matrices, row_tiles * 128, column_tiles * 4)
    return padded[..., :rows, :columns].contiguous()


def _pack_six_bit(codes: Tensor) -> Tensor:
    """Pack 6-bit codes [..., K], which are stored one a byte, four in three bytes."""
    if codes.shape[-1] % 4 or bool((codes > 63).any()):
        raise ValueError("codes of six bits, one a byte, are below 64 and come in fours")
    return pack_codes(codes, 6)


def _tiles(length: int, size: int) -> int:
    return -(-length // size)
