"""transformers' quantizer "mxquant": it quantizes a model while it is loaded, and loads a quantized model.

It uses the hooks that transformers 5.17 to 5.24 have in common: `register_quantization_config`, `register_quantizer`,
`get_quantize_ops` for weights that are quantized on load, and `get_weight_conversions` for saved quantized weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.core_model_loading import ConversionOps, WeightConverter, rename_source_key
from transformers.integrations.accelerate import get_device
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import QuantizationConfigMixin

from mxquant.api import dequantize_, record_skips
from mxquant.backends.base import Operand
from mxquant.checkpoints.files import headers_of
from mxquant.checkpoints.native import described_in
from mxquant.config import CONFIG_FIELDS, MXConfig, resolve_mapping
from mxquant.config_hints import suggestion
from mxquant.formats import get_format
from mxquant.integrations.device_map import REMEDY, whole_state
from mxquant.integrations.sharding import refuse_inexact_shards, refuse_saved_shards
from mxquant.modules.quantize_target import Target, check_target, quantized_parameter
from mxquant.modules.sites import lineage
from mxquant.select import Selection, select_weights
from mxquant.tensor import Metadata, MXTensor, as_weight, flatten_state_dict
from mxquant.tensor.checks import check_operand
from mxquant.tensor.metadata import metadata_from_fields
from mxquant.tensor.state import SAVED_PARTS

NAME = "mxquant"
VERSION = 1


@register_quantization_config(NAME)
class MXQuantConfig(QuantizationConfigMixin):
    """The config of a quantized load: `from_pretrained(..., quantization_config=MXQuantConfig("mxfp4"))`.

    Args:
        config: what `mxquant.quantize_` takes: a config, a format's name, or a mapping. None only in a saved model,
            whose weights know their formats.
        modules_to_not_convert: modules that are skipped beside those that `quantize_` skips by default. An entry is
            matched as by transformers' `should_convert_module`: the beginning of a module's name up to a dot, its end,
            or a regular expression that matches from the start. It skips all modules inside as well. An entry that
            matches no module is refused on load.

    Raises:
        ValueError, TypeError: as `mxquant.quantize_`; `modules_to_not_convert` is no list of regular expressions.
    """

    def __init__(
        self,
        config: object = None,
        modules_to_not_convert: list[str] | None = None,
        version: int = VERSION,
        **kwargs: Any,
    ) -> None:
        kwargs.pop("quant_method", None)
        if kwargs:
            raise TypeError(f"MXQuantConfig takes config and modules_to_not_convert; got {', '.join(kwargs)} as well")
        if version != VERSION:
            raise ValueError(
                f"quantization_config of version {version!r}; this mxquant knows {VERSION}: update mxquant"
            )
        self.quant_method = NAME
        self.version = version
        self.config = None if config is None else _as_json(resolve_mapping(config))
        self.modules_to_not_convert = _checked_patterns(modules_to_not_convert)

    def mapping(self) -> dict[str, MXConfig | None]:
        """The config as a mapping from keys to configs; ValueError if there is none."""
        if self.config is None:
            raise ValueError('MXQuantConfig without a config quantizes nothing; name a format: MXQuantConfig("mxfp4")')
        return resolve_mapping(dict(self.config))


def _checked_patterns(patterns: object) -> list[str]:
    if patterns is None:
        return []
    if not isinstance(patterns, (list, tuple)) or not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise TypeError(
            f'modules_to_not_convert is a list of names such as ["up_proj", "model.layers.0"]; got {patterns!r}'
        )
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"modules_to_not_convert has {pattern!r}, which is no name and no regular expression ({error}); for a "
                f'glob, map it to None in the config: MXQuantConfig({{"linear": "mxfp4", {pattern!r}: None}})'
            ) from None
    return list(patterns)


def _as_json(mapping: Mapping[str, MXConfig | None]) -> dict[str, dict[str, Any] | None]:
    def fields(config: MXConfig) -> dict[str, Any]:
        return {"weight": config.format} | {name: getattr(config, name) for name in CONFIG_FIELDS if name != "weight"}

    return {key: None if config is None else fields(config) for key, config in mapping.items()}


@register_quantizer(NAME)
class MXQuantizer(HfQuantizer):
    """Hooks for loading and saving; see `MXQuantConfig`."""

    requires_calibration = False

    def __init__(self, quantization_config: MXQuantConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.selection = Selection([], [])
        self.targets: dict[str, Target] = {}
        self.refusal: Exception | None = None
        """The first error of a weight that was loaded, which transformers would only log."""
        self.saved: dict[str, tuple[Metadata, tuple[int, ...]]] = {}
        self.shards_check: RemovableHandle | None = None

    def validate_environment(self, device_map: Any = None, **kwargs: Any) -> None:
        """Refuse a `device_map` with modules on the disk: transformers would read them from the files, unquantized."""
        places = device_map.values() if isinstance(device_map, Mapping) else (device_map,)
        if "disk" in places:
            raise NotImplementedError(
                "device_map sends modules to the disk, where transformers keeps the tensors of the files as they are; "
                + REMEDY
            )

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: list[str] | None = None, device_map: Any = None, **kwargs: Any
    ) -> nn.Module:
        # NOTE: transformers shards the model after this hook, and reads its state dict before the first tensor.
        self.shards_check = model.register_state_dict_pre_hook(self._check_shards)
        if self.pre_quantized:
            described, _ = described_in(headers_of(checkpoint_files or []))
            for name, fields in described.items():
                metadata, shape = metadata_from_fields(fields)
                if shape is None:
                    raise ValueError(f"the metadata of {name!r} lacks its shape; save the model anew")
                self.saved[_name_in(model, name)] = (metadata, shape)
            return model
        _tie(model)
        self.selection = select_for_loading(model, self.quantization_config, device_map)
        self.targets = {site.name: target for target in self.selection.targets for site in target.sites}
        return model

    def _check_shards(self, model: nn.Module, *_: Any) -> None:
        refuse_inexact_shards(model, self.targets)
        refuse_saved_shards(model, self.saved.keys())

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
        return param_name in self.targets

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantize(self)

    def get_weight_conversions(self) -> list[WeightConverter]:
        """Merge saved parts: `X.weight.qdata`, `X.weight.scale`, ... to `X.weight`; one converter a last name."""
        attributes = sorted({name.rpartition(".")[2] for name in self.saved})
        return [
            WeightConverter([rf"(?<=\.{re.escape(a)})\.{part}$" for part in SAVED_PARTS], "", [_Rebuild(self)])
            for a in attributes
        ]

    def update_weight_conversions(self, weight_conversions: list[Any], model: nn.Module | None = None) -> list[Any]:
        """Ours come first: the model's own converters must not match the saved parts of merged weights."""
        return [*self.get_weight_conversions(), *weight_conversions]

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        if self.shards_check is not None:
            self.shards_check.remove()
        if self.refusal is not None:
            raise self.refusal
        record_skips(self.selection)
        self.selection, self.targets = Selection([], []), {}
        # Quantized stacks are saved merged: drop the conversions that would split experts again.
        vars(model)["_weight_conversions"] = []
        return model

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
        return flatten_state_dict(whole_state(model))

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True

    @property
    def quantized_element_size(self) -> float | None:
        if self.quantization_config.config is None:
            return None
        configs = [config for config in self.quantization_config.mapping().values() if config is not None]
        return max((get_format(config.format).bits_per_weight / 8 for config in configs), default=None)

    def _dequantize(self, model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
        dequantize_(model)
        return model if dtype is None else model.to(dtype)

    def remove_quantization_config(self, model: nn.Module) -> None:
        super().remove_quantization_config(model)
        # NOTE: transformers 5.17 keeps an empty list, with which dequantized experts would be saved merged.
        vars(model).pop("_weight_conversions", None)


def _tie(model: nn.Module) -> None:
    """Tie weights before they are loaded, so that a key for one of their names means both. transformers ties after."""
    for name, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        path, _, attribute = name.rpartition(".")
        model.get_submodule(path)._parameters[attribute] = model.get_parameter(source)


def select_for_loading(model: nn.Module, config: MXQuantConfig, device_map: Any = None) -> Selection:
    """Which parameters of a model on the meta device are quantized. All is checked but the values, which are not there.

    Args:
        device_map: where transformers loads the modules to; None: to the CPU. With a name such as "auto" the places are
            not known yet, and named backends are checked when the weights are there.
    """
    skipped = _skipped_modules(model, config.modules_to_not_convert)
    selection = select_weights(model, config.mapping(), lambda module, name: name not in skipped)
    if not selection.targets:
        raise ValueError(
            f"the config selects no weight of {type(model).__name__} (modules_to_not_convert is "
            f"{config.modules_to_not_convert!r}); name its linears or experts, or leave the quantization out"
        )
    for target in selection.targets:
        if target.config.gptq is not None:
            raise ValueError(
                f'{target.name}: algorithm="gptq" needs data to calibrate on, which there is none of while weights are '
                'loaded; load the model and call mxquant.quantize_(model, config, calibration=batches), or use "rtn"'
            )
        is_placed = device_map is None or isinstance(device_map, Mapping)
        device = torch.device(get_device(device_map, target.name, valid_torch_device=True)) if is_placed else None
        check_target(target, device=device, has_values=False)
    return selection


def _skipped_modules(model: nn.Module, patterns: list[str]) -> set[str]:
    """The modules that `modules_to_not_convert` matches, and those in them."""
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    meant: set[str] = set()
    for pattern in patterns:
        found = {name for name in names if not should_convert_module(name, [pattern])}
        if not found:
            near = suggestion(pattern, {name.rpartition(".")[2] for name in names} | set(names))
            raise ValueError(
                f"modules_to_not_convert has {pattern!r}, which matches no module of {type(model).__name__}; give the "
                f"beginning or end of a module's name, or a regular expression{near}"
            )
        meant |= found
    return {name for name in names if not meant.isdisjoint(lineage(name))}


class _Quantize(ConversionOps):
    """Quantizes a loaded weight, experts already merged, on the device of its module."""

    def __init__(self, hf_quantizer: MXQuantizer) -> None:
        self.hf_quantizer = hf_quantizer

    def convert(self, input_dict: dict[str, Any], **kwargs: Any) -> dict[str, Tensor]:
        return {name: self._quantized(name, value) for name, value in input_dict.items()}

    def _quantized(self, name: str, value: Any) -> Tensor:
        weight: Tensor = value[0] if isinstance(value, list) else value
        target = self.hf_quantizer.targets.get(name)
        if target is None:
            return weight
        try:
            return quantize_loaded(target, weight)
        except Exception as error:
            # NOTE: transformers would log a traceback and raise an error of its own. This one is raised after loading.
            self.hf_quantizer.refusal = self.hf_quantizer.refusal or error
            return weight


def quantize_loaded(target: Target, weight: Tensor) -> nn.Parameter:
    """The quantized parameter that a loaded weight becomes. It raises what `mxquant.quantize_` does."""
    check_target(target, weight)
    return quantized_parameter(target, weight)


def _name_in(model: Any, saved: str) -> str:
    """The model's name of a saved parameter.

    NOTE: a model with a head saves its body's names with `base_model_prefix`, a body alone without. Each loads the
    other's files.
    """
    name, _ = rename_source_key(saved, [], [], model.base_model_prefix, model.state_dict())
    return str(name)


class _Rebuild(ConversionOps):
    """Builds a quantized weight from its saved parts."""

    def __init__(self, hf_quantizer: MXQuantizer) -> None:
        self.hf_quantizer = hf_quantizer

    def convert(
        self, input_dict: dict[str, Any], full_layer_name: str, model: nn.Module, **kwargs: Any
    ) -> dict[str, Tensor]:
        found = {pattern.rpartition(r"\.")[2].rstrip("$"): tensors for pattern, tensors in input_dict.items()}
        parts = {part: tensors[0] if isinstance(tensors, list) else tensors for part, tensors in found.items()}
        if full_layer_name not in self.hf_quantizer.saved or not {"qdata", "scale"} <= parts.keys():
            raise ValueError(
                f"{full_layer_name!r} has {sorted(parts)} but needs qdata, scale and metadata; save it anew"
            )
        metadata, shape = self.hf_quantizer.saved[full_layer_name]
        operand = Operand(*(parts.get(part) for part in SAVED_PARTS))  # type: ignore[arg-type]
        weight = MXTensor(check_operand(operand, metadata, shape), metadata, shape)
        cast = weight.to(model.get_parameter(full_layer_name).dtype)
        assert isinstance(cast, MXTensor)
        return {full_layer_name: nn.Parameter(as_weight(cast), requires_grad=False)}
