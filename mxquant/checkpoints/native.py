"""mxquant's own files, as `flatten_state_dict` makes them: `<name>.qdata`, `<name>.scale`, ..., JSON in the header."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from mxquant.backends.base import CANONICAL
from mxquant.checkpoints.files import CONFIG, Checkpoint, Documents
from mxquant.checkpoints.producer import Producer, Reading
from mxquant.checkpoints.weight_spec import WeightSpec
from mxquant.tensor import MXTensor
from mxquant.tensor.metadata import VERSION, metadata_from_fields
from mxquant.tensor.state import METADATA_KEY, SAVED_PARTS, parse_metadata


def described_in(headers: Iterable[Mapping[str, str]]) -> tuple[dict[str, Any], dict[str, str]]:
    """The metadata of quantized weights and the tied names in the headers of all shards.

    Raises:
        ValueError: no header has any, one is damaged, or two disagree.
    """
    described: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    native = [header for header in headers if METADATA_KEY in header]
    for header in native or [{}]:
        tensors, names = parse_metadata(header)
        for found, new in ((described, tensors), (aliases, names)):
            for name, value in new.items():
                if found.setdefault(name, value) != value:
                    raise ValueError(f"two shards describe {name!r} differently; save the checkpoint anew")
    return described, aliases


class Native(Producer):
    name = "mxquant"
    suffixes = (".qdata",)
    stores_aliases = True
    stores_dtype = True
    weight_names = "parameter"

    def recognizes(self, checkpoint: Checkpoint) -> bool:
        method = checkpoint.quantization_config.get("quant_method")
        return method == self.name or (method is None and any(METADATA_KEY in header for header in checkpoint.headers))

    def read(self, checkpoint: Checkpoint) -> Reading:
        described, aliases = described_in(checkpoint.headers)
        return Reading([_weight_spec(name, fields, checkpoint) for name, fields in described.items()], aliases=aliases)

    def encode(self, name: str, weight: MXTensor, stored_scales: Mapping[str, Tensor]) -> dict[str, Tensor]:
        canonical = weight.canonical()
        parts = ((part, getattr(canonical, part)) for part in SAVED_PARTS)
        return {f"{name}.{part}": inner for part, inner in parts if inner is not None}

    def config(self, weights: Mapping[str, MXTensor], ordinary: Iterable[str]) -> Documents:
        return {CONFIG: {"quant_method": self.name, "version": 1}}

    def header(self, weights: Mapping[str, MXTensor], aliases: Mapping[str, str]) -> dict[str, str]:
        if not weights and not aliases:
            return {}
        canonical = {name: weight.canonical() for name, weight in weights.items()}
        described = {name: json.loads(c.metadata.to_json(tuple(c.shape))) for name, c in canonical.items()}
        content = {"version": VERSION, "tensors": described, "aliases": dict(aliases)}
        return {METADATA_KEY: json.dumps(content, sort_keys=True)}


def _weight_spec(name: str, fields: Any, checkpoint: Checkpoint) -> WeightSpec:
    metadata, shape = metadata_from_fields(fields)
    if shape is None or metadata.layout != CANONICAL:
        raise ValueError(f"the metadata of {name!r} lacks its shape, or its layout is not saved so: {fields!r}")
    per_tensor_scale, activation_scale = (
        part if part in checkpoint.tensors else None for part in (f"{name}.{part}" for part in SAVED_PARTS[2:])
    )
    return WeightSpec(
        name=name,
        scheme=dataclasses.replace(metadata.scheme, static_activation_scale=activation_scale is not None),
        axis=metadata.axis,
        declared=(metadata, shape),
        qdata=f"{name}.qdata",
        scale=f"{name}.scale",
        per_tensor_scale=per_tensor_scale,
        activation_scale=activation_scale,
    )
