"""The producers, in the order in which they are asked whether a checkpoint is theirs."""

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


def producer_of(checkpoint: Checkpoint) -> Producer | None:
    """The producer that the files name; None for a checkpoint that is not quantized.

    Raises:
        NotImplementedError: they name one that is not known.
    """
    for producer in PRODUCERS.values():
        if producer.recognizes(checkpoint):
            return producer
    method = checkpoint.quantization_config.get("quant_method")
    if checkpoint.quantization_config or checkpoint.hf_quant_config:
        raise NotImplementedError(
            f"{checkpoint.path} is quantized by quant_method {method!r}; read are {', '.join(PRODUCERS)}"
        )
    return None


def get_producer(name: str) -> Producer:
    """The producer called `name`.

    Raises:
        ValueError: there is none.
    """
    if name not in PRODUCERS:
        raise ValueError(f"producer {name!r} is unknown; use one of {', '.join(PRODUCERS)}")
    return PRODUCERS[name]
