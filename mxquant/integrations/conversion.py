"""Which parameter of a transformers model each tensor of a checkpoint belongs to, and how experts are merged.

transformers knows it, for each class of models: renamings and converters (`transformers.conversion_mapping`). Tools
that take experts apart name them gate_proj, up_proj and down_proj, whatever the checkpoint of the family calls them:
`role_names` leads those names to the family's.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from mxquant.checkpoints.load import Content

CONVERSIONS = "_mxquant_conversions"
"""The attribute of a model that `from_pretrained` made: the conversions by which transformers loaded it, without those
of `ROLES`."""
ROLES = "_mxquant_expert_names"
"""The attribute of such a model: `role_names` of its checkpoint."""
_TAKEN_APART = re.compile(r"\.experts\.\d+\.(gate_proj|up_proj|down_proj)\.weight$")
_ROLES = {"gate_up_proj": ("gate_proj", "up_proj"), "up_proj": ("up_proj",), "down_proj": ("down_proj",)}


@dataclass
class Source:
    """What a parameter is loaded from."""

    names: list[str] = field(default_factory=list)
    patterns: list[str] = field(default_factory=list)
    """Which source pattern of the converter each of `names` matched."""
    converter: WeightConverter | None = None
    """None: the one tensor as it is."""


def model_class(config: Any) -> Any:
    """The class that the config names, or that of causal language models."""
    for architecture in getattr(config, "architectures", None) or []:
        if hasattr(transformers, architecture):
            return getattr(transformers, architecture)
    return AutoModelForCausalLM


def plain_config(content: Content) -> Any:
    """The model's config without what it says of quantization.

    Raises:
        ValueError: a model that transformers does not know by itself.
    """
    if content.rows:  # a config of transformers that is in no file
        return AutoConfig.for_model(**content.checkpoint.config)
    path, kind = content.checkpoint.path, content.checkpoint.config.get("model_type")
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


def skeleton(config: Any) -> nn.Module:
    """The model without memory: every parameter on the meta device."""
    cls = model_class(config)
    with torch.device("meta"):
        return cls.from_config(config) if cls is AutoModelForCausalLM else cls(config)


def key_mapping(roles: Mapping[str, str]) -> dict[str, str]:
    """`role_names` as transformers' `from_pretrained` takes renamings."""
    return {_named(role, r"(\d+)"): rf".experts.\1.{leaf}.weight" for role, leaf in roles.items()}


def with_role_names(name: str, roles: Mapping[str, str]) -> str:
    """The name that a tensor had before `key_mapping`."""
    for role, leaf in roles.items():
        renamed = re.sub(_named(leaf, r"(\d+)") + "$", rf".experts.\1.{role}.weight", name)
        if renamed != name:
            return renamed
    return name


def _named(leaf: str, number: str) -> str:
    return rf"\.experts\.{number}\.{leaf}\.weight"


def loading_conversions(conversions: Iterable[Any] | None, roles: Mapping[str, str]) -> list[Any] | None:
    """The conversions that a model was loaded by, but those of `key_mapping`."""
    if conversions is None:
        return None
    ours = set(key_mapping(roles))
    return [entry for entry in conversions if not ours & set(entry._original_source_patterns)]


def role_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """For experts that were taken apart: what the checkpoints of this family call each role; empty where it is that."""
    return _family_roles(model) if any(_TAKEN_APART.search(name) for name in names) else {}


def _family_roles(model: nn.Module) -> dict[str, str]:
    found: dict[str, str] = {}
    for converter in get_model_conversion_mapping(model):
        if not isinstance(converter, WeightConverter) or not _merges(converter):
            continue
        roles = _ROLES.get(converter.target_patterns[0].rpartition(".")[2], ())
        for role, source in zip(roles, converter.source_patterns, strict=len(roles) == len(converter.source_patterns)):
            leaf = source.removesuffix(".weight").rpartition(".")[2]
            if leaf != role:
                found[role] = leaf
    return found


def _merges(converter: WeightConverter) -> bool:
    return any(isinstance(operation, MergeModulelist) for operation in converter.operations)


