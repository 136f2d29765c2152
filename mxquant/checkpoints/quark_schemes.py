"""The spec of a layer in AMD Quark's config, to and from a `Scheme`.

| format | spec |
|---|---|
| MX | per group of 32 with E8M0 scales; static for weights, dynamic for activations |
| NVFP4 | two specs: FP4 per group of 16, and FP8 per tensor for the scales of the first |
| FP8 activations | per tensor, static |

Source: amd-quark 0.13 `torch/quantization/config/{config,template}.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mxquant.scheme import Scheme

FORMATS = {"fp4": "mxfp4", "fp6_e2m3": "mxfp6_e2m3", "fp6_e3m2": "mxfp6_e3m2", "fp8_e4m3": "mxfp8_e4m3"}
DTYPES = {fmt: dtype for dtype, fmt in FORMATS.items()}
MODES = ("even", "floor", "ceil")
STATIC_SCALES = {"fp8_e4m3": "input_scale", "nvfp4": "input_scale_2"}
"""For activation formats with a calibrated scale: which tensor of a module holds it."""
_ACCEPTED = (
    f"{', '.join(FORMATS)} per group of 32 with E8M0 scales, static for weights and dynamic for activations, fp4 per "
    "group of 16 with FP8 scales (NVFP4), both along the last axis, and static fp8_e4m3 per tensor for activations"
)


def read_scheme(module: str, layer: Mapping[str, Any]) -> Scheme:
    """The scheme of a layer's spec.

    Raises:
        NotImplementedError: mxquant does not compute it.
    """
    fmt, _ = _quark_format(module, "weight", layer.get("weight"), dynamic=False)
    inputs = layer.get("input_tensors")
    if inputs is None:
        return Scheme(fmt)
    for spec in inputs if isinstance(inputs, list) else [inputs]:
        if isinstance(spec, dict) and spec.get("round_method") not in (None, "half_even"):
            raise NotImplementedError(
                f"{module}: round_method {spec['round_method']!r} of input_tensors is not computed; 'half_even' is"
            )
    if _is_fp8(inputs, is_scale_quant=False):
        return Scheme(fmt, "fp8_e4m3", static_activation_scale=True)
    activation, mode = _quark_format(module, "input_tensors", inputs, dynamic=True)
    if activation == "nvfp4" and fmt != "nvfp4":
        raise NotImplementedError(f"{module} has nvfp4 activations with a weight in {fmt}, which is not read")
    is_static = activation in STATIC_SCALES
    return Scheme(fmt, activation, activation_scale_mode=mode, static_activation_scale=is_static)


def write_scheme(scheme: Scheme) -> dict[str, Any]:
    """The spec of a layer with `scheme`."""
    inputs: Any = None
    if scheme.activation == "fp8_e4m3":
        inputs = _fp8(is_scale_quant=False)
    elif scheme.activation is not None:
        inputs = _spec(scheme.activation, scheme.activation_scale_mode or "even", dynamic=True)
    return {
        "weight": _spec(scheme.weight, "even", dynamic=False),
        "input_tensors": inputs,
        "output_tensors": None,
        "bias": None,
        "target_device": None,
    }


def _quark_format(module: str, what: str, spec: Any, *, dynamic: bool) -> tuple[str, str]:
    """The format of a spec, and its scale mode."""
    if isinstance(spec, list) and len(spec) == 2 and _is_fp8(spec[1], is_scale_quant=True):
        if _is_per_group(spec[0], 16, "float32", dynamic) and spec[0]["dtype"] == "fp4":
            return "nvfp4", "even"
    elif _is_per_group(spec, 32, "e8m0", dynamic) and spec.get("dtype") in FORMATS:
        mode = spec.get("scale_calculation_mode") or "even"
        if mode not in MODES:
            raise NotImplementedError(
                f"{module}: scale_calculation_mode {mode!r} of {what} is unknown; read are {MODES}"
            )
        return FORMATS[spec["dtype"]], mode
    raise NotImplementedError(f"{module}: {what} is {spec!r}; read are {_ACCEPTED}")


def _is_per_group(spec: Any, size: int, scale_format: str, dynamic: bool) -> bool:
    if not isinstance(spec, dict):
        return False
    if spec.get("ch_axis", -1) not in ((-1,) if dynamic else (-1, 1)):  # a weight has two axes, activations any number
        return False
    found = (spec.get("qscheme"), spec.get("group_size"), spec.get("scale_format"), bool(spec.get("is_dynamic")))
    return found == ("per_group", size, scale_format, dynamic)


def _is_fp8(spec: Any, *, is_scale_quant: bool) -> bool:
    if not isinstance(spec, dict):
        return False
    found = tuple(bool(spec.get(flag)) for flag in ("is_dynamic", "is_scale_quant"))
    return (spec.get("dtype"), spec.get("qscheme")) == ("fp8_e4m3", "per_tensor") and found == (False, is_scale_quant)


def _spec(fmt: str, mode: str, *, dynamic: bool) -> Any:
    if fmt == "nvfp4":
        return [
            _filled(dtype="fp4", group_size=16, is_dynamic=dynamic, scale_format="float32", scale_type="float32"),
            _fp8(is_scale_quant=True),
        ]
    return _filled(dtype=DTYPES[fmt], is_dynamic=dynamic, scale_calculation_mode=mode)


def _fp8(*, is_scale_quant: bool) -> dict[str, Any]:
    return _filled(
        dtype="fp8_e4m3",
        qscheme="per_tensor",
        ch_axis=None,
        group_size=None,
        is_scale_quant=is_scale_quant,
        symmetric=True,
        scale_format=None,
        scale_type="float32",
        observer_cls="PerTensorMinMaxObserver",
    )


def _filled(**fields: Any) -> dict[str, Any]:
    """A spec with every field that Quark writes. Fields that are not given are those of an MX format."""
    return {
        "qscheme": "per_group",
        "ch_axis": -1,
        "group_size": 32,
        "block_size": None,
        "is_dynamic": False,
        "is_scale_quant": False,
        "symmetric": None,
        "round_method": "half_even",
        "scale_calculation_mode": None,
        "scale_format": "e8m0",
        "scale_type": "float",
        "observer_cls": "PerBlockMXObserver",
        "mx_element_dtype": None,
        "zero_point_type": "int32",
        "enable_buffer_reuse": False,
        "max_input_numel": 4194304,
    } | fields
