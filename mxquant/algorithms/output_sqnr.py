"""SQNR of each quantized layer's outputs, against the original layer on the same inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mxquant.algorithms.blockwise import Batch, calibration_mode, model_stage
from mxquant.tensor import MXTensor
from mxquant.tensor.sqnr import decibels


def output_sqnr_db(model: nn.Module, original: nn.Module, batches: Sequence[Batch]) -> dict[str, float]:
    """20 log10(|y| / |y - y_q|) over all batches, for each module with quantized weights of its own, by name.

    The original model runs, and each quantized module gets the inputs of its original: errors of earlier layers do not
    count. A module that does not run, or whose output is not a tensor, has no entry.

    Args:
        original: the model before quantization, with the same module names, on the device of `model`.

    Raises:
        ValueError: `original` lacks a module.
    """
    quantized = {
        name: module
        for name, module in model.named_modules()
        if any(isinstance(parameter, MXTensor) for parameter in module._parameters.values())
    }
    others = dict(original.named_modules())
    if missing := quantized.keys() - others.keys():
        raise ValueError(f"original has no module {min(missing)!r}; pass the same model, unquantized")
    powers = {name: [0.0, 0.0] for name in quantized}

    def compare(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                difference = output - quantized[name](*args, **kwargs)
                for index, values in enumerate((output, difference)):
                    powers[name][index] += torch.linalg.vector_norm(values, dtype=torch.float64).item() ** 2

        return hook

    handles = [others[name].register_forward_hook(compare(name), with_kwargs=True) for name in quantized]
    try:
        with calibration_mode(model), calibration_mode(original):
            model_stage(original, batches).run(lambda: None)
    finally:
        for handle in handles:
            handle.remove()
    return {name: decibels(signal, noise) for name, (signal, noise) in powers.items() if signal}
