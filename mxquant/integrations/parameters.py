"""A checkpoint by the parameters of its transformers model: experts merged, each parameter read on demand."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from mxquant.checkpoints.files import Reader
from mxquant.checkpoints.load import Content


def read_parameter(name: str, source: Any, content: Content, model: nn.Module) -> Tensor:
    """Read parameter `name`. Where its family has conversions, several tensors are merged, and no file stays mapped.

    Args:
        source: the parameter's entry in `conversion.sources_of`.
        model: the model of the checkpoint, on the meta device.

    Raises:
        ValueError: the merged tensor has another shape than the model's.
        NotImplementedError: the family makes several parameters of one tensor.
    """
    reader = Reader(content.checkpoint)
    if source.converter is None:
        return content.read(source.names[0], reader)
    converter = copy.deepcopy(source.converter)
    for file_name, pattern in zip(source.names, source.patterns, strict=True):
        tensor = content.read(file_name, reader)
        converter.add_tensor(name, file_name, pattern, lambda tensor=tensor: tensor)
    merged = converter.convert(name, model=model, config=model.config)
    if set(merged) != {name}:
        raise NotImplementedError(
            f"{sorted(merged)} are made of one tensor in the files ({source.names[0]}); load the model with "
            "MXQuantConfig and save it instead"
        )
    value: Tensor = merged[name][0] if isinstance(merged[name], list) else merged[name]
    expected = tuple(model.get_parameter(name).shape)
    if tuple(value.shape) != expected:
        raise ValueError(
            f"{name!r}, merged of {len(source.names)} tensors, has shape {tuple(value.shape)}, in the model "
            f"{expected}; config.json and the weights are not of one model"
        )
    return value


class Parameters:
    """A checkpoint by its model's names, however its files name and split the tensors. Made by `parameters_of`."""

    def __init__(self, content: Content, model: nn.Module, sources: Mapping[str, Any]) -> None:
        self._content, self._model, self._sources = content, model, sources

    @property
    def names(self) -> list[str]:
        return list(self._sources)

    def shape(self, name: str) -> tuple[int, ...]:
        source = self._sources[name]
        if source.converter is None:
            return self._content.shape(source.names[0])
        return tuple(self._model.get_parameter(name).shape)

    def nbytes(self, name: str) -> int:
        """Bytes in the files."""
        return sum(map(self._content.nbytes, self._sources[name].names))

    def read_alone(self, name: str) -> Tensor:
        return read_parameter(name, self._sources[name], self._content, self._model)


def parameters_of(content: Content) -> Parameters | None:
    """The checkpoint by its model's names; None if transformers is not installed or does not know the model.

    Raises:
        ValueError: the tensors do not fit the model.
        NotImplementedError: the layout of such a model is unknown.
    """
    if importlib.util.find_spec("transformers") is None:
        return None
    from transformers import CONFIG_MAPPING

    from mxquant.integrations import conversion

    content = content.as_in_transformers()
    if content.checkpoint.config.get("model_type") not in CONFIG_MAPPING:
        return None
    _, model, sources = conversion.skeleton_of(content)
    return Parameters(content, model, sources)
