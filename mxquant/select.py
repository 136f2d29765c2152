"""Which parameters are quantized, with which config, and why the others are not. Nothing is changed here.

Every parameter of two or more dimensions becomes either a `Target` or a `Skip` with its reason.

The keys of a mapping:

- "linear" and "moe" are kinds: the weights of `nn.Linear` modules (and of transformers' `Conv1D`), and stacked experts.
  They are always kinds. A module that is itself called "linear" is named by "re:linear".
- A parameter's name means that parameter. A module's name means all below it.
- A pattern means every parameter or module whose whole name it matches, and all below such a module. It is a glob
  ("*.q_proj", with `*`, `?` and `[...]` as in `fnmatch`; `*` crosses dots), or "re:" and a regular expression.

The most specific key wins: an exact parameter before an exact module before a pattern before a kind. Of two exact
modules the longer name wins, of two patterns the longer text. Patterns of equal length that disagree are an error. Tied
weights are one parameter: the keys for its names compete in the same order, and keys of one level must agree.

A config that is given alone means both kinds, whichever of them the model has. It leaves experts of unknown layout as
they are; "moe" asks for them.

MoE routers, embeddings and output embeddings are skipped unless a key names them: by their exact name, or by a pattern
that would not match if they were called something else ("*head" names lm_head; "model.layers.*" no router).
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from mxquant.config import CONFIG_FIELDS, EVERY_KIND, KINDS, MXConfig
from mxquant.config_hints import FIELDS_ELSEWHERE, suggestion
from mxquant.modules.quantize_target import Target
from mxquant.modules.sites import Site, TiedSites, find_sites, join, lineage

FilterFn = Callable[[nn.Module, str], bool]

_KIND, _PATTERN, _MODULE, _PARAMETER = range(1, 5)
FILTERED = "filter_fn"
"""The reason of a skip where a key selects a weight and the filter does not."""
_UNSELECTED = "no key of the config selects it"


@dataclass(frozen=True, eq=False)
class Skip(TiedSites):
    """A parameter that stays as it is."""

    reason: str

    @property
    def is_overlooked_experts(self) -> bool:
        """Whether these are experts that no key says to skip."""
        return self.sites[0].kind == "experts" and self.reason in (_UNSELECTED, self.sites[0].impossible)


@dataclass(frozen=True)
class Selection:
    """Every parameter of a model that could be quantized: those that are, and those that are not."""

    targets: list[Target]
    skips: list[Skip]


def select_weights(
    model: nn.Module, mapping: Mapping[str, MXConfig | None], filter_fn: FilterFn | None = None
) -> Selection:
    """What `mapping` selects of `model` (this file's docstring explains the keys).

    Args:
        filter_fn: `(module, name) -> bool`; narrows the selection: a selected module for which it is false is skipped.

    Raises:
        ValueError: a key that matches or selects nothing, a bad pattern, or two equally specific keys that disagree.
        NotImplementedError: a key that asks for experts to be quantized.
    """
    groups = find_sites(model)
    sites = [site for group in groups for site in group]
    names = {name for name, _ in model.named_modules(remove_duplicate=False) if name} | {site.name for site in sites}
    names |= {name for name, _ in model.named_parameters(remove_duplicate=False)}
    keys = [_Key.parse(text, config, names) for text, config in mapping.items()]
    for key in keys:
        key.check_effect(sites, names)
    decisions = [_decide(group, keys, filter_fn) for group in groups]
    targets = [decision for decision in decisions if isinstance(decision, Target)]
    return Selection(targets, [decision for decision in decisions if isinstance(decision, Skip)])


def _decide(sites: tuple[Site, ...], keys: list[_Key], filter_fn: FilterFn | None) -> Target | Skip:
    """Whether the one parameter that is registered at `sites` is quantized, and how."""
    winners = [(site, key) for site in sites if (key := _most_specific(site, keys)) is not None]
    top = max((key.level for _, key in winners), default=0)
    winners = [(site, key) for site, key in winners if key.level == top]
    if not winners:
        left_alone = next((site.left_alone for site in sites if site.left_alone), None)
        return Skip(sites, sites[0].impossible or left_alone or _UNSELECTED)
    _, key = winners[0]
    for _, other in winners:
        if other.config != key.config:
            aliases = " and ".join(alias.name for alias, _ in winners)
            raise ValueError(
                f"tied weights {aliases} are one parameter, but {key.text!r} says {key.config} and {other.text!r} says "
                f"{other.config}; give both the same"
            )
    if key.config is None:
        return Skip(sites, f"the config says None for {key.text!r}")
    if sites[0].impossible:
        raise NotImplementedError(
            f"{sites[0].name} (asked for by {key.text!r}) {tuple(sites[0].parameter.shape)}: {sites[0].impossible}; "
            f"leave {key.text!r} out of the config, or map it to None"
        )
    if filter_fn is not None and not all(filter_fn(site.module, site.module_name) for site, _ in winners):
        return Skip(sites, FILTERED)
    return Target(sites, key.config)


def _most_specific(site: Site, keys: list[_Key]) -> _Key | None:
    """The key that decides about `site`; None if no key applies."""
    applying = [key for key in keys if key.applies(site)]
    if not applying:
        return None
    best = max(applying, key=lambda key: key.specificity)
    for key in applying:
        if key.specificity == best.specificity and key.config != best.config:
            raise ValueError(
                f"{key.text!r} and {best.text!r} both match {site.name} and are equally specific, but the one says "
                f"{key.config} and the other {best.config}; write one of them longer, or name {site.name} exactly"
            )
    return best


@dataclass(frozen=True, eq=False)
class _Key:
    """A key of the mapping, and what it matches in one model."""

    text: str
    config: MXConfig | None
    level: int
    matched: frozenset[str]
    """The names of the modules and parameters that it matches; empty for a kind."""
    pattern: re.Pattern[str] | None = None

    @classmethod
    def parse(cls, text: str, config: MXConfig | None, names: set[str]) -> _Key:
        if text in (EVERY_KIND, *KINDS):
            return cls(text, config, _KIND, frozenset())
        if not text.startswith("re:") and not re.search(r"[*?\[]", text):
            is_module = any(name.startswith(f"{text}.") for name in names)
            return cls(text, config, _MODULE if is_module else _PARAMETER, frozenset({text} & names))
        try:
            pattern = re.compile(text[3:] if text.startswith("re:") else fnmatch.translate(text))
        except re.error as error:
            raise ValueError(f"the config's key {text!r} is no regular expression (Python's `re`): {error}") from None
        return cls(text, config, _PATTERN, frozenset(filter(pattern.fullmatch, names)), pattern)

    @property
    def specificity(self) -> tuple[int, int]:
        return self.level, 0 if self.level == _KIND else len(self.text.removeprefix("re:"))

    def covers(self, site: Site) -> bool:
        """Whether it matches the parameter, its module or a module around that."""
        if self.level == _KIND:
            return site.kind in {"linear": ["linear"], "moe": ["experts"]}.get(self.text, ["linear", "experts"])
        return site.name in self.matched or any(name in self.matched for name in lineage(site.module_name))

    def names(self, site: Site) -> bool:
        """Whether it means this module or parameter by name, and not whatever is in its place.

        A pattern does if it would not match with the module, or a parameter not called "weight", renamed.
        """
        if self.level == _KIND:
            return self.text == "moe" and site.kind == "experts"
        if self.pattern is None:
            return self.text in (site.name, site.module_name)
        elsewhere = join(site.module_name.rpartition(".")[0], "z")
        renamed = [(site.module_name, elsewhere), (site.name, join(elsewhere, site.attribute))]
        if site.attribute != "weight":
            renamed.append((site.name, join(site.module_name, "z")))
        return any(self.pattern.fullmatch(name) and not self.pattern.fullmatch(other) for name, other in renamed)

    def applies(self, site: Site) -> bool:
        """Whether it may decide about `site`, if no key is more specific. Default skips apply unless it names them."""
        if not self.covers(site):
            return False
        if self.config is None:
            return True
        if site.kind == "experts" and site.impossible is not None:
            return self.names(site)
        return site.impossible is None and (site.left_alone is None or self.names(site))

    def check_effect(self, sites: list[Site], names: set[str]) -> None:
        """Refuse a key that matches nothing, or whose config applies to no weight that it covers."""
        covered = [site for site in sites if self.covers(site)]
        if not covered and not self.matched:
            raise ValueError(self._matches_nothing(names))
        if self.config is None or any(self.applies(site) for site in covered):
            return
        reasons = [f"{site.name} ({site.impossible or f'{site.left_alone}, unless named'})" for site in covered]
        more = f" and {len(reasons) - 3} more" if len(reasons) > 3 else ""
        raise ValueError(
            f"{self._described} selects nothing: it covers {', '.join(reasons[:3]) or 'no weight'}{more}; "
            "name nn.Linear, Conv1D (transformers) or nn.Embedding modules or experts, or map it to None"
        )

    @property
    def _described(self) -> str:
        return "the config" if self.text == EVERY_KIND else f"the config's key {self.text!r}"

    def _matches_nothing(self, names: set[str]) -> str:
        what = "is a kind that this model has none of" if self.level == _KIND else "matches no module or parameter"
        near = "" if self.level == _KIND else suggestion(self.text, (*KINDS, *names))
        if self.text in FIELDS_ELSEWHERE or suggestion(self.text, CONFIG_FIELDS):
            near += f"; a dict that is one config has only the keys {', '.join(CONFIG_FIELDS)}"
        if self.text == EVERY_KIND:
            return (
                "the config selects nothing: this model has neither nn.Linear modules nor experts. An nn.Embedding is "
                "quantized where a mapping names it, such as {'embed': 'mxfp8'}; other layers are not quantized"
            )
        return f"{self._described} {what}; use 'linear', 'moe', a name or a pattern{near}"
