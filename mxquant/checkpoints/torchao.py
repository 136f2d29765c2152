"""torchao's safetensors of MXTensor and NVFP4Tensor: `mod._weight_qdata`, `mod._weight_scale`, JSON in the header.

Scales may lie in tiles of 128 x 4, and 6-bit codes one a byte. Both are rearranged on reading; codes and scales keep
their values. Read only: torchao's kernels need its own tensors.

Source: torchao 0.18 `prototype/safetensors/*.py`, `prototype/mx_formats/{mx,nvfp4}_tensor.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mxquant.checkpoints.files import Checkpoint
from mxquant.checkpoints.producer import Producer, Reading
from mxquant.checkpoints.weight_spec import WeightSpec
from mxquant.scheme import Scheme

_ELEMENTS = {
    "float4_e2m1fn_x2": "mxfp4",
    "fp6_e2m3": "mxfp6_e2m3",
    "fp6_e3m2": "mxfp6_e3m2",
    "float8_e4m3fn": "mxfp8_e4m3",
    "float8_e5m2": "mxfp8_e5m2",
}
_ACTIVATION_MODES = {"FLOOR": "floor", "CEIL": "ceil", "EVEN": "even", "RCEIL": "rceil"}


class TorchAO(Producer):
    name = "torchao"
    suffixes = ("_weight_qdata", "_weight_scale")
    can_write = False

    def recognizes(self, checkpoint: Checkpoint) -> bool:
        method = checkpoint.quantization_config.get("quant_method")
        is_described = any("tensor_names" in header for header in checkpoint.headers)
        return method == self.name or (method is None and is_described)

    def read(self, checkpoint: Checkpoint) -> Reading:
        described: dict[str, dict[str, Any]] = {}
        for header in checkpoint.headers:
            names = _json(header, "tensor_names")
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise ValueError(f"tensor_names in the header is {names!r}; it is a list of names")
            described |= {name: _json(header, name) for name in names}
        return Reading(
            [_weight_spec(name, found) for name, found in described.items() if found.get("_type") != "Tensor"]
        )


def _json(header: Mapping[str, str], key: str) -> Any:
    try:
        content = json.loads(header[key])
    except (KeyError, ValueError, RecursionError) as error:
        raise ValueError(f"the header's metadata {key!r} is missing or damaged: {error!r}; save anew") from error
    if key != "tensor_names" and not isinstance(content, dict):
        raise ValueError(f"the header's metadata {key!r} is no JSON object but {content!r}; save anew")
    return content


def _weight_spec(name: str, described: Mapping[str, Any]) -> WeightSpec:
    kind, fields, tensors = (described.get(key) for key in ("_type", "_data", "_tensor_data_names"))
    if kind not in ("MXTensor", "NVFP4Tensor") or not isinstance(fields, dict) or not isinstance(tensors, list):
        raise NotImplementedError(f"{name} is a {kind!r} of torchao; read are MXTensor and NVFP4Tensor")
    fmt = "nvfp4" if kind == "NVFP4Tensor" else _element(name, fields)
    block = {"MXTensor": 32, "NVFP4Tensor": 16}[kind]
    if fields.get("block_size") != block:
        raise NotImplementedError(f"{name} has blocks of {fields.get('block_size')!r}; read are blocks of {block}")
    if fmt == "nvfp4" and "per_tensor_scale" not in tensors:
        raise NotImplementedError(f"{name} is NVFP4 without a per-tensor scale; save it with one")
    module, _, attribute = name.rpartition(".")
    prefix = f"{module}._{attribute}_"
    activation, mode = _activation(name, fmt, fields.get("act_quant_kwargs"))
    is_static = "act_per_tensor_scale" in tensors
    return WeightSpec(
        name=name,
        scheme=Scheme(
            fmt, activation, activation_scale_mode=mode, static_activation_scale=is_static and activation is not None
        ),
        qdata=f"{prefix}qdata",
        scale=f"{prefix}scale",
        per_tensor_scale=f"{prefix}per_tensor_scale" if fmt == "nvfp4" else None,
        activation_scale=f"{prefix}act_per_tensor_scale" if is_static else None,
        scale_is_swizzled=bool(fields.get("is_swizzled_scales")),
        qdata_is_unpacked=fmt.startswith("mxfp6"),
    )


def _data(value: Any) -> Any:
    return value.get("_data") if isinstance(value, dict) else value


def _element(name: str, fields: Mapping[str, Any]) -> str:
    element = _data(fields.get("elem_dtype"))
    if element not in _ELEMENTS:
        raise NotImplementedError(f"{name} has elements {element!r}; read are {', '.join(_ELEMENTS)}")
    return _ELEMENTS[str(element)]


def _activation(name: str, fmt: str, given: Any) -> tuple[str | None, str | None]:
    """The activation format and scale mode in `act_quant_kwargs`."""
    if given is None:
        return None, None
    fields = _data(given)
    if not isinstance(fields, dict):
        raise ValueError(f"{name}: act_quant_kwargs is {given!r}; it is null or an object")
    if fmt == "nvfp4":
        return "nvfp4", "even"
    mode = _data(fields.get("scaling_mode"))
    if mode not in _ACTIVATION_MODES:
        raise NotImplementedError(f"{name}: scaling_mode {mode!r} is unknown; read are {', '.join(_ACTIVATION_MODES)}")
    return _element(name, fields), _ACTIVATION_MODES[str(mode)]
