"""mxquant's own files, as `flatten_state_dict` has them: `<name>.qdata`, `<name>.scale`, ... and JSON in the header."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from mxquant.backends.base import CANONICAL
from mxquant.checkpoints.files import Checkpoint
from mxquant.checkpoints.producer import Reading
from mxquant.checkpoints.weight_spec import WeightSpec
from mxquant.tensor import MXTensor
from mxquant.tensor.metadata import metadata_from_fields
from mxquant.tensor.state import METADATA_KEY, SAVED_PARTS, parse_metadata


def described_in(headers: Iterable[Mapping[str, str]]) -> tuple[dict[str, Any], dict[str, str]]:
    """The quantized weights and the tied names that the headers of all shards describe.

    Raises:
        ValueError: no header does, one is damaged, or two disagree.
    """
    described: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    own = [header for header in headers if METADATA_KEY in header]
    for header in own or [{}]:
        tensors, names = parse_metadata(header)
        for found, new in ((described, tensors), (aliases, names)):
            for name, value in new.items():
                if found.setdefault(name, value) != value:
                    raise ValueError(f"two shards describe {name!r} differently; save the checkpoint anew")
    return described, aliases


class Native:
    name = "mxquant"
    by_modules = False

    def recognizes(self, checkpoint: Checkpoint) -> bool:
        method = checkpoint.quantization_config.get("quant_method")
        return method == self.name or (method is None and any(METADATA_KEY in header for header in checkpoint.headers))

    def read(self, checkpoint: Checkpoint) -> Reading:
        described, aliases = described_in(checkpoint.headers)
        stored = []
        for name, fields in described.items():
            metadata, shape = metadata_from_fields(fields)
            if shape is None or metadata.layout != CANONICAL:
                raise ValueError(f"the metadata of {name!r} lacks its shape, or its layout is not saved so: {fields!r}")
            optional = {
                part: f"{name}.{part}" if f"{name}.{part}" in checkpoint.tensors else None for part in SAVED_PARTS[2:]
            }
            stored.append(
                WeightSpec(
                    name=name,
                    format=metadata.scheme.weight,
                    axis=metadata.axis,
                    activation=metadata.scheme.activation,
                    activation_scale_mode=metadata.scheme.activation_scale_mode,
                    declared=(metadata, shape),
                    qdata=f"{name}.qdata",
                    scale=f"{name}.scale",
                    per_tensor_scale=optional["per_tensor_scale"],
                    activation_scale=optional["activation_scale"],
                )
            )
        return Reading(stored, aliases=aliases)

    def activation_scale_mode(self, activation: str) -> str | None:
        return None

    def encode(self, name: str, weight: MXTensor, known: Mapping[str, Tensor]) -> dict[str, Tensor]:
        canonical = weight.canonical()
        parts = ((part, getattr(canonical, part)) for part in SAVED_PARTS)
        return {f"{name}.{part}": inner for part, inner in parts if inner is not None}

    def config(self, weights: Mapping[str, MXTensor], ordinary: Iterable[str]) -> dict[str, dict[str, Any]]:
        return {"config.json": {"quant_method": self.name, "version": 1}}