def sources_of(model: nn.Module, names: Iterable[str]) -> dict[str, Source]:
    """For each parameter of `model` the tensors of a checkpoint that it is made of, in the order of their numbers.

    Args:
        names: of the tensors in the checkpoint.

    Raises:
        ValueError: a tensor belongs nowhere, or a parameter has none.
    """
    names = sorted(names, key=dot_natural_key)
    mapping = [WeightRenaming(k, v) for k, v in key_mapping(role_names(model, names)).items()]
    mapping += get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    expected = model.state_dict()
    found: dict[str, Source] = {}
    superfluous, covered = [], set()
    for name in names:
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, expected)
        if target not in expected and name in expected:
            target, pattern = name, None
        if target not in expected:
            superfluous.append(name)
            continue
        source = found.setdefault(target, Source())
        source.names.append(name)
        covered.add(target)
        if pattern is not None:
            source.converter = next(c for c in converters if pattern in c.source_patterns)
            source.patterns.append(pattern)
            first, *others = source.converter.target_patterns
            covered.update(target.replace(first, other) for other in others)
    _check_names(model, set(expected), covered, superfluous)
    for target, source in found.items():
        _check_experts(target, source, expected[target].shape[0] if expected[target].dim() else 0)
    return found


def check_shapes(model: nn.Module, content: Content, sources: Mapping[str, Source]) -> None:
    """Compare tensors that are loaded as they are with the model; merged ones are compared when they are.

    Raises:
        ValueError: one has another shape.
    """
    expected = model.state_dict()
    for target, source in sources.items():
        shape = tuple(expected[target].shape)
        if source.converter is None and content.shape(source.names[0]) != shape:
            raise ValueError(
                f"{source.names[0]!r} has shape {content.shape(source.names[0])}, the model's {target!r} {shape}; "
                "config.json and the weights are not of one model"
            )


def _check_experts(target: str, source: Source, experts: int) -> None:
    """Refuse a stack of which an expert is missing."""
    if source.converter is None or not _merges(source.converter):
        return
    for pattern in source.converter.source_patterns:
        names = [n for n, p in zip(source.names, source.patterns, strict=True) if p == pattern]
        if len(names) != experts:
            raise ValueError(
                f"{target!r} stacks {experts} experts, but the checkpoint has {len(names)} tensors for {pattern!r}; "
                "download the files that hold the others"
            )


def _check_names(model: nn.Module, expected: set[str], covered: set[str], superfluous: list[str]) -> None:
    ignored = list(_patterns(model, "_keys_to_ignore_on_load_unexpected"))
    superfluous = [name for name in superfluous if not any(re.search(pattern, name) for pattern in ignored)]
    if superfluous:
        raise ValueError(
            f"{len(superfluous)} tensors of the checkpoint belong to no parameter of {type(model).__name__}, such as "
            f"{superfluous[0]!r}; it is the checkpoint of another model, or its experts are not merged in this family"
        )
    optional = list(_patterns(model, "_keys_to_ignore_on_load_missing"))
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    missing = [
        name
        for name in sorted(expected - covered)
        if not any(re.search(pattern, name) for pattern in optional)
        and tied.get(name) not in covered
        and not any(other in covered for other, first in tied.items() if first == name)
    ]
    if missing:
        raise ValueError(
            f"the checkpoint lacks {len(missing)} tensors of {type(model).__name__}, such as {missing[0]!r}; "
            "download the files that hold them"
        )


def by_family(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters under the names that checkpoints of the model's family have, merged experts taken apart."""
    return _reverted(model, state, None)


def by_modules(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters under the names of their modules; merged experts each with a gate_proj, up_proj and down_proj."""
    mapping = get_model_conversion_mapping(model)
    merging = [entry for entry in mapping if isinstance(entry, WeightConverter) and _merges(entry)]
    roles = _family_roles(model)
    return {with_role_names(name, roles): tensor for name, tensor in _reverted(model, state, merging).items()}


def as_loaded(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters under the names that `from_pretrained` found them by."""
    roles = vars(model).get(ROLES) or {}
    reverted = _reverted(model, state, vars(model).get(CONVERSIONS))
    return {with_role_names(name, roles): tensor for name, tensor in reverted.items()}


def _reverted(model: Any, state: Mapping[str, Tensor], conversions: list[Any] | None) -> dict[str, Tensor]:
    """What transformers makes of parameters by the reverse of conversions; None: those of the family."""
    attributes = vars(model)
    seen = attributes.pop("_weight_conversions", None)
    if conversions is not None:
        attributes["_weight_conversions"] = conversions
    try:
        reverted: dict[str, Tensor] = revert_weight_conversion(model, dict(state))
        return reverted
    finally:
        attributes.pop("_weight_conversions", None)
        if seen is not None:
            attributes["_weight_conversions"] = seen


def _patterns(model: nn.Module, attribute: str) -> Iterator[str]:
    for module in model.modules():
        yield from getattr(module, attribute, None) or ()
