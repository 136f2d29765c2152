"""Metadata of a quantized tensor: frozen, hashable, and saved as versioned JSON."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mxquant.backends.base import CANONICAL
from mxquant.scheme import HasScheme, Scheme

VERSION = 1
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
}
DTYPES = frozenset(_DTYPES.values())
_SCHEME_FIELDS = ("activation", "activation_scale_mode", "rotation")
_FIELDS = frozenset((*_SCHEME_FIELDS, "version", "format", "axis", "dtype", "block_offset", "layout"))


def check_dtype(dtype: torch.dtype) -> torch.dtype:
    """`dtype`, if the values of a quantized tensor can have it (bf16, fp16, fp32 or fp64); else a TypeError."""
    if dtype not in DTYPES:
        raise TypeError(
            f"a quantized tensor stands for bfloat16, float16, float32 or float64 values; got {dtype}. "
            "Call .dequantize() first"
        )
    return dtype


def check_version(version: object) -> None:
    """Refuse metadata of another version than this one's, with a ValueError."""
    if version != VERSION:
        raise ValueError(
            f"metadata version {version!r} is unknown, this is mxquant's version {VERSION}; update mxquant"
        )


def physical_shape(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    """A logical shape with the blocked axis moved to the end, as the inner tensors have it."""
    physical = list(shape)
    physical.append(physical.pop(axis))
    return tuple(physical)


def logical_shape(physical: Sequence[int], axis: int) -> tuple[int, ...]:
    """The inverse of `physical_shape`, for a negative `axis`."""
    shape = list(physical)
    shape.insert(len(shape) + axis, shape.pop())
    return tuple(shape)


@dataclass(frozen=True)
class Metadata(HasScheme):
    """All that describes a quantized tensor but its shape, which may be symbolic while a graph is traced."""

    scheme: Scheme
    """Its `scale_mode` is None: the scales exist already."""
    axis: int
    """The blocked axis, negative. Physically it is always last."""
    dtype: torch.dtype
    """Of the decoded values."""
    block_offset: int = 0
    """Codes before the first element in its block, where a slice starts inside a block."""
    layout: str = CANONICAL
    """Of the inner tensors in memory. Files always have the canonical one."""
    version: int = VERSION

    def __post_init__(self) -> None:
        check_version(self.version)
        if self.scheme.rotation is not None and self.block_offset:
            raise ValueError(
                f"a rotated tensor is cut at multiples of {self.scheme.rotation}, its rotation, not "
                f"{self.block_offset} elements inside a block; call .dequantize() first for other cuts"
            )
        check_dtype(self.dtype)
        if self.scheme.scale_mode is not None:
            object.__setattr__(self, "scheme", dataclasses.replace(self.scheme, scale_mode=None))

    @property
    def format(self) -> str:
        return self.scheme.weight

    def with_scheme(self, **changes: Any) -> Metadata:
        """A copy with `changes` to fields of the scheme."""
        return dataclasses.replace(self, scheme=dataclasses.replace(self.scheme, **changes))

    def to_json(self, shape: tuple[int, ...] | None = None) -> str:
        """The fields, and the logical shape if given, as JSON."""
        scheme = self.scheme
        fields: dict[str, Any] = {
            "version": self.version,
            "format": scheme.weight,
            "activation": scheme.activation,
            "activation_scale_mode": scheme.activation_scale_mode,
            "rotation": scheme.rotation,
            "axis": self.axis,
            "dtype": str(self.dtype).removeprefix("torch."),
            "block_offset": self.block_offset,
            "layout": self.layout,
        }
        return json.dumps(fields if shape is None else fields | {"shape": list(shape)}, sort_keys=True)


@functools.lru_cache(maxsize=4096)
def metadata_from_json(text: str) -> tuple[Metadata, tuple[int, ...] | None]:
    """The inverse of `Metadata.to_json`. Raises what `metadata_from_fields` does, and ValueError if not JSON."""
    return metadata_from_fields(json.loads(text))


def metadata_from_fields(fields: Any) -> tuple[Metadata, tuple[int, ...] | None]:
    """The metadata, and the shape or None, from the object that `Metadata.to_json` describes.

    Raises:
        ValueError: a field is missing, unknown or of the wrong kind, or the version is unknown.
    """
    if not isinstance(fields, dict):
        raise ValueError(f"metadata of a quantized tensor is a JSON object; got {fields!r}")
    check_version(fields.get("version"))
    fields = dict(fields)
    shape = fields.pop("shape", None)
    if unknown := fields.keys() - _FIELDS:
        raise ValueError(
            f"metadata has unknown fields {sorted(unknown)}; known: {sorted(_FIELDS)}. A newer mxquant wrote it: update"
        )
    if missing := {"format", "axis", "dtype"} - fields.keys():
        raise ValueError(f"metadata lacks {sorted(missing)}: {fields!r}")
    if not isinstance(fields["dtype"], str) or fields["dtype"] not in _DTYPES:
        raise ValueError(f"metadata dtype {fields['dtype']!r} is unknown; use one of {', '.join(_DTYPES)}")
    if (
        not all(isinstance(fields.get(name, 0), int) for name in ("axis", "block_offset"))
        or fields.get("block_offset", 0) < 0
    ):
        raise ValueError(f"metadata axis and block_offset are integers, block_offset not negative: {fields!r}")
    if shape is not None and not (isinstance(shape, list) and all(isinstance(n, int) and n >= 0 for n in shape)):
        raise ValueError(f"metadata shape is a list of sizes; got {shape!r}")
    if shape is not None and not -len(shape) <= fields["axis"] < 0:
        raise ValueError(f"metadata axis {fields['axis']} is out of range for shape {shape}; it is negative")
    try:
        scheme = Scheme(fields.pop("format"), **{name: fields.pop(name) for name in _SCHEME_FIELDS if name in fields})
    except TypeError as error:
        raise ValueError(f"metadata of a quantized tensor is damaged: {error}") from error
    metadata = Metadata(scheme, **fields | {"dtype": _DTYPES[fields["dtype"]]})
    return metadata, None if shape is None else tuple(shape)
