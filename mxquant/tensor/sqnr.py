"""Signal to quantization noise ratio."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mxquant.tensor.mxtensor import MXTensor

_CHUNK_ELEMENTS = 1 << 20


def sqnr_db(reference: Tensor, quantized: Tensor) -> float:
    """20 log10(|reference| / |reference - quantized|) of two tensors of one shape; either may be an MXTensor.

    Rows are compared in chunks, on the device of `quantized`, so that no tensor is dequantized whole.

    Returns:
        decibels; inf if all values are equal, -inf if they are not and `reference` is zero.
    """
    if reference.dim() == 0:
        reference, quantized = reference.reshape(1), quantized.reshape(1)
    if reference.dim() == 2 and any(isinstance(x, MXTensor) and x.axis == -2 for x in (reference, quantized)):
        reference, quantized = reference.t(), quantized.t()  # cut between blocks, not inside
    rows = max(1, _CHUNK_ELEMENTS // max(1, math.prod(reference.shape[1:])))
    signal = noise = 0.0
    for start in range(0, reference.shape[0], rows):
        q = _values(quantized[start : start + rows])
        x = _values(reference[start : start + rows]).to(q.device)
        signal += torch.linalg.vector_norm(x).item() ** 2
        noise += torch.linalg.vector_norm(x - q).item() ** 2
    return decibels(signal, noise)


def decibels(signal: float, noise: float) -> float:
    """The ratio of two powers; inf if there is no noise, -inf if there is no signal."""
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


def _values(chunk: Tensor) -> Tensor:
    values = chunk.dequantize(torch.float32) if isinstance(chunk, MXTensor) else chunk
    return values.double()
