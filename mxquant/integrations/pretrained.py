"""`from_pretrained`: a checkpoint of any producer as a transformers model whose weights are its own bytes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from mxquant.checkpoints.files import Reader
from mxquant.checkpoints.load import Content, read_content
from mxquant.checkpoints.provenance import PROVENANCE, Provenance
from mxquant.integrations.device_map import without_disk
from mxquant.integrations.extra import needing_transformers
from mxquant.modules.quantize_target import parameter_like
from mxquant.modules.sites import SKIP_REASON
from mxquant.tensor import MXTensor, as_weight

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from mxquant.integrations.parameters import Parameters


_MEANINGLESS = {
    "config", "key_mapping", "output_loading_info", "quantization_config", "revision", "state_dict", "subfolder",
    "use_safetensors", "variant", "weights_only",
}  # fmt: skip
"""Options of transformers' `from_pretrained` that would have no effect here, or clash with those passed on."""


def from_pretrained(
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str = "auto",
    device_map: Any = None,
    backend: str = "auto",
    **options: Any,
) -> PreTrainedModel:
    """Load a checkpoint, of any producer that `load_state` reads or unquantized, as a transformers model.

    Codes and scales are the file's own. Experts that the files hold one by one are merged as the model's class has
    them. Linears and experts quantize their activations as the checkpoint's config says. Weights that are not merged
    are views of the memory-mapped files, which must not change while the model lives.

    Args:
        path: the folder of the checkpoint, with its config.json. Nothing is downloaded.
        dtype: of the model, and of the values that quantized weights stand for; "auto": by the config. Its former name
            in transformers, `torch_dtype`, is accepted too.
        device_map: as in transformers' `from_pretrained`. "disk" means the checkpoint's own mapped files, and "auto"
            counts a quantized weight as one of `dtype`.
        options: as in transformers' `from_pretrained`, except those that say which files to read and how.
        backend: computes the matmuls: "auto", or a name in `list_backends()`.

    Raises:
        FileNotFoundError: there is no checkpoint, or no config.json.
        ValueError: damaged, missing or superfluous tensors, found before anything large is allocated; or the backend
            cannot compute the weights.
        NotImplementedError: an unknown producer, a scheme that mxquant does not compute, or merged experts on "disk".
        TypeError: both `dtype` and `torch_dtype`, or an option that has no meaning here.
        ImportError: transformers is not installed.
    """
    with needing_transformers():
        from mxquant.integrations.conversion import key_mapping, projection_names
        from mxquant.integrations.parameters import parameters_of

    if meaningless := sorted(_MEANINGLESS & options.keys()):
        raise TypeError(
            f"from_pretrained has no use for {', '.join(meaningless)}: it reads the folder that path names, as its own "
            "config.json says; give the folder, and change the loaded model"
        )
    dtype = _dtype_of(dtype, options)
    parameters = parameters_of(read_content(path))
    content, sources = parameters.content, parameters.sources
    _check_static_scales(content, sources)
    projections = projection_names(parameters.model, content.names)
    device_map, max_memory = without_disk(device_map, options.pop("max_memory", None), sources)
    options |= {"device_map": device_map, "max_memory": max_memory, "key_mapping": key_mapping(projections) or None}
    loaded = _load(parameters, content.dtype if dtype == "auto" else dtype, options)
    _serve(loaded, backend)
    _load_generation_config(loaded, content.checkpoint.path)
    if content.quantized:
        _mark(loaded, content, projections)
    return loaded


def _dtype_of(dtype: torch.dtype | str, options: dict[str, Any]) -> torch.dtype | str:
    """`dtype`, or the option `torch_dtype`, which transformers would ignore beside `dtype`."""
    if "torch_dtype" not in options:
        return dtype
    former = options.pop("torch_dtype")
    if dtype not in ("auto", former):
        raise TypeError(f"dtype={dtype!r} and torch_dtype={former!r} are two names of one thing; give dtype alone")
    return "auto" if former is None else cast("torch.dtype | str", former)


