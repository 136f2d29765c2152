"""AMD Quark: one set of tensors for each linear layer, and for each expert of a block.

| | tensors of a module |
|---|---|
| MX | `weight` uint8 [N, bytes] or E4M3, `weight_scale` uint8 [N, K / 32] |
| NVFP4 | `weight` uint8 [N, K / 2], `weight_scale` E4M3 [N, K / 16], `weight_scale_2` fp32, a multiplier |
| static activations | `input_scale` for FP8, `input_scale_2` for NVFP4, multipliers, fp32 or the model's dtype |

A layer's scheme is that of the first pattern of `layer_quant_config` that it matches, else that of
`layer_type_quant_config` for linear layers, else the global one.

Weights are named by modules: Quark takes merged experts apart before it quantizes them, and its importer looks for
those names alone.

Source: amd-quark 0.13 `torch/export`, `torch/utils/pack.py`; its `config.json`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from mxquant.checkpoints.files import Checkpoint
from mxquant.checkpoints.producer import (
    Reading,
    check_matrix,
    kv_cache_scales,
    matches,
    module_of,
    modules_of_bytes,
    one_scale,
    refuse,
)
from mxquant.checkpoints.quark_schemes import DTYPES, MODES, Scheme, read_scheme, write_scheme
from mxquant.checkpoints.weight_spec import WeightSpec
from mxquant.tensor import MXTensor

_FOLDED = ("smooth", "autosmoothquant", "awq", "gptq", "gptaq", "autoround", "qronos")
"""Algorithms that are done when the weights are stored; rotations and SVDQuant compute on in each call."""
_KV_SCALES = (".k_scale", ".v_scale", ".output_scale")


class Quark:
    name = "quark"
    by_modules = True

    def recognizes(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.quantization_config.get("quant_method") == self.name

    def read(self, checkpoint: Checkpoint) -> Reading:
        config = checkpoint.quantization_config
        packing = (config.get("export") or {}).get("pack_method", "reorder")
        if packing != "reorder" and any(info.dtype == "I32" for info in checkpoint.tensors.values()):
            raise NotImplementedError(f"pack_method {packing!r} is not read; export with 'reorder'")
        _check_algorithms(config)
        stored = [_stored(module, config) for module in modules_of_bytes(checkpoint)]
        return Reading(stored, kv_cache_scales(checkpoint, _KV_SCALES))

    def activation_scale_mode(self, activation: str) -> str | None:
        return "even"

    def encode(self, name: str, weight: MXTensor, known: Mapping[str, Tensor]) -> dict[str, Tensor]:
        check_matrix(self.name, name, weight, (*DTYPES, "nvfp4"))
        scheme = self._writable(name, weight)
        module, canonical = module_of(name), weight.canonical()
        qdata = canonical.qdata.view(torch.float8_e4m3fn) if weight.format == "mxfp8_e4m3" else canonical.qdata
        scale = canonical.scale.view(torch.float8_e4m3fn) if weight.format == "nvfp4" else canonical.scale
        tensors = {name: qdata, f"{module}.weight_scale": scale}
        multiplier = one_scale(self.name, name, weight, canonical.per_tensor_scale)
        if multiplier is not None:
            tensors[f"{module}.weight_scale_2"] = multiplier
        static = one_scale(self.name, name, weight, canonical.activation_scale)
        if static is not None:
            part = f"{module}.{scheme.static}"
            before = known.get(part)
            tensors[part] = before if before is not None and torch.equal(before.float(), static) else static
        return tensors

    def _writable(self, name: str, weight: MXTensor) -> Scheme:
        """The weight's scheme, if the files can hold it."""
        scheme = Scheme(weight.format, weight.activation, weight.metadata.scheme.activation_scale_mode)
        formats = {None, "fp8_e4m3", *DTYPES} | ({"nvfp4"} if weight.format == "nvfp4" else set())
        if scheme.activation not in formats:
            lost = f"activations in {scheme.activation} with a weight in {scheme.format}"
            known = ", ".join(sorted(filter(None, formats)))
            remedy = f"quantize activations to one of {known} or not at all, or save as 'mxquant'"
            refuse(self.name, name, weight, lost, remedy)
        if (scheme.static is None) != (weight.activation_scale is None):
            given, wanted = "calibrated", "computed at run time"
            if scheme.static is not None:
                given, wanted = wanted, given
            lost = f"activation scales that are {given} (its {scheme.activation} has {wanted} ones)"
            refuse(self.name, name, weight, lost, "make it weight-only (activation=None), or save as 'mxquant'")
        modes = {"nvfp4": ("even",), "fp8_e4m3": (None,), None: (None,)}.get(scheme.activation, MODES)
        if scheme.mode not in modes:
            remedy = f"quantize with activation_scale_mode {', '.join(map(repr, modes))}, or save as 'mxquant'"
            refuse(self.name, name, weight, f"activation_scale_mode {scheme.mode!r}", remedy)
        return scheme

    def config(self, weights: Mapping[str, MXTensor], ordinary: Iterable[str]) -> dict[str, dict[str, Any]]:
        schemes: dict[Scheme, list[str]] = {}
        for name, weight in weights.items():
            key = Scheme(weight.format, weight.activation, weight.metadata.scheme.activation_scale_mode)
            schemes.setdefault(key, []).append(module_of(name))
        most = max(schemes, key=lambda key: len(schemes[key]))
        layers = {module: write_scheme(key) for key, modules in schemes.items() if key != most for module in modules}
        return {
            "config.json": {
                "quant_method": self.name,
                "quant_mode": "eager_mode",
                "version": "0.13",
                "global_quant_config": write_scheme(most),
                "layer_quant_config": layers,
                "layer_type_quant_config": {},
                "exclude": sorted(ordinary),
                "algo_config": None,
                "softmax_quant_spec": None,
                "kv_cache_quant_config": {},
                "kv_cache_post_rope": False,
                "export": {
                    "kv_cache_group": [],
                    "min_kv_scale": 0.0,
                    "pack_method": "reorder",
                    "weight_format": "real_quantized",
                    "weight_merge_groups": None,
                },
            }
        }


