"""compressed-tensors (llm-compressor, vLLM): `config_groups` of weights' and activations' schemes.

| format | tensors of a module |
|---|---|
| mxfp4-pack-quantized, mxfp6-pack-quantized | `weight_packed` uint8 [N, bytes], `weight_scale` uint8 [N, K / 32] |
| mxfp8-quantized | `weight` E4M3 [N, K], `weight_scale` uint8 [N, K / 32] |
| nvfp4-pack-quantized | `weight_packed`, `weight_scale` E4M3 [N, K / 16], `weight_global_scale` fp32 [1] |

NVFP4 with quantized activations also has an `input_global_scale` fp32 [1]. Values are divided by the global scales.

Source: compressed-tensors 0.20 `compressors/{nvfp4,mxfp4,mxfp8}/base.py`, `quantization/quant_args.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from mxquant.checkpoints.files import CONFIG, Checkpoint, Documents
from mxquant.checkpoints.producer import Producer, Reading, codes_and_scales, matches, module_of, modules_of_bytes
from mxquant.checkpoints.weight_spec import WeightSpec
from mxquant.formats import get_format
from mxquant.scheme import Scheme
from mxquant.tensor import MXTensor

_FORMATS = {(4, 32): "mxfp4", (4, 16): "nvfp4", (6, 32): "mxfp6_e2m3", (8, 32): "mxfp8_e4m3"}
_NAMES = {
    "mxfp4": "mxfp4-pack-quantized",
    "nvfp4": "nvfp4-pack-quantized",
    "mxfp6_e2m3": "mxfp6-pack-quantized",
    "mxfp8_e4m3": "mxfp8-quantized",
}
# NOTE: `compressors/mx_utils.py` rounds every MX scale as for an E2M1 element.
_ACTIVATION_MODES = {"mxfp4": "even", "mxfp6_e2m3": "even", "mxfp8_e4m3": "even_fp4", "nvfp4": "even"}
_LINEAR = "Linear"


class CompressedTensors(Producer):
    name = "compressed-tensors"
    suffixes = (".weight_packed", ".weight_scale", ".weight_global_scale", ".input_global_scale")
    kv_cache_suffixes = (".k_scale", ".v_scale", ".q_scale")

    def recognizes(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.quantization_config.get("quant_method") == self.name

    def read(self, checkpoint: Checkpoint) -> Reading:
        config = checkpoint.quantization_config
        if transforms := config.get("transform_config"):
            raise NotImplementedError(f"transform_config {transforms!r}: activations are not transformed here")
        groups = _groups_by_target(config)
        packed = [name.removesuffix(".weight_packed") for name in checkpoint.tensors if name.endswith(".weight_packed")]
        modules = sorted({*packed, *modules_of_bytes(checkpoint)})
        quantized = [_weight_spec(module, _group_of(module, groups), checkpoint) for module in modules]
        return Reading(quantized)

    def activation_scale_mode(self, activation: str) -> str | None:
        return _ACTIVATION_MODES.get(activation)

    def prepare(self, weight: MXTensor) -> MXTensor:
        """Move the per-tensor scale to the nearest reciprocal of an fp32 number, at most one bit away.

        Codes and block scales stay as they are.
        """
        scale = weight.operand.per_tensor_scale
        return weight if scale is None else weight.rewrap(weight.operand._replace(per_tensor_scale=1 / (1 / scale)))

    def encode(self, name: str, weight: MXTensor, stored_scales: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.check_matrix(name, weight, _NAMES)
        if weight.activation not in (None, weight.format):
            lost = f"activations in {weight.activation}, another format than the weight's"
            self.refuse(name, weight, lost, "quantize with activation='same' or None")
        self.check_activation_scale_mode(name, weight)
        module, canonical = module_of(name), weight.canonical()
        codes = "weight" if weight.format == "mxfp8_e4m3" else "weight_packed"
        qdata, scale = codes_and_scales(canonical)
        tensors = {f"{module}.{codes}": qdata, f"{module}.weight_scale": scale}
        if weight.format != "nvfp4":
            return tensors
        if weight.activation is not None and canonical.activation_scale is None:
            lost = "activation scales that are computed at run time (its NVFP4 has calibrated ones)"
            self.refuse(name, weight, lost, "make it weight-only (activation=None)")
        for stored, kind, scales in (
            (f"{module}.weight_global_scale", "per-tensor", canonical.per_tensor_scale),
            (f"{module}.input_global_scale", "activations'", canonical.activation_scale),
        ):
            multiplier = self.one_scale(name, weight, scales)
            if multiplier is None:
                continue
            tensors[stored] = _divisor(multiplier, stored_scales.get(stored))
            read = 1 / tensors[stored].reshape(())
            if torch.equal(read, multiplier) or (kind == "per-tensor" and _same_values(canonical, read)):
                continue
            self.refuse(
                name,
                canonical,
                f"the last bit of its {kind} scale {multiplier.item()!r}, which no fp32 divisor stands for,",
                "quantize the plain checkpoint for these files from disk (python -m mxquant quantize), which chooses "
                "another scale, or save for a producer that stores multipliers",
            )
        return tensors

    def config(self, weights: Mapping[str, MXTensor], ordinary: Iterable[str]) -> Documents:
        schemes: dict[tuple[str, bool], list[str]] = {}
        for name, weight in weights.items():
            schemes.setdefault((weight.format, weight.activation is not None), []).append(module_of(name))
        groups = {
            f"group_{i}": {
                "format": _NAMES[fmt],
                "targets": [_LINEAR] if len(schemes) == 1 else modules,
                "weights": _arguments(fmt, False),
                "input_activations": _arguments(fmt, "local" if fmt == "nvfp4" else True) if quantized else None,
                "output_activations": None,
            }
            for i, ((fmt, quantized), modules) in enumerate(schemes.items())
        }
        names = {_NAMES[fmt] for fmt, _ in schemes}
        config = {
            "quant_method": self.name,
            "format": names.pop() if len(names) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": sorted(ordinary),
            "kv_cache_scheme": None,
        }
        return {CONFIG: config}


def _same_values(weight: MXTensor, multiplier: Tensor) -> bool:
    """Whether the weight has the same values, in its dtype, with another per-tensor scale."""
    other = weight.rewrap(weight.operand._replace(per_tensor_scale=multiplier))
    return torch.equal(other.dequantize(), weight.dequantize())


def _divisor(multiplier: Tensor, stored: Tensor | None) -> Tensor:
    """The fp32 number [1] whose reciprocal is nearest to `multiplier`; `stored` if that is one."""
    nearest = 1 / multiplier
    around = [torch.nextafter(nearest, nearest * factor) for factor in (0, 2)]
    candidates = [*([stored.reshape(()).to(multiplier.device)] if stored is not None else []), nearest, *around]
    return next((c for c in candidates if torch.equal(1 / c, multiplier)), nearest).reshape(1).clone()


def _groups_by_target(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The group of each target. Of a target that two groups list, the last group counts."""
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise ValueError(f"config_groups is {groups!r}; it is an object of groups, each with targets and weights")
    for key, group in groups.items():
        targets = group.get("targets")
        if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
            raise ValueError(f"the targets of {key} are {targets!r}; they are a list of modules, re:... or classes")
    return {target: group for group in groups.values() for target in group["targets"]}


