"""`Provenance`: what tensors do not tell of the checkpoint they came from, so that saving them gives the same bytes.

An MXTensor holds fp32 multipliers. A file may hold divisors, bf16 scales, scales of a KV cache, or a config with
versions and observers. These are remembered, and written again for weights that have not changed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mxquant.checkpoints.files import CONFIG, Documents, Reader
from mxquant.checkpoints.load import Content
from mxquant.scheme import Scheme

PROVENANCE = "_mxquant_provenance"
"""The attribute of a model that holds its `Provenance`."""


@dataclass(frozen=True)
class Provenance:
    """The checkpoint that tensors were loaded from."""

    producer: str
    documents: Documents
    """Its quantization config and sidecars, as `Producer.config` returns them."""
    schemes: dict[str, Scheme]
    """Of each quantized weight, by its name in the files."""
    scales: dict[str, Tensor]
    """Per-tensor and activation scales that are not fp32 multipliers, by their names in the files."""
    ignored: dict[str, Tensor]
    """Scales of a KV cache."""
    dtypes: dict[str, torch.dtype]
    """Of the unquantized tensors."""

    @classmethod
    def of(cls, content: Content) -> Provenance:
        """The provenance of the tensors of a quantized checkpoint."""
        checkpoint, reader = content.checkpoint, Reader(content.checkpoint)
        assert content.producer is not None
        config = checkpoint.quantization_config
        return cls(
            producer=content.producer.name,
            documents=({CONFIG: config} if config else {}) | checkpoint.sidecars,
            schemes={name: spec.scheme for name, spec in content.quantized.items()},
            scales={
                name: reader.read(name).clone()
                for spec in content.quantized.values()
                for name in spec.tensor_names[2:]
                if spec.scales_are_divisors or checkpoint.tensors[name].dtype != "F32"
            },
            ignored={name: reader.read(name).clone() for name in content.ignored},
            dtypes={name: content.read(name, reader).dtype for name in content.ordinary},
        )
