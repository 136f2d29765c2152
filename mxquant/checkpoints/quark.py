"""AMD Quark: `weight` uint8 [N, bytes], `weight_scale` uint8 [N, K / 32]; one set for each expert of a block.

A layer's scheme is that of the first pattern of `layer_quant_config` that it matches, else that of
`layer_type_quant_config` for linear layers, else the global one.

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
    refuse,
)
from mxquant.checkpoints.stored import Stored
from mxquant.tensor import MXTensor

_FORMATS = {"fp4": "mxfp4", "fp6_e2m3": "mxfp6_e2m3", "fp6_e3m2": "mxfp6_e3m2", "fp8_e4m3": "mxfp8_e4m3"}
_DTYPES = {fmt: dtype for dtype, fmt in _FORMATS.items()}
_MODES = ("even", "floor", "ceil")
_KV_SCALES = (".k_scale", ".v_scale", ".output_scale")


class Quark:
    name = "quark"

    def recognizes(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.quantization_config.get("quant_method") == self.name

    def read(self, checkpoint: Checkpoint) -> Reading:
        config = checkpoint.quantization_config
        packing = (config.get("export") or {}).get("pack_method", "reorder")
        if packing != "reorder" and any(info.dtype == "I32" for info in checkpoint.tensors.values()):
            raise NotImplementedError(f"pack_method {packing!r} is not read; export with 'reorder'")
        stored = [_stored(module, config, checkpoint) for module in modules_of_bytes(checkpoint)]
        return Reading(stored, kv_cache_scales(checkpoint, _KV_SCALES))

    def activation_scale_mode(self, activation: str) -> str | None:
        return "even"

    def encode(self, name: str, weight: MXTensor, known: Mapping[str, Tensor]) -> dict[str, Tensor]:
        check_matrix(self.name, name, weight, _DTYPES)
        if weight.activation is not None and weight.activation not in _DTYPES:
            refuse(
                self.name,
                name,
                weight,
                f"activations in {weight.activation}",
                f"quantize activations to one of {', '.join(_DTYPES)} or not at all, or save as 'mxquant'",
            )
        mode = weight.metadata.activation_scale_mode
        if weight.activation is not None and mode not in _MODES:
            refuse(
                self.name,
                name,
                weight,
                f"activation_scale_mode {mode!r}",
                f"quantize with activation_scale_mode {', '.join(map(repr, _MODES))}, or save as 'mxquant'",
            )
        module, canonical = module_of(name), weight.canonical()
        qdata = canonical.qdata.view(torch.float8_e4m3fn) if weight.format == "mxfp8_e4m3" else canonical.qdata
        return {name: qdata, f"{module}.weight_scale": canonical.scale}

    def config(self, weights: Mapping[str, MXTensor], ordinary: Iterable[str]) -> dict[str, dict[str, Any]]:
        schemes: dict[tuple[str, str | None, str | None], list[str]] = {}
        for name, weight in weights.items():
            key = (weight.format, weight.activation, weight.metadata.activation_scale_mode)
            schemes.setdefault(key, []).append(module_of(name))
        most = max(schemes, key=lambda key: len(schemes[key]))
        layers = {module: _scheme(*key) for key, modules in schemes.items() if key != most for module in modules}
        return {
            "config.json": {
                "quant_method": self.name,
                "quant_mode": "eager_mode",
                "version": "0.13",
                "global_quant_config": _scheme(*most),
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


def _stored(module: str, config: Mapping[str, Any], checkpoint: Checkpoint) -> Stored:
    scheme = _scheme_of(module, config)
    fmt, _ = _format_of(module, "weight", scheme.get("weight"), dynamic=False)
    inputs = scheme.get("input_tensors")
    activation, mode, static = None, None, None
    if inputs is not None and _is_fp8(inputs):
        activation = "fp8_e4m3"
        static = None if inputs.get("is_dynamic") else f"{module}.input_scale"
    elif inputs is not None:
        activation, mode = _format_of(module, "input_tensors", inputs, dynamic=True)
    return Stored(
        name=f"{module}.weight",
        format=fmt,
        qdata=f"{module}.weight",
        scale=f"{module}.weight_scale",
        activation=activation,
        activation_scale_mode=mode,
        activation_scale=static,
    )


def _is_fp8(spec: Any) -> bool:
    """Whether a spec is plain FP8: one fp32 scale a tensor, or a row at run time."""
    if not isinstance(spec, dict) or spec.get("dtype") != "fp8_e4m3":
        return False
    return spec.get("qscheme") == ("per_token" if spec.get("is_dynamic") else "per_tensor")


def _scheme_of(module: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
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


def _format_of(module: str, what: str, spec: Any, *, dynamic: bool) -> tuple[str, str | None]:
    """The MX format of a spec, and its scale mode."""
    if (
        not isinstance(spec, dict)
        or spec.get("dtype") not in _FORMATS
        or (spec.get("qscheme"), spec.get("group_size")) != ("per_group", 32)
        or spec.get("scale_format") != "e8m0"
        or bool(spec.get("is_dynamic")) != dynamic
    ):
        raise NotImplementedError(
            f"{module}: {what} is {spec!r}; read are {', '.join(_FORMATS)} per group of 32 with E8M0 scales, "
            "static for weights and dynamic for activations"
        )
    mode = spec.get("scale_calculation_mode") or "even"
    if mode not in _MODES:
        raise NotImplementedError(f"{module}: scale_calculation_mode {mode!r} of {what} is unknown; read are {_MODES}")
    return _FORMATS[spec["dtype"]], mode


def _scheme(fmt: str, activation: str | None, mode: str | None) -> dict[str, Any]:
    return {
        "weight": _spec(fmt, "even", dynamic=False),
        "input_tensors": None if activation is None else _spec(activation, mode or "even", dynamic=True),
        "output_tensors": None,
        "bias": None,
        "target_device": None,
    }


def _spec(fmt: str, mode: str, *, dynamic: bool) -> dict[str, Any]:
    return {
        "dtype": _DTYPES[fmt],
        "qscheme": "per_group",
        "ch_axis": -1,
        "group_size": 32,
        "block_size": None,
        "is_dynamic": dynamic,
        "is_scale_quant": False,
        "symmetric": None,
        "round_method": "half_even",
        "scale_calculation_mode": mode,
        "scale_format": "e8m0",
        "scale_type": "float",
        "observer_cls": "PerBlockMXObserver",
        "mx_element_dtype": None,
        "zero_point_type": "int32",
        "enable_buffer_reuse": False,
        "max_input_numel": 4194304,
    }
