"""NVIDIA ModelOpt: `hf_quant_config.json`, or the same in config.json, names one algorithm or one a layer.

| algorithm | tensors of a module | activations |
|---|---|---|
| NVFP4 | `weight` uint8 [N, K / 2], `weight_scale` E4M3 [N, K / 16], `weight_scale_2`, `input_scale` | NVFP4, static |
| W4A16_NVFP4 | the same without `input_scale` | - |
| W4A8_NVFP4_FP8 | as NVFP4 | FP8, static |
| MXFP8 | `weight` E4M3 [N, K], `weight_scale` uint8 [N, K / 32] | MXFP8 |
| W4A8_MXFP4_FP8 | `weight` uint8 [N, K / 2], `weight_scale` uint8 [N, K / 32] | FP8, see below |

`weight_scale_2` and `input_scale` are fp32 multipliers of one element. W4A8_MXFP4_FP8 is static where there is an
`input_scale`; else activations have a scale a row, computed at run time.

Source: nvidia-modelopt 0.47 `torch/export/{quant_utils,convert_hf_config}.py`, `torch/quantization/qtensor/*.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mxquant.checkpoints.files import Checkpoint
from mxquant.checkpoints.producer import (
    Reading,
    check_matrix,
    check_mode,
    kv_cache_scales,
    matches,
    module_of,
    modules_of_bytes,
    one_scale,
    refuse,
)
from mxquant.checkpoints.weight_spec import WeightSpec
from mxquant.formats import get_format
from mxquant.tensor import MXTensor


class _Algorithm(NamedTuple):
    format: str
    activation: str | None
    static: bool | None
    """Whether it has an `input_scale`; None: where the files have one."""


_ALGORITHMS = {
    "NVFP4": _Algorithm("nvfp4", "nvfp4", True),
    "W4A16_NVFP4": _Algorithm("nvfp4", None, False),
    "W4A8_NVFP4_FP8": _Algorithm("nvfp4", "fp8_e4m3", True),
    "MXFP8": _Algorithm("mxfp8_e4m3", "mxfp8_e4m3", False),
    "W4A8_MXFP4_FP8": _Algorithm("mxfp4", "fp8_e4m3", None),
}
_FORMATS = ("nvfp4", "mxfp8_e4m3", "mxfp4")
_KV_SCALES = (".k_scale", ".v_scale")
_UNREAD = ("pre_quant_scale", "svdquant_lora_a", "svdquant_lora_b")
_MIXED = "MIXED_PRECISION"


class ModelOpt:
    name = "modelopt"
    by_modules = False

    def recognizes(self, checkpoint: Checkpoint) -> bool:
        method = checkpoint.quantization_config.get("quant_method")
        producer = (checkpoint.hf_quant_config or {}).get("producer")
        own_file = isinstance(producer, dict) and producer.get("name") == self.name
        return method in (self.name, "modelopt_fp4") or (method is None and own_file)

    def read(self, checkpoint: Checkpoint) -> Reading:
        config = checkpoint.quantization_config or (checkpoint.hf_quant_config or {}).get("quantization")
        if not isinstance(config, dict):
            raise ValueError(f"hf_quant_config.json has no object 'quantization' but {config!r}; download it anew")
        for name in checkpoint.tensors:
            if name.rpartition(".")[2] in _UNREAD:
                raise NotImplementedError(f"{name!r}: AWQ and SVD scale activations before a matmul, which is not read")
        stored = [_stored(module, config, checkpoint) for module in modules_of_bytes(checkpoint)]
        return Reading(stored, kv_cache_scales(checkpoint, _KV_SCALES))

    def activation_scale_mode(self, activation: str) -> str | None:
        return get_format(activation, activation=True).default_scale_mode

    def encode(self, name: str, weight: MXTensor, known: Mapping[str, Tensor]) -> dict[str, Tensor]:
        check_matrix(self.name, name, weight, _FORMATS)
        algorithm = self._algorithm_of(name, weight)
        if weight.activation is not None:
            check_mode(self.name, name, weight, self.activation_scale_mode(weight.activation))
        module, canonical = module_of(name), weight.canonical()
        codes_dtype = torch.float8_e4m3fn if algorithm.format == "mxfp8_e4m3" else torch.uint8
        scale_dtype = torch.float8_e4m3fn if algorithm.format == "nvfp4" else torch.uint8
        tensors = {
            name: canonical.qdata.view(codes_dtype),
            f"{module}.weight_scale": canonical.scale.view(scale_dtype),
        }
        multiplier = one_scale(self.name, name, weight, canonical.per_tensor_scale)
        static = one_scale(self.name, name, weight, canonical.activation_scale)
        optional = {"weight_scale_2": multiplier, "input_scale": static}
        return tensors | {f"{module}.{part}": scale for part, scale in optional.items() if scale is not None}

    def config(self, weights: Mapping[str, MXTensor], ordinary: Iterable[str]) -> dict[str, dict[str, Any]]:
        excluded = sorted(ordinary)
        layers = {module_of(name): _described(self._name_of(name, weight)) for name, weight in weights.items()}
        names = {layer["quant_algo"] for layer in layers.values()}
        if len(names) == 1:
            described = next(iter(layers.values()))
        else:
            described = {"quant_algo": _MIXED, "quantized_layers": layers}
        producer = {"name": self.name, "version": "0.47.0"}
        return {
            "config.json": described | {"quant_method": self.name, "ignore": excluded, "producer": producer},
            "hf_quant_config.json": {
                "producer": producer,
                "quantization": described | {"kv_cache_quant_algo": None, "exclude_modules": excluded},
            },
        }

    def _algorithm_of(self, name: str, weight: MXTensor) -> _Algorithm:
        return _ALGORITHMS[self._name_of(name, weight)]

    def _name_of(self, name: str, weight: MXTensor) -> str:
        static = weight.activation_scale is not None
        for algorithm, fields in _ALGORITHMS.items():
            if fields[:2] == (weight.format, weight.activation) and fields.static in (None, static):
                return algorithm
        scales = f"{'static' if static else 'dynamic'} scales" if weight.activation else "16 bits"
        refuse(
            self.name,
            name,
            weight,
            f"activations in {weight.activation or 'their own dtype'} ({scales}) with a weight in {weight.format}",
            f"it has {_choices(weight.format)}; else save as 'mxquant'",
        )


def _choices(format: str) -> str:
    """The activations that it has for a weight format, as `quantize_` takes them."""
    scales = {True: ", with calibrated scales that MXTensor.with_activation takes", False: "", None: ""}
    return "; ".join(
        f"activation={fields.activation!r} ({name}{scales[fields.static]})"
        for name, fields in _ALGORITHMS.items()
        if fields.format == format
    )


def _described(algorithm: str) -> dict[str, Any]:
    return {"quant_algo": algorithm, "group_size": get_format(_ALGORITHMS[algorithm].format).block_size}


def _stored(module: str, config: Mapping[str, Any], checkpoint: Checkpoint) -> WeightSpec:
    algorithm = _ALGORITHMS[_algorithm_name(module, config)]
    input_scale = f"{module}.input_scale"
    static = algorithm.static or (algorithm.static is None and input_scale in checkpoint.tensors)
    mode = None
    if algorithm.activation is not None:
        mode = get_format(algorithm.activation, activation=True).default_scale_mode
    return WeightSpec(
        name=f"{module}.weight",
        format=algorithm.format,
        qdata=f"{module}.weight",
        scale=f"{module}.weight_scale",
        per_tensor_scale=f"{module}.weight_scale_2" if algorithm.format == "nvfp4" else None,
        activation=algorithm.activation,
        activation_scale_mode=mode,
        activation_scale=input_scale if static else None,
    )


def _algorithm_name(module: str, config: Mapping[str, Any]) -> str:
    name = config.get("quant_algo")
    if name == _MIXED:
        layers = config.get("quantized_layers")
        if not isinstance(layers, dict):
            raise ValueError(f"{_MIXED} needs quantized_layers, an object of layers; got {layers!r}")
        layer = layers.get(module) or next((v for pattern, v in layers.items() if matches(pattern, module)), None)
        name = layer.get("quant_algo") if isinstance(layer, dict) else None
    if name not in _ALGORITHMS:
        raise NotImplementedError(f"{module}: quant_algo {name!r} is not read; read are {', '.join(_ALGORITHMS)}")
    return str(name)
