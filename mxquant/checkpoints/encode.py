"""From tensors to the files of a producer: what each weight becomes, and what is used again of where it came from."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor

from mxquant.checkpoints.producer import Producer, module_of
from mxquant.checkpoints.provenance import Provenance
from mxquant.tensor import MXTensor

_logger = logging.getLogger("mxquant")
_NONE: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Encoded:
    """Everything that is written."""

    tensors: dict[str, dict[str, Tensor]]
    """By the weight's name, the tensors of the files: views of the weight's own wherever they can be."""
    documents: dict[str, dict[str, Any]]
    """`Producer.config`."""


def encode(
    state: Mapping[str, Tensor], producer: Producer, origin: Provenance | None, tied: Mapping[str, str] = _NONE
) -> Encoded:
    """What `producer`'s files hold for the tensors of `state`, whose names are those of the files.

    Args:
        origin: where the tensors came from; what cannot be told from them is taken from there if it is of the same
            producer and a weight is as it was.
        tied: names that are not in `state`, each with the one there that it stands for.

    Raises:
        NotImplementedError: the files cannot hold a weight; the message says what would be lost.
        ValueError: nothing is quantized.
    """
    weights = {name: tensor for name, tensor in state.items() if isinstance(tensor, MXTensor)}
    if not weights:
        raise ValueError(
            f"nothing in the model is quantized, so there is nothing to write as {producer.name!r}; quantize_ it "
            "first, or save it with its own save_pretrained"
        )
    known = origin if origin is not None and origin.producer == producer.name else None
    scales = {} if known is None else known.scales
    tensors: dict[str, dict[str, Tensor]] = {}
    for name, tensor in state.items():
        if isinstance(tensor, MXTensor):
            tensors[name] = producer.encode(name, tensor, scales)
        else:
            tensors[name] = {name: tensor if known is None else _as_it_was(tensor, known.dtypes.get(name))}
    values = {**state, **{name: state[first] for name, first in tied.items()}}
    ordinary = [
        module_of(name)
        for name, tensor in values.items()
        if not isinstance(tensor, MXTensor) and name.endswith(".weight") and tensor.dim() == 2
    ]
    documents = producer.config(weights, ordinary)
    if known is not None:
        tensors |= {name: {name: tensor} for name, tensor in known.ignored.items()}
        if known.schemes == {name: scheme_of(weight) for name, weight in weights.items()}:
            documents = _documents_as_they_were(known, documents)
    return Encoded(tensors, documents)


def scheme_of(weight: MXTensor) -> tuple[Any, ...]:
    """What an `Provenance` remembers of a weight."""
    scheme = weight.metadata.scheme
    return scheme.weight, scheme.activation, scheme.activation_scale_mode, scheme.static_activation_scale


def _documents_as_they_were(origin: Provenance, documents: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    kept = {"config.json": origin.quantization_config} if origin.quantization_config else {}
    if origin.hf_quant_config is not None:
        kept["hf_quant_config.json"] = origin.hf_quant_config
    return kept or documents


def _as_it_was(tensor: Tensor, dtype: Any) -> Tensor:
    """In the dtype that the file had, where a model keeps a wider one and no value is lost."""
    if dtype is None or tensor.dtype == dtype or not tensor.is_floating_point():
        return tensor
    narrow = tensor.to(dtype)
    same = bool((narrow.to(tensor.dtype) == tensor).all())
    return narrow if same else tensor
