"""How far each quantized layer's outputs are from the original's, on the same inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mxquant.algorithms.stages import Batch, calibrating, model_stage
from mxquant.tensor import MXTensor


def output_sqnr_db(model: nn.Module, original: nn.Module, batches: Sequence[Batch]) -> dict[str, float]:
    """For each module with quantized weights of its own, 20 log10(|y| / |y - y_q|) over all batches, by its name.

    The original model runs; each quantized module is given the inputs that its original has there, so that what
    earlier layers do to them does not count. A module that does not run, or whose output is no tensor, is left out.

    Args:
        original: the model before quantization, of the same module names, where `model` is.
        batches: each what the model is called with.

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
        with calibrating(model), calibrating(original):
            model_stage(original, batches).run(lambda: None)
    finally:
        for handle in handles:
            handle.remove()
    return {
        name: 10 * math.log10(signal / noise) if noise else math.inf
        for name, (signal, noise) in powers.items()
        if signal
    }
