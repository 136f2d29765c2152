"""A checkpoint by the parameters of its transformers model: experts merged, each parameter read on demand."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from mxquant.checkpoints.files import Reader
from mxquant.checkpoints.load import Content
from mxquant.integrations.conversion import Source, sources_of

_FEW_LAYERS = 128
"""Built in any case: layers may share their tensors."""
_LAYER_KEYS = ("n_layer", "depth")
"""Numbers of layers under keys that do not end with "layers"."""


@dataclass(frozen=True)
class Parameters:
    """A checkpoint by its model's names, however its files name and split the tensors. Made by `parameters_of`."""

    content: Content
    config: Any
    """transformers' config, without quantization."""
    model: transformers.PreTrainedModel
    """On the meta device."""
    sources: dict[str, Source]
    """What each parameter is loaded from."""

    @property
    def names(self) -> list[str]:
        return list(self.sources)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.model.get_parameter_or_buffer(name).shape)

    def nbytes(self, name: str) -> int:
        """Bytes in the files."""
        return sum(map(self.content.nbytes, self.sources[name].names))

    def read_alone(self, name: str) -> Tensor:
        """Read one parameter. One that is merged from several tensors keeps no file mapped."""
        source, reader = self.sources[name], Reader(self.content.checkpoint)
        if source.converter is None:
            return self.content.read(source.names[0], reader)
        converter = copy.deepcopy(source.converter)
        for file_name, pattern in zip(source.names, source.patterns, strict=True):
            tensor = self.content.read(file_name, reader)
            converter.add_tensor(name, file_name, pattern, lambda tensor=tensor: tensor)
        merged = converter.convert(name, model=self.model, config=self.model.config)
        if set(merged) != {name}:
            raise NotImplementedError(
                f"{sorted(merged)} are made of one tensor in the files ({source.names[0]}); load the model with "
                "MXQuantConfig and save it instead"
            )
        value: Tensor = merged[name][0] if isinstance(merged[name], list) else merged[name]
        if tuple(value.shape) != self.shape(name):
            raise ValueError(
                f"{name!r}, merged of {len(source.names)} tensors, has shape {tuple(value.shape)}, in the model "
                f"{self.shape(name)}; config.json and the weights are not of one model"
            )
        return value


def parameters_of(content: Content) -> Parameters:
    """Build the model of a checkpoint on the meta device and assign the checkpoint's tensors to its parameters.

    Raises:
        FileNotFoundError: there is no config.json.
        ValueError: transformers does not know the model, or config.json has values that it builds no model with; or
            tensors and parameters do not match.
        NotImplementedError: the layout of such a model is unknown.
    """
    if not content.checkpoint.config:
        raise FileNotFoundError(
            f"{content.checkpoint.path} has no config.json to build a model from; get it (load_state needs none)"
        )
    content = content.as_in_transformers()
    config, model = _config_and_model(content)
    parameters = Parameters(content, config, model, sources_of(model, content.names))
    for name, source in parameters.sources.items():
        shape = parameters.shape(name)
        if source.converter is None and content.shape(source.names[0]) != shape:
            raise ValueError(
                f"{source.names[0]!r} has shape {content.shape(source.names[0])}, the model's {name!r} {shape}; "
                "config.json and the weights are not of one model"
            )
    return parameters


def _config_and_model(content: Content) -> tuple[Any, transformers.PreTrainedModel]:
    """The plain config, and the model on the meta device.

    NOTE: configs are untrusted. transformers' classes fail with errors of any type at values that no model has.
    """
    _check_layer_counts(content)
    try:
        config = _plain_config(content)
        with torch.device("meta"):
            cls = _named_class(content.checkpoint.config)
            return config, AutoModelForCausalLM.from_config(config) if cls is None else cls(config)
    except (ImportError, NotImplementedError):
        raise
    except Exception as error:
        raise ValueError(
            f"transformers makes no model of config.json of {content.checkpoint.path} "
            f"({type(error).__name__}: {error}); get it anew"
        ) from error


def _named_class(config: dict[str, Any]) -> Any:
    """The first class of `architectures` that transformers has; None: the causal language model of the model type."""
    names = config.get("architectures")
    for name in names if isinstance(names, list) else []:
        cls = getattr(transformers, name, None) if isinstance(name, str) else None
        if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel):
            return cls
    return None


def _check_layer_counts(content: Content) -> None:
    """Refuse a number of layers far above that of the tensors, before transformers builds each."""
    most = max(_FEW_LAYERS, len(content.names))
    for config in _objects(content.checkpoint.config):
        for key, value in config.items():
            if (key.endswith("layers") or key in _LAYER_KEYS) and isinstance(value, (int, float)) and value > most:
                raise ValueError(
                    f"config.json of {content.checkpoint.path} has {key} {value!r}, more than the checkpoint's "
                    f"{len(content.names)} tensors; get it anew"
                )


def _objects(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A config and those inside it, however deep."""
    left = [config]
    while left:
        yield (config := left.pop())
        left += [value for value in config.values() if isinstance(value, dict)]


def _plain_config(content: Content) -> Any:
    """The model's config without its quantization; ValueError if transformers has no code of its own for the model."""
    if content.rows:  # the config was translated and is in no file
        return AutoConfig.for_model(**content.checkpoint.config)
    path, kind = content.checkpoint.path, content.checkpoint.config.get("model_type")
    if kind is None:
        raise ValueError(
            f"config.json of {path} names no model_type: it was saved without a model's config. Read it with "
            "mxquant.load_state, or save it by save_state(..., source=folder of the model)"
        )
    if kind not in CONFIG_MAPPING:
        raise ValueError(
            f"config.json of {path} is of model_type {kind!r}, which transformers {transformers.__version__} does not "
            "know; update transformers (code that lies beside the weights is never run)"
        )
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    for holder in (config, config.get_text_config()):
        with contextlib.suppress(AttributeError):
            del holder.quantization_config
    return config