def _group_of(module: str, groups: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The group of a module's first target: its exact name, then regular expressions in sorted order, then "Linear".

    The order of the groups in the file does not count (`utils/match.py: match_targets`).

    NOTE: The files do not say which classes a model's modules have. Of the targets without a dot only "Linear" is taken
    for a class; another one, such as "lm_head", may be a top-level module, and means that alone.
    """
    if module in groups:
        return groups[module]
    patterns = sorted(target for target in groups if target.startswith("re:"))
    target = next((pattern for pattern in patterns if matches(pattern, module)), _LINEAR)
    if target in groups:
        return groups[target]
    raise ValueError(
        f"{module} is quantized, but is not among the targets of any group: {list(groups)}; read are names of modules, "
        f"re:... and the class {_LINEAR}"
    )


def _weight_spec(module: str, group: Mapping[str, Any], checkpoint: Checkpoint) -> WeightSpec:
    if (outputs := group.get("output_activations")) is not None:
        raise NotImplementedError(f"{module}: output_activations {outputs!r}: outputs are not quantized here")
    fmt = _format_for_bits(module, group.get("weights"))
    arguments = group.get("input_activations")
    activation, static = None, None
    if arguments is not None:
        activation = _format_for_bits(module, arguments)
        is_dynamic = arguments.get("dynamic") is True
        name = f"{module}.input_global_scale"
        if activation == "nvfp4":
            static = name if not is_dynamic or name in checkpoint.tensors else None
        elif not is_dynamic:
            raise NotImplementedError(f"{module}: static scales of {activation} activations are not read: {arguments}")
    mode = None if activation is None else _ACTIVATION_MODES[activation]
    return WeightSpec(
        name=f"{module}.weight",
        scheme=Scheme(fmt, activation, activation_scale_mode=mode, static_activation_scale=static is not None),
        qdata=f"{module}.weight" if fmt == "mxfp8_e4m3" else f"{module}.weight_packed",
        scale=f"{module}.weight_scale",
        per_tensor_scale=f"{module}.weight_global_scale" if fmt == "nvfp4" else None,
        activation_scale=static,
        scales_are_divisors=True,
    )


def _format_for_bits(module: str, arguments: Any) -> str:
    if isinstance(arguments, dict) and arguments.get("type") == "float" and arguments.get("symmetric") is not False:
        fmt = _FORMATS.get((arguments.get("num_bits"), arguments.get("group_size")))  # type: ignore[arg-type]
        if fmt is not None:
            return fmt
    raise NotImplementedError(
        f"{module} has the scheme {arguments!r}; read are float schemes of (bits, group size) in {sorted(_FORMATS)}"
    )


def _arguments(fmt: str, dynamic: bool | str) -> dict[str, Any]:
    spec = get_format(fmt)
    return {
        "num_bits": spec.element.bits,
        "type": "float",
        "strategy": "tensor_group" if spec.per_tensor else "group",
        "group_size": spec.block_size,
        "symmetric": True,
        "dynamic": dynamic,
        "scale_dtype": "torch.float8_e4m3fn" if spec.per_tensor else "torch.uint8",
    }
