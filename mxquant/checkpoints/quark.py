"""AMD Quark: one set of tensors for each linear layer, and for each expert of a block.

| | tensors of a module |
|---|---|
| MX | `weight` uint8 [N, bytes] or E4M3, `weight_scale` uint8 [N, K / 32] |
| NVFP4 | `weight` uint8 [N, K / 2], `weight_scale` E4M3 [N, K / 16], `weight_scale_2` fp32, a multiplier |
| static activations | `input_scale` for FP8, `input_scale_2` for NVFP4, multipliers, fp32 or the model's dtype |

A layer's scheme is the one of the first pattern of `layer_quant_config` that matches, else the one of
`layer_type_quant_config` for linear layers, else the global one.

Weights are named by modules: Quark takes merged experts apart before it quantizes them, and its importer looks for
those names only.

Source: amd-quark 0.13 `torch/export`, `torch/utils/pack.py`; its `config.json`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from mxquant.checkpoints.files import CONFIG, Checkpoint, Documents
from mxquant.checkpoints.producer import Producer, Reading, linear_spec, matches, module_of, modules_of_bytes
from mxquant.checkpoints.quark_schemes import DTYPES, MODES, STATIC_SCALES, read_scheme, write_scheme
from mxquant.checkpoints.weight_spec import WeightSpec
from mxquant.scheme import Scheme
from mxquant.tensor import MXTensor

_FOLDED = ("smooth", "autosmoothquant", "awq", "gptq", "gptaq", "autoround", "qronos")
"""Algorithms that only change the stored weights. Rotations and SVDQuant also compute in each call."""


class Quark(Producer):
    name = "quark"
    suffixes = (".weight_scale", ".weight_scale_2", *(f".{name}" for name in STATIC_SCALES.values()))
    kv_cache_suffixes = (".k_scale", ".v_scale", ".output_scale")
    weight_names = "module"

    def recognizes(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.quantization_config.get("quant_method") == self.name

    def read(self, checkpoint: Checkpoint) -> Reading:
        config = checkpoint.quantization_config
        packing = (config.get("export") or {}).get("pack_method", "reorder")
        if packing != "reorder" and any(info.dtype == "I32" for info in checkpoint.tensors.values()):
            raise NotImplementedError(f"pack_method {packing!r} is not read; export with 'reorder'")
        _check_algorithms(config)
        quantized = [_weight_spec(module, config) for module in modules_of_bytes(checkpoint)]
        return Reading(quantized)

    def activation_scale_mode(self, activation: str) -> str | None:
        return "even"

    def encode(self, name: str, weight: MXTensor, stored_scales: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.check_matrix(name, weight, (*DTYPES, "nvfp4"))
        self._check_scheme(name, weight)
        tensors = self.encode_linear(name, weight, STATIC_SCALES.get(str(weight.activation)))
        for scale in tensors.keys() & stored_scales.keys():
            if torch.equal(stored_scales[scale].float(), tensors[scale]):
                tensors[scale] = stored_scales[scale]
        return tensors

    def _check_scheme(self, name: str, weight: MXTensor) -> None:
        """Refuse a scheme that the config has no words for."""
        scheme = weight.metadata.scheme
        formats = {None, "fp8_e4m3", *DTYPES} | ({"nvfp4"} if scheme.weight == "nvfp4" else set())
        if scheme.activation not in formats:
            lost = f"activations in {scheme.activation} with a weight in {scheme.weight}"
            known = ", ".join(sorted(filter(None, formats)))
            self.refuse(name, weight, lost, f"quantize activations to one of {known} or not at all")
        if scheme.static_activation_scale != (scheme.activation in STATIC_SCALES):
            words = {True: "calibrated", False: "computed at run time"}
            given, wanted = words[scheme.static_activation_scale], words[scheme.activation in STATIC_SCALES]
            lost = f"activation scales that are {given} (its {scheme.activation} has {wanted} ones)"
            self.refuse(name, weight, lost, "make it weight-only (activation=None)")
        modes = {"nvfp4": ("even",), "fp8_e4m3": (None,), None: (None,)}.get(scheme.activation, MODES)
        if (mode := scheme.activation_scale_mode) not in modes:
            remedy = f"quantize with activation_scale_mode {', '.join(map(repr, modes))}"
            self.refuse(name, weight, f"activation_scale_mode {mode!r}", remedy)

    def config(self, weights: Mapping[str, MXTensor], ordinary: Iterable[str]) -> Documents:
        schemes: dict[Scheme, list[str]] = {}
        for name, weight in weights.items():
            schemes.setdefault(weight.metadata.scheme, []).append(module_of(name))
        most = max(schemes, key=lambda scheme: len(schemes[scheme]))
        others = {scheme: modules for scheme, modules in schemes.items() if scheme != most}
        config: dict[str, Any] = {
            "quant_method": self.name,
            "quant_mode": "eager_mode",
            "version": "0.13",
            "global_quant_config": write_scheme(most),
            "layer_quant_config": {name: write_scheme(scheme) for scheme, names in others.items() for name in names},
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
        return {CONFIG: config}


def _check_algorithms(config: Mapping[str, Any]) -> None:
    """Refuse algorithms that compute at run time, beside the stored tensors."""
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
    """Refuse quantized outputs, except those of keys and values: they are the KV cache, whose scales are ignored."""
    outputs = layer.get("output_tensors")
    cached = [*(config.get("kv_cache_quant_config") or {}), *((config.get("export") or {}).get("kv_cache_group") or [])]
    if outputs is not None and not any(matches(pattern, module) for pattern in cached):
        raise NotImplementedError(f"{module}: output_tensors {outputs!r}: outputs are not quantized here")


def _weight_spec(module: str, config: Mapping[str, Any]) -> WeightSpec:
    layer = _layer_of(module, config)
    _check_outputs(module, layer, config)
    scheme = read_scheme(module, layer)
    return linear_spec(module, scheme, STATIC_SCALES.get(str(scheme.activation)))


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
