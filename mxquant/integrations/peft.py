"""peft on quantized weights: what an adapter needs of them, what is refused when it is attached, and merging.

Importing this module imports no peft. A hook of torch's sees when peft wraps a layer with a quantized weight.

Adapters beside the base layer (LoRA, VeRA, OFT, prompts, ...) only multiply with it and need nothing. DoRA reads the
base weight's values: peft's function for that learns to dequantize. Adapters that change the base weight, or train it,
cannot do so with packed codes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from mxquant.modules.quantize_target import parameter_like
from mxquant.tensor import MXTensor, as_weight, quantize

_FOR_EXPERTS = (
    "peft adds the update of target_parameters to the weight in every forward, which packed codes cannot hold; call "
    "mxquant.dequantize_(module) on the module that holds it first, or name linear layers alone in target_modules "
    "('all-linear' means the experts of some families too)"
)
_FOR_COPIES = (
    "modules_to_save trains a copy of the module, and quantized weights do not train; call mxquant.dequantize_(module) "
    "on that module first (its copy then trains and is saved in its own dtype), or adapt it by target_modules"
)


def _on_registration(owner: nn.Module, name: str, module: Any) -> None:
    """Called by torch for every module that becomes part of another."""
    if not type(owner).__module__.startswith("peft.") or name not in ("base_layer", "original_module"):
        return
    _teach_peft()
    parameter_name = vars(owner).get("parameter_name")
    if parameter_name is not None:
        while "base_layer" in module._modules:
            module = module._modules["base_layer"]
        _refuse_quantized({parameter_name: module._parameters.get(parameter_name)}, module, _FOR_EXPERTS)
    elif type(owner).__name__ == "ModulesToSaveWrapper":
        _refuse_quantized(dict(module.named_parameters()), module, _FOR_COPIES)


def _refuse_quantized(parameters: dict[str, Any], module: nn.Module, why: str) -> None:
    for name, parameter in parameters.items():
        if isinstance(parameter, MXTensor):
            raise NotImplementedError(f"{name} of {type(module).__name__} is quantized ({parameter!r}): {why}")


register_module_module_registration_hook(_on_registration)


def _teach_peft() -> None:
    """Let peft's `dequantize_module_weight`, by which DoRA reads a base weight, dequantize an MXTensor."""
    integrations = sys.modules.get("peft.utils.integrations")
    original = getattr(integrations, "dequantize_module_weight", None)
    if original is None or hasattr(original, "_mxquant"):
        return

    def dequantize_module_weight(module: nn.Module) -> Any:
        weight = module._parameters.get("weight")
        return nn.Parameter(weight.dequantize(), False) if isinstance(weight, MXTensor) else original(module)

    dequantize_module_weight._mxquant = True  # type: ignore[attr-defined]
    for name, module in list(sys.modules.items()):
        if name.startswith("peft.") and vars(module).get("dequantize_module_weight") is original:
            module.dequantize_module_weight = dequantize_module_weight  # type: ignore[attr-defined]


def merge_adapter(model: nn.Module, scale_mode: str | None = None) -> dict[str, float]:
    """Merge the active adapters of a peft model into its quantized weights: dequantize, add, quantize again.

    Each weight keeps its format, axis, rotation, activations and backend. A small update is lost where it moves no
    element to another code. `model.unload()` then takes the adapters away.

    To keep the whole update, call `mxquant.dequantize_(model)` and `model.merge_and_unload()`, which leave ordinary
    weights.

    Args:
        scale_mode: of the new scales; None: the format's default.

    Returns:
        by the weight's name, the share of the update that survived: the projection of the change that was made on the
        change that was asked for, 1 if nothing was lost; NaN where the update is zero.

    Raises:
        TypeError: `model` is no module.
        ValueError: no adapter of peft lies on a quantized weight.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"merge_adapter takes a model of peft; got {type(model).__name__}")
    shares = {}
    for name, layer in list(_adapted_layers(model)):
        shares[f"{name}.weight"] = _merge_layer(layer, scale_mode)
    if not shares:
        raise ValueError(
            "no adapter of peft lies on a quantized weight of this model; for ordinary weights call its merge_adapter()"
        )
    return shares


def _adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers of peft whose base layer has a quantized weight, and which are not merged yet."""
    for name, layer in model.named_modules():
        base = layer._modules.get("base_layer")
        is_adapter = type(layer).__module__.startswith("peft.") and callable(getattr(layer, "merge", None))
        if base is not None and is_adapter and isinstance(base._parameters.get("weight"), MXTensor):
            yield f"{name}.base_layer" if name else "base_layer", layer


def _merge_layer(layer: Any, scale_mode: str | None) -> float:
    base = layer.get_base_layer()
    quantized = base._parameters["weight"]
    before = quantized.dequantize(torch.float32)
    base.register_parameter("weight", nn.Parameter(before.clone(), requires_grad=False))
    try:
        layer.merge()
        asked = base.weight.detach() - before
        merged = _quantized_like(quantized, base.weight.detach().to(quantized.dtype), scale_mode)
    except BaseException:
        base.register_parameter("weight", quantized)
        raise
    base.register_parameter("weight", parameter_like(quantized, merged, requires_grad=False))
    made = merged.dequantize(torch.float32) - before
    return ((made * asked).sum(dtype=torch.float64) / asked.square().sum(dtype=torch.float64)).item()


def _quantized_like(old: MXTensor, values: Tensor, scale_mode: str | None) -> MXTensor:
    scheme = old.metadata.scheme
    new = quantize(
        values, old.format, scale_mode=scale_mode, axis=old.axis, nonfinite="raise", rotation=scheme.rotation
    )
    new = new.with_activation(scheme.activation, scheme.activation_scale_mode, old.activation_scale)
    return as_weight(new, old.backend)