def _load(parameters: Parameters, dtype: torch.dtype | str, options: dict[str, Any]) -> PreTrainedModel:
    """Let transformers load the tensors one by one, and check that it placed each."""
    cls: Any = type(parameters.model)
    state = _lazy_state(parameters.content, parameters.sources)
    with _one_at_a_time():
        loaded, info = cls.from_pretrained(
            None, config=parameters.config, state_dict=state, dtype=dtype, output_loading_info=True, **options
        )
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if found := info.get(what):
            some = sorted(map(str, found))[:3]
            raise ValueError(f"transformers loaded the checkpoint with {what}: {', '.join(some)}; it is damaged")
    return cast("PreTrainedModel", loaded)


def _mark(model: Any, content: Content, projections: dict[str, str]) -> None:
    """Set the attributes that saving the model needs."""
    from mxquant.integrations.conversion import CONVERSIONS, PROJECTION_NAMES, loading_conversions
    from mxquant.integrations.transformers import MXQuantConfig, MXQuantizer

    model.config.quantization_config = MXQuantConfig()
    model.hf_quantizer = MXQuantizer(model.config.quantization_config, pre_quantized=True)
    model.is_quantized, model.quantization_method = True, "mxquant"
    # NOTE: transformers' own `save_pretrained` must not split merged experts, so it finds no conversions.
    conversions = loading_conversions(vars(model).get("_weight_conversions"), projections)
    remembered = {PROVENANCE: Provenance.of(content), CONVERSIONS: conversions, PROJECTION_NAMES: projections}
    vars(model).update(remembered | {"_weight_conversions": []})


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Switch off transformers' loading threads.

    NOTE: reading ahead gains nothing with mapped files, and would map all experts before the first are merged.
    """
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class _Lazy:
    """A tensor that is read when transformers indexes it, like a slice of a safetensors file."""

    def __init__(self, content: Content, name: str, group: _Group) -> None:
        self._content, self._name, self._group = content, name, group

    def __getitem__(self, index: Any) -> Tensor:
        return self._content.read(self._name, self._group.reader())[index]


class _Group:
    """Tensors that are merged to one parameter. Once the last is read, their files are unmapped and the pages freed."""

    def __init__(self, content: Content, count: int) -> None:
        self._content, self._left = content, count
        self._reader: Reader | None = None

    def reader(self) -> Reader:
        reader = self._reader or Reader(self._content.checkpoint)
        self._left -= 1
        self._reader = reader if self._left else None
        return reader


def _lazy_state(content: Content, sources: Mapping[str, Any]) -> dict[str, _Lazy]:
    state: dict[str, _Lazy] = {}
    shared = _Group(content, sum(source.converter is None for source in sources.values()))
    for source in sources.values():
        group = shared if source.converter is None else _Group(content, len(source.names))
        state |= {name: _Lazy(content, name, group) for name in source.names}
    return state


def _check_static_scales(content: Content, sources: Mapping[str, Any]) -> None:
    """Refuse different static activation scales of matrices that are merged to one, such as an expert's gate and up."""
    reader = Reader(content.checkpoint)
    for target, source in sources.items():
        for names in zip(*source.by_pattern().values(), strict=False):
            specs = [content.quantized.get(name) for name in names]
            scales = [reader.read(s.activation_scale).item() for s in specs if s is not None and s.activation_scale]
            if len(set(scales)) > 1:
                raise NotImplementedError(
                    f"{' and '.join(names)} have different static activation scales {scales}, but are one matrix of "
                    f"{target!r} here and see one input; calibrate them together, or edit the file to have one scale"
                )


def _serve(model: nn.Module, backend: str) -> None:
    """Give each quantized weight to its backend, tied ones once. Note for `summary` why others are not quantized."""
    served: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for attribute, parameter in module._parameters.items():
            if parameter is None:
                continue
            if not isinstance(parameter, MXTensor):
                if parameter.dim() >= 2:
                    module.__dict__.setdefault(SKIP_REASON, {})[attribute] = "not quantized in the checkpoint"
                continue
            if id(parameter) not in served:
                weight = as_weight(parameter, backend)
                served[id(parameter)] = parameter_like(parameter, weight, requires_grad=False)
            module._parameters[attribute] = served[id(parameter)]


def _load_generation_config(model: Any, folder: Path) -> None:
    from transformers import GenerationConfig

    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    model.name_or_path = model.config.name_or_path = os.fspath(folder)
