"""The one list of producers, in the order in which they are asked whether a checkpoint is theirs."""

from __future__ import annotations

from mxquant.checkpoints.compressed_tensors import CompressedTensors
from mxquant.checkpoints.files import Checkpoint
from mxquant.checkpoints.gpt_oss import GptOss
from mxquant.checkpoints.modelopt import ModelOpt
from mxquant.checkpoints.native import Native
from mxquant.checkpoints.producer import Producer
from mxquant.checkpoints.quark import Quark
from mxquant.checkpoints.torchao import TorchAO

PRODUCERS: dict[str, Producer] = {
    producer.name: producer for producer in (Native(), CompressedTensors(), Quark(), ModelOpt(), GptOss(), TorchAO())
}


def sidecar_files() -> tuple[str, ...]:
    """The JSON files beside config.json that belong to a checkpoint's weights."""
    return tuple(file for producer in PRODUCERS.values() for file in producer.sidecars)


def weight_suffixes() -> tuple[str, ...]:
    """The name endings of tensors that make up a quantized weight."""
    return tuple({suffix for producer in PRODUCERS.values() for suffix in producer.suffixes})


def recognize(checkpoint: Checkpoint) -> Producer | None:
    """The producer that wrote a checkpoint; None if it is not quantized, NotImplementedError if it is by others."""
    for producer in PRODUCERS.values():
        if producer.recognizes(checkpoint):
            return producer
    if checkpoint.quantization_config or checkpoint.sidecars:
        method = checkpoint.quantization_config.get("quant_method")
        raise NotImplementedError(
            f"{checkpoint.path} is quantized by quant_method {method!r}; read are {', '.join(PRODUCERS)}"
        )
    return None


def get_producer(name: str) -> Producer:
    """The producer called `name`; ValueError if there is none."""
    if name not in PRODUCERS:
        raise ValueError(f"producer {name!r} is unknown; use one of {', '.join(PRODUCERS)}")
    return PRODUCERS[name]


def writable_producers() -> list[str]:
    """The names of the producers whose files mxquant writes."""
    return [name for name, producer in PRODUCERS.items() if producer.can_write]


def get_writer(name: str) -> Producer:
    """As `get_producer`; NotImplementedError if the producer's files are only read."""
    producer = get_producer(name)
    if not producer.can_write:
        raise NotImplementedError(
            f"{name} checkpoints are read, not written; save as one of {', '.join(writable_producers())}"
        )
    return producer
