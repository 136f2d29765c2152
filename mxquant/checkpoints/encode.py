"""From tensors to what a producer's files hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mxquant.checkpoints.files import Documents
from mxquant.checkpoints.producer import Producer, module_of
from mxquant.checkpoints.provenance import Provenance
from mxquant.tensor import MXTensor


@dataclass(frozen=True)
class Encoded:
    """All that is written for a state dict."""

    producer: Producer
    weights: dict[str, MXTensor]
    tensors: dict[str, dict[str, Tensor]]
    """For each tensor of the state dict, the file's tensors: views of its own where possible."""
    documents: Documents
    """As `Producer.config`."""


def encode_state(
    state: Mapping[str, Tensor], producer: Producer, provenance: Provenance | None, tied: Mapping[str, str]
) -> Encoded:
    """Encode a state dict, whose names are those of the files, for `producer`.

    Args:
        provenance: the checkpoint that the tensors came from. If it is the same producer's, what the tensors do not
            tell is taken from it wherever a weight has not changed.
        tied: names that are not in `state`, each with the name there that it is tied to.

    Raises:
        NotImplementedError: the files cannot hold a weight; the message says what would be lost.
        ValueError: nothing is quantized.
    """
    weights = {name: tensor for name, tensor in state.items() if isinstance(tensor, MXTensor)}
    if not weights:
        raise ValueError(
            f"none of the tensors is quantized, so there is nothing to write as {producer.name!r}; quantize first, or "
            "save an unquantized model with its own save_pretrained"
        )
    known = provenance if provenance is not None and provenance.producer == producer.name else None
    scales = {} if known is None else known.scales
    tensors: dict[str, dict[str, Tensor]] = {}
    for name, tensor in state.items():
        if isinstance(tensor, MXTensor):
            tensors[name] = producer.encode(name, tensor, scales)
        else:
            tensors[name] = {name: tensor if known is None else _in_stored_dtype(tensor, known.dtypes.get(name))}
    documents = producer.config(weights, _ordinary_matrices(state, tied))
    if known is not None:
        tensors |= {name: {name: tensor} for name, tensor in known.ignored.items() if name not in state}
        if known.schemes == {name: weight.metadata.scheme for name, weight in weights.items()}:
            documents = known.documents or documents
    return Encoded(producer, weights, tensors, documents)


def _ordinary_matrices(state: Mapping[str, Tensor], tied: Mapping[str, str]) -> list[str]:
    """The modules whose weights are unquantized matrices, tied ones included."""
    values = {**state, **{name: state[first] for name, first in tied.items()}}
    return [
        module_of(name)
        for name, tensor in values.items()
        if not isinstance(tensor, MXTensor) and name.endswith(".weight") and tensor.dim() == 2
    ]


def _in_stored_dtype(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The tensor in the dtype that the file had, if a model widened it and no value changes."""
    if dtype is None or tensor.dtype == dtype or not tensor.is_floating_point():
        return tensor
    narrow = tensor.to(dtype)
    return narrow if bool((narrow.to(tensor.dtype) == tensor).all()) else tensor
