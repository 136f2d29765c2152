"""Which parameter of a transformers model each tensor of a checkpoint belongs to, and how experts are merged.

For each model class, transformers has renamings and converters (`transformers.conversion_mapping`). Some tools split
experts and name them gate_proj, up_proj and down_proj, whatever checkpoints of the model's family call them.
`projection_names` maps these names to the family's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

CONVERSIONS = "_mxquant_conversions"
"""The attribute of a model from `from_pretrained` that holds the conversions it was loaded by, without those of
`PROJECTION_NAMES`."""
PROJECTION_NAMES = "_mxquant_expert_names"
"""The attribute of such a model that holds `projection_names` of its checkpoint."""
_SPLIT_EXPERT = re.compile(r"\.experts\.\d+\.(gate_proj|up_proj|down_proj)\.weight$")
_PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "up_proj": ("up_proj",), "down_proj": ("down_proj",)}


@dataclass
class Source:
    """The tensors of a checkpoint that a parameter is loaded from."""

    names: list[str] = field(default_factory=list)
    patterns: list[str] = field(default_factory=list)
    """For each of `names`, the source pattern of the converter that it matched."""
    converter: WeightConverter | None = None
    """None: the parameter is the one tensor, unchanged."""

    def by_pattern(self) -> dict[str, list[str]]:
        """The names that matched each source pattern; none without a converter."""
        if self.converter is None:
            return {}
        found: dict[str, list[str]] = {pattern: [] for pattern in self.converter.source_patterns}
        for name, pattern in zip(self.names, self.patterns, strict=True):
            found[pattern].append(name)
        return found


def key_mapping(projections: Mapping[str, str]) -> dict[str, str]:
    """`projection_names` as transformers' `from_pretrained` takes renamings."""
    return {_named(projection, r"(\d+)"): rf".experts.\1.{leaf}.weight" for projection, leaf in projections.items()}


def with_projection_names(name: str, projections: Mapping[str, str]) -> str:
    """The inverse of `key_mapping` for one tensor's name."""
    for projection, leaf in projections.items():
        renamed = re.sub(_named(leaf, r"(\d+)") + "$", rf".experts.\1.{projection}.weight", name)
        if renamed != name:
            return renamed
    return name


def _named(leaf: str, number: str) -> str:
    return rf"\.experts\.{number}\.{leaf}\.weight"


def loading_conversions(conversions: Iterable[Any] | None, projections: Mapping[str, str]) -> list[Any] | None:
    """The conversions that a model was loaded by, without those of `key_mapping`."""
    if conversions is None:
        return None
    ours = set(key_mapping(projections))
    return [entry for entry in conversions if not ours & set(entry._original_source_patterns)]


def projection_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """What checkpoints of the model's family call gate_proj, up_proj and down_proj of split experts.

    Only names that differ are listed; none if `names` has no expert under those names.
    """
    return _family_projection_names(model) if any(_SPLIT_EXPERT.search(name) for name in names) else {}


def _family_projection_names(model: nn.Module) -> dict[str, str]:
    found: dict[str, str] = {}
    for converter in get_model_conversion_mapping(model):
        if not isinstance(converter, WeightConverter) or not _merges(converter):
            continue
        projections = _PROJECTIONS.get(converter.target_patterns[0].rpartition(".")[2], ())
        for projection, source in zip(projections, converter.source_patterns, strict=False):
            leaf = source.removesuffix(".weight").rpartition(".")[2]
            if leaf != projection:
                found[projection] = leaf
    return found


def _merges(converter: WeightConverter) -> bool:
    return any(isinstance(operation, MergeModulelist) for operation in converter.operations)


def sources_of(model: nn.Module, names: Iterable[str]) -> dict[str, Source]:
    """For each parameter of `model`, which of the tensors `names` it is loaded from, ordered by numbers in their names.

    Raises:
        ValueError: a tensor belongs to no parameter, or a parameter has no tensor.
    """
    names = sorted(names, key=dot_natural_key)
    mapping = [WeightRenaming(k, v) for k, v in key_mapping(projection_names(model, names)).items()]
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


def _check_experts(target: str, source: Source, experts: int) -> None:
    """Refuse a stack that lacks an expert."""
    if source.converter is None or not _merges(source.converter):
        return
    for pattern, names in source.by_pattern().items():
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


def split_experts(
    model: nn.Module, state: dict[str, Tensor], names: Literal["parameter", "family", "module"]
) -> dict[str, Tensor]:
    """Parameters under the names of `Producer.weight_names`, with merged experts split where the names say so."""
    if names == "parameter":
        return state
    if names == "family":
        return _reverted(model, state, None)
    mapping = get_model_conversion_mapping(model)
    merging = [entry for entry in mapping if isinstance(entry, WeightConverter) and _merges(entry)]
    projections = _family_projection_names(model)
    return {
        with_projection_names(name, projections): tensor for name, tensor in _reverted(model, state, merging).items()
    }


def as_loaded(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters under the names that they were loaded from by `from_pretrained`."""
    projections = vars(model).get(PROJECTION_NAMES) or {}
    reverted = _reverted(model, state, vars(model).get(CONVERSIONS))
    return {with_projection_names(name, projections): tensor for name, tensor in reverted.items()}


def _reverted(model: Any, state: Mapping[str, Tensor], conversions: list[Any] | None) -> dict[str, Tensor]:
    """Parameters after transformers reverted `conversions`; None: those of the model's family."""
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
