"""From the plain tensors of an MXTensor to the values that they stand for.

While a graph is traced, this is an opaque operator, for the reason that `construct` gives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mxquant.backends.base import CANONICAL, Operand
from mxquant.backends.registry import backend_of_layout
from mxquant.formats.block import dequantize_blocks
from mxquant.formats.spec import get_format
from mxquant.ops import hadamard, is_traced
from mxquant.tensor.metadata import Metadata, check_dtype, physical_shape


def canonical_form(operand: Operand, metadata: Metadata, shape: Sequence[int]) -> tuple[Operand, Metadata]:
    """Operand and metadata in the canonical layout: as they are, or unpacked from a backend's layout."""
    if metadata.layout == CANONICAL:
        return operand, metadata
    layout = backend_of_layout(metadata.layout).layout
    assert layout is not None
    physical = physical_shape(shape, metadata.axis)
    qdata, scale = layout.unpack(operand.qdata, operand.scale, get_format(metadata.scheme.weight), physical)
    return operand._replace(qdata=qdata, scale=scale), dataclasses.replace(metadata, layout=CANONICAL)


def dequantize(operand: Operand, metadata: Metadata, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The values, as `MXTensor.dequantize` returns them: of the logical `shape`."""
    operand, metadata = canonical_form(operand, metadata, shape)
    scheme = metadata.scheme
    run = torch.ops.mxquant.dequantize if is_traced(operand.qdata) else _dequantize
    physical: Tensor = run(
        operand.qdata,
        operand.scale,
        operand.per_tensor_scale,
        scheme.weight,
        shape[metadata.axis],
        metadata.block_offset,
        check_dtype(dtype) if scheme.rotation is None else torch.promote_types(check_dtype(dtype), torch.float32),
    )
    if scheme.rotation is not None:
        physical = hadamard(physical, scheme.rotation, dtype)
    return physical.movedim(-1, metadata.axis).contiguous()


def _dequantize(
    qdata: Tensor,
    scale: Tensor,
    per_tensor_scale: Tensor | None,
    format: str,
    length: int,
    block_offset: int,
    dtype: torch.dtype,
) -> Tensor:
    return dequantize_blocks(
        qdata,
        scale,
        get_format(format),
        length,
        block_offset=block_offset,
        per_tensor_scale=per_tensor_scale,
        dtype=dtype,
    ).contiguous()


@torch.library.custom_op("mxquant::dequantize", _dequantize, mutates_args=()).register_fake
def _(qdata: Tensor, scale: Any, per_tensor_scale: Any, format: str, length: int, *rest: Any) -> Tensor:
    return qdata.new_empty(*qdata.shape[:-1], length, dtype=rest[-1])
