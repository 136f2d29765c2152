"""NVIDIA ModelOpt: `hf_quant_config.json` or config.json names one algorithm for all layers, or one for each.

| algorithm | tensors of a module | activations |
|---|---|---|
| NVFP4 | `weight` uint8 [N, K / 2], `weight_scale` E4M3 [N, K / 16], `weight_scale_2`, `input_scale` | NVFP4, static |
| W4A16_NVFP4 | the same without `input_scale` | - |
| W4A8_NVFP4_FP8 | as NVFP4 | FP8, static |
| MXFP8 | `weight` E4M3 [N, K], `weight_scale` uint8 [N, K / 32] | MXFP8 |
| W4A8_MXFP4_FP8 | `weight` uint8 [N, K / 2], `weight_scale` uint8 [N, K / 32] | FP8, see below |

`weight_scale_2` and `input_scale` are fp32 multipliers of one element. W4A8_MXFP4_FP8 activations have a static scale
where the files have an `input_scale`, and otherwise one scale a row, computed at run time.

Source: nvidia-modelopt 0.47 `torch/export/{quant_utils,convert_hf_config}.py`, `torch/quantization/qtensor/*.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from mxquant.checkpoints.files import CONFIG, Checkpoint, Documents
from mxquant.checkpoints.producer import Producer, Reading, linear_spec, matches, module_of, modules_of_bytes
from mxquant.checkpoints.weight_spec import WeightSpec
from mxquant.formats import get_format
from mxquant.scheme import Scheme
from mxquant.tensor import MXTensor


class _Algorithm(NamedTuple):
    format: str
    activation: str | None
    static: bool | None
    """Whether there is an `input_scale`; None: if the files have one."""


_ALGORITHMS = {
    "NVFP4": _Algorithm("nvfp4", "nvfp4", True),
    "W4A16_NVFP4": _Algorithm("nvfp4", None, False),
    "W4A8_NVFP4_FP8": _Algorithm("nvfp4", "fp8_e4m3", True),
    "MXFP8": _Algorithm("mxfp8_e4m3", "mxfp8_e4m3", False),
    "W4A8_MXFP4_FP8": _Algorithm("mxfp4", "fp8_e4m3", None),
}
_OWN_CONFIG = "hf_quant_config.json"
_FORMATS = ("nvfp4", "mxfp8_e4m3", "mxfp4")
_UNREAD = ("pre_quant_scale", "svdquant_lora_a", "svdquant_lora_b")
_MIXED = "MIXED_PRECISION"


class ModelOpt(Producer):
    name = "modelopt"
    sidecars = (_OWN_CONFIG,)
    suffixes = (".weight_scale", ".weight_scale_2", ".input_scale")
    kv_cache_suffixes = (".k_scale", ".v_scale")

    def recognizes(self, checkpoint: Checkpoint) -> bool:
        method = checkpoint.quantization_config.get("quant_method")
        producer = checkpoint.sidecars.get(_OWN_CONFIG, {}).get("producer")
        own_file = isinstance(producer, dict) and producer.get("name") == self.name
        return method in (self.name, "modelopt_fp4") or (method is None and own_file)

    def read(self, checkpoint: Checkpoint) -> Reading:
        config = checkpoint.quantization_config or checkpoint.sidecars.get(_OWN_CONFIG, {}).get("quantization")
        if not isinstance(config, dict):
            raise ValueError(f"{_OWN_CONFIG} has no object 'quantization' but {config!r}; download it anew")
        for name in checkpoint.tensors:
            if name.rpartition(".")[2] in _UNREAD:
                raise NotImplementedError(f"{name!r}: AWQ and SVD scale activations before a matmul, which is not read")
        quantized = [_weight_spec(module, config, checkpoint) for module in modules_of_bytes(checkpoint)]
        return Reading(quantized)

    def activation_scale_mode(self, activation: str) -> str | None:
        return get_format(activation, activation=True).default_scale_mode

    def encode(self, name: str, weight: MXTensor, stored_scales: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.check_matrix(name, weight, _FORMATS)
        self._algorithm_of(name, weight)
        self.check_activation_scale_mode(name, weight)
        return self.encode_linear(name, weight, "input_scale")

    def config(self, weights: Mapping[str, MXTensor], ordinary: Iterable[str]) -> Documents:
        excluded = sorted(ordinary)
        layers = {module_of(name): _described(self._algorithm_of(name, weight)) for name, weight in weights.items()}
        described, *others = layers.values()
        if any(layer != described for layer in others):
            described = {"quant_algo": _MIXED, "quantized_layers": layers}
        producer = {"name": self.name, "version": "0.47.0"}
        return {
            CONFIG: described | {"quant_method": self.name, "ignore": excluded, "producer": producer},
            _OWN_CONFIG: {
                "producer": producer,
                "quantization": described | {"kv_cache_quant_algo": None, "exclude_modules": excluded},
            },
        }

    def _algorithm_of(self, name: str, weight: MXTensor) -> str:
        """The algorithm that stands for the weight's scheme, which is refused if there is none."""
        static = weight.activation_scale is not None
        for algorithm, fields in _ALGORITHMS.items():
            if fields[:2] == (weight.format, weight.activation) and fields.static in (None, static):
                return algorithm
        scales = f"{'static' if static else 'dynamic'} scales" if weight.activation else "16 bits"
        lost = f"activations in {weight.activation or 'their own dtype'} ({scales}) with a weight in {weight.format}"
        self.refuse(name, weight, lost, f"use one of {_choices(weight.format)}")


def _choices(format: str) -> str:
    """The activations that the files can have with a weight format, as `quantize_` takes them."""
    scales = {True: ", with calibrated scales that MXTensor.with_activation takes", False: "", None: ""}
    return "; ".join(
        f"activation={fields.activation!r} ({name}{scales[fields.static]})"
        for name, fields in _ALGORITHMS.items()
        if fields.format == format
    )


def _described(algorithm: str) -> dict[str, Any]:
    return {"quant_algo": algorithm, "group_size": get_format(_ALGORITHMS[algorithm].format).block_size}


def _weight_spec(module: str, config: Mapping[str, Any], checkpoint: Checkpoint) -> WeightSpec:
    algorithm = _ALGORITHMS[_algorithm_name(module, config)]
    is_static = algorithm.static
    if is_static is None:
        is_static = f"{module}.input_scale" in checkpoint.tensors
    scheme = Scheme(algorithm.format, algorithm.activation, static_activation_scale=is_static)
    return linear_spec(module, scheme, "input_scale")


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