def _check_algorithms(config: Mapping[str, Any]) -> None:
    """Refuse what the numbers of a model depend on beside the stored tensors."""
    given = config.get("algo_config") or []
    for algorithm in given if isinstance(given, list) else [given]:
        if not isinstance(algorithm, dict) or algorithm.get("name") not in _FOLDED:
            raise NotImplementedError(
                f"algo_config {algorithm!r} is not computed here; read are {', '.join(_FOLDED)}, which are folded into "
                "the weights"
            )
    if (softmax := config.get("softmax_quant_spec")) is not None:
        raise NotImplementedError(f"softmax_quant_spec {softmax!r}: attention's softmax is not quantized here")


def _check_outputs(module: str, layer: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Refuse quantized outputs, but of keys and values: these are the cache, whose scales are left out and reported."""
    outputs = layer.get("output_tensors")
    cached = [*(config.get("kv_cache_quant_config") or {}), *((config.get("export") or {}).get("kv_cache_group") or [])]
    if outputs is not None and not any(matches(pattern, module) for pattern in cached):
        raise NotImplementedError(f"{module}: output_tensors {outputs!r}: outputs are not quantized here")


def _stored(module: str, config: Mapping[str, Any]) -> WeightSpec:
    layer = _layer_of(module, config)
    _check_outputs(module, layer, config)
    scheme = read_scheme(module, layer)
    return WeightSpec(
        name=f"{module}.weight",
        format=scheme.format,
        qdata=f"{module}.weight",
        scale=f"{module}.weight_scale",
        per_tensor_scale=f"{module}.weight_scale_2" if scheme.format == "nvfp4" else None,
        activation=scheme.activation,
        activation_scale_mode=scheme.mode,
        activation_scale=None if scheme.static is None else f"{module}.{scheme.static}",
    )


def _layer_of(module: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
    layers = config.get("layer_quant_config") or {}
    by_type = config.get("layer_type_quant_config") or {}
    if not isinstance(layers, dict) or not isinstance(by_type, dict):
        raise ValueError("layer_quant_config and layer_type_quant_config of a Quark checkpoint are objects")
    found = next((scheme for pattern, scheme in layers.items() if matches(pattern, module)), None)
    if found is None:
        found = by_type.get("nn.Linear", by_type.get("Linear", config.get("global_quant_config")))
    if not isinstance(found, dict):
        raise ValueError(f"{module} is quantized, but the config has no scheme for it: {found!r}")
    return found
