"""What a quantized tensor knows beside its bytes: frozen, hashable, and saved as versioned JSON."""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass
from typing import Any

import torch

from mxquant.formats.spec import Format, get_format, resolve_scale_mode

VERSION = 1
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
}
DTYPES = frozenset(_DTYPES.values())


def check_dtype(dtype: torch.dtype) -> torch.dtype:
    """`dtype`, if a quantized tensor can stand for one of that dtype.

    Raises:
        TypeError: it is not bf16, fp16, fp32 or fp64.
    """
    if dtype not in DTYPES:
        raise TypeError(
            f"a quantized tensor stands for bfloat16, float16, float32 or float64 values; got {dtype}. "
            "Call .dequantize() first"
        )
    return dtype


def check_rotation(rotation: object, fmt: Format, length: int | torch.SymInt | None = None) -> None:
    """Refuse a rotation that weights of a format, or such with `length` elements along the blocked axis, cannot have.

    Raises:
        ValueError: neither None nor the format's block size, or `length` is no multiple of it.
    """
    if rotation is None:
        return
    if type(rotation) is not int or rotation != fmt.block_size:
        raise ValueError(
            f"rotation={rotation!r} is unknown for {fmt.name}; use {fmt.block_size}, the size of its block, or None"
        )
    if length is not None and length % rotation:
        raise ValueError(
            f"rotation={rotation} needs a blocked axis of a multiple of {rotation} elements; this one has {length}. "
            "Leave such a weight unrotated (rotation=None)"
        )


@dataclass(frozen=True)
class Metadata:
    """Everything but the shape, which the tensor itself has (and which may be symbolic while a graph is traced)."""

    format: str
    axis: int
    """The blocked axis, negative; physically it is always last."""
    dtype: torch.dtype
    """Of the values that the tensor stands for: what `dequantize()` gives."""
    block_offset: int = 0
    """Codes that precede the first element in its block: where a slice starts off a block border."""
    activation: str | None = None
    """Format that a matmul along the blocked axis quantizes its other operand to; None: weight-only."""
    activation_scale_mode: str | None = None
    rotation: int | None = None
    """Size of the block Hadamard (`mxquant.reference.hadamard`) that the codes are rotated by along the blocked axis:
    the format's block, or None. The values that the tensor stands for are not rotated.
    """
    layout: str = "canonical"
    """Of the inner tensors in memory; what is saved is always canonical."""
    version: int = VERSION

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise ValueError(
                f"metadata version {self.version!r} is unknown, this is mxquant's version {VERSION}; update mxquant"
            )
        check_rotation(self.rotation, get_format(self.format))
        if self.rotation is not None and self.block_offset:
            raise ValueError(
                f"a rotated tensor is cut at multiples of {self.rotation}, its rotation, not {self.block_offset} "
                "elements inside a block; call .dequantize() first for other cuts"
            )
        check_dtype(self.dtype)
        if self.activation is not None:
            resolve_scale_mode(get_format(self.activation, activation=True), self.activation_scale_mode)

    def to_json(self, shape: tuple[int, ...] | None = None) -> str:
        """JSON of the fields, and of the logical shape where given."""
        fields = dataclasses.asdict(self) | {"dtype": str(self.dtype).removeprefix("torch.")}
        return json.dumps(fields if shape is None else fields | {"shape": list(shape)}, sort_keys=True)


@functools.lru_cache(maxsize=4096)
def metadata_from_json(text: str) -> tuple[Metadata, tuple[int, ...] | None]:
    """The inverse of `Metadata.to_json`: the metadata and the shape, if it was written.

    Raises:
        ValueError: not JSON of the known fields, or an unknown version.
    """
    return metadata_from_fields(json.loads(text))


def metadata_from_fields(fields: Any) -> tuple[Metadata, tuple[int, ...] | None]:
    """The metadata and shape in a JSON object that `Metadata.to_json` wrote.

    Raises:
        ValueError: a field is missing, unknown or of the wrong kind, or the version is unknown.
    """
    known = {field.name for field in dataclasses.fields(Metadata)}
    if not isinstance(fields, dict):
        raise ValueError(f"metadata of a quantized tensor is a JSON object; got {fields!r}")
    if fields.get("version") != VERSION:
        raise ValueError(
            f"metadata version {fields.get('version')!r} is unknown, this is mxquant's version {VERSION}; update "
            "mxquant"
        )
    fields = dict(fields)
    shape = fields.pop("shape", None)
    if unknown := fields.keys() - known:
        raise ValueError(
            f"metadata has unknown fields {sorted(unknown)}; known: {sorted(known)}. A newer mxquant wrote it: update"
        )
    if missing := {"format", "axis", "dtype"} - fields.keys():
        raise ValueError(f"metadata lacks {sorted(missing)}: {fields!r}")
    if fields["dtype"] not in _DTYPES:
        raise ValueError(f"metadata dtype {fields['dtype']!r} is unknown; use one of {', '.join(_DTYPES)}")
    if (
        not all(isinstance(fields.get(name, 0), int) for name in ("axis", "block_offset"))
        or fields.get("block_offset", 0) < 0
    ):
        raise ValueError(f"metadata axis and block_offset are integers, block_offset not negative: {fields!r}")
    if shape is not None and not (isinstance(shape, list) and all(isinstance(n, int) and n >= 0 for n in shape)):
        raise ValueError(f"metadata shape is a list of sizes; got {shape!r}")
    metadata = Metadata(**fields | {"dtype": _DTYPES[fields["dtype"]]})
    return metadata, None if shape is None else tuple(shape)


def precision(metadata: Metadata) -> str:
    """ "W4A4", "W4A16": bits of a weight's and of an activation's element, 16 for an activation that is not
    quantized.
    """
    weight = get_format(metadata.format).element.bits
    activation = 16 if metadata.activation is None else get_format(metadata.activation, activation=True).element.bits
    return f"W{weight}A{activation}"
