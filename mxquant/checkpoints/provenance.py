"""What a model remembers of the checkpoint that it came from, so that saving it gives the same bytes.

An MXTensor holds multipliers in fp32. A producer that stores divisors, or bf16, or a scale for the KV cache, or a
config with its own version and observers, wrote what cannot be told from the tensors; it is kept here, and used again
for a weight that is still as it was.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mxquant.checkpoints.files import Reader
from mxquant.checkpoints.load import Content

PROVENANCE = "_mxquant_provenance"
"""The attribute of a model that has its `Provenance`."""


@dataclass(frozen=True)
class Provenance:
    """Where a model's tensors came from."""

    producer: str
    quantization_config: dict[str, Any]
    hf_quant_config: dict[str, Any] | None
    schemes: dict[str, tuple[Any, ...]]
    """Format and rule for activations of each quantized weight, by its name in the files."""
    scales: dict[str, Tensor] = field(default_factory=dict)
    """Scales of whole tensors that are no fp32 multipliers in the files, by their names there."""
    ignored: dict[str, Tensor] = field(default_factory=dict)
    """Tensors that are no part of the model."""
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    """Of the tensors that are not quantized."""

    @classmethod
    def of(cls, content: Content) -> Provenance:
        checkpoint, reader = content.checkpoint, Reader(content.checkpoint)
        assert content.producer is not None
        scales = {
            part: reader.read(part).clone()
            for stored in content.quantized.values()
            for part in stored.parts[2:]
            if stored.divisor or checkpoint.tensors[part].dtype != "F32"
        }
        return cls(
            content.producer.name,
            checkpoint.quantization_config,
            checkpoint.hf_quant_config,
            {
                name: (s.format, s.activation, s.activation_scale_mode, s.activation_scale is not None)
                for name, s in content.quantized.items()
            },
            scales,
            {name: reader.read(name).clone() for name in content.ignored},
            {name: content.read(name, reader).dtype for name in content.ordinary},
        )
