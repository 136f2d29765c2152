"""Which parameters are quantized, with which config, and why the others are not. Nothing is changed here.

Every parameter of two or more dimensions becomes either a `Target` or a `Skip` with its reason.

What the keys of a mapping mean:

- "linear" and "moe" are kinds: the weights of `nn.Linear` modules, and stacked experts. They are always kinds; a module
  that is itself called "linear" is named by "re:linear".
- A parameter's name means that parameter; a module's name means all below it.
- A pattern means every parameter or module whose whole name it matches, and all below such a module. It is a glob
  ("*.q_proj", with `*`, `?` and `[...]` as in `fnmatch`; `*` crosses dots), or "re:" and a regular expression.

The most specific key wins: an exact parameter before an exact module before a pattern before a kind. Of two exact
modules the longer name wins, of two patterns the longer text; patterns of equal length that disagree are an error. Tied
weights are one parameter: the keys that decide for its names compete in the same order, those of one level must agree.

A config that is given alone means both kinds, whichever of them the model has; experts of a layout that is not known
stay as they are then, while "moe" asks for them.

MoE routers, embeddings and output embeddings are left alone unless a key names them: by their exact name, or by a
pattern that would not match if they were called something else ("*head" names lm_head; "model.layers.*" no router).
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn
from torch.nn.parameter import is_lazy

from mxquant.config import CONFIG_FIELDS, EVERY_KIND, KINDS, _MXConfig, suggestion
from mxquant.modules.experts import ExpertsLayout
from mxquant.modules.registry import experts_layout, unknown_experts

FilterFn = Callable[[nn.Module, str], bool]

_KIND, _PATTERN, _MODULE, _PARAMETER = range(1, 5)
_OUTPUT_EMBEDDINGS = {"lm_head", "embed_out"}
FILTERED = "filter_fn"
"""Why a weight is skipped that a key selects and the filter leaves out."""
_UNSELECTED = "no key of the config selects it"


@dataclass(frozen=True, eq=False)
class Site:
    """A place where a parameter is registered. Tied weights have several."""

    module: nn.Module
    module_name: str
    attribute: str
    parameter: nn.Parameter
    kind: Literal["linear", "embedding", "experts", "other"] = "other"
    left_alone: str | None = None
    """Why it is skipped unless a key names it."""
    impossible: str | None = None
    """Why it cannot be quantized at all."""
    layout: ExpertsLayout | None = None
    """Of experts, where it is known."""

    @property
    def name(self) -> str:
        return _join(self.module_name, self.attribute)

    @property
    def biases(self) -> list[nn.Parameter]:
        """Those of the module that the parameter belongs to."""
        names = ("bias",) if self.layout is None else self.layout.biases.values()
        return [bias for name in names if (bias := self.module._parameters.get(name)) is not None]


@dataclass(frozen=True, eq=False)
class Target:
    """A parameter to quantize, everywhere it is registered."""

    sites: tuple[Site, ...]
    config: _MXConfig

    @property
    def name(self) -> str:
        return self.sites[0].name

    @property
    def parameter(self) -> nn.Parameter:
        return self.sites[0].parameter

    @property
    def computing_sites(self) -> tuple[Site, ...]:
        """Those that multiply by it: the linear layers or blocks of experts, each once."""
        found = {(site.module, site.attribute): site for site in self.sites if site.kind in ("linear", "experts")}
        return tuple(found.values())

    @property
    def k_axis(self) -> int:
        """The axis that its matmul contracts."""
        site = self.sites[0]
        return -1 if site.layout is None else site.layout.k_axis[site.attribute]

    @property
    def stack(self) -> int | None:
        """The number of experts whose matrices a 2-D parameter holds; None where it is what it looks like."""
        return None if self.sites[0].layout is None else self.sites[0].layout.stack_of(self.sites[0].module)


@dataclass(frozen=True, eq=False)
class Skip:
    """A parameter that stays as it is."""

    sites: tuple[Site, ...]
    reason: str

    @property
    def is_overlooked_experts(self) -> bool:
        """Whether it is experts that nobody said should stay as they are."""
        return self.sites[0].kind == "experts" and self.reason in (_UNSELECTED, self.sites[0].impossible)

    @property
    def name(self) -> str:
        return self.sites[0].name

    @property
    def parameter(self) -> nn.Parameter:
        return self.sites[0].parameter


@dataclass(frozen=True)
class Plan:
    targets: list[Target]
    skips: list[Skip]


def select(model: nn.Module, mapping: Mapping[str, _MXConfig | None], filter_fn: FilterFn | None = None) -> Plan:
    """The plan for quantizing `model` as `mapping` says (see the module's docstring for its keys).

    Args:
        filter_fn: `(module, name) -> bool`; narrows the selection: a selected module for which it is false is skipped.

    Raises:
        ValueError: a key that matches or selects nothing, a bad pattern, or two equally specific keys that disagree.
        NotImplementedError: a key that asks for experts to be quantized.
    """
    groups = _tied_sites(model)
    sites = [site for group in groups for site in group]
    names = {name for name, _ in model.named_modules(remove_duplicate=False) if name} | {site.name for site in sites}
    names |= {name for name, _ in model.named_parameters(remove_duplicate=False)}
    keys = [_Key.parse(text, config, names) for text, config in mapping.items()]
    for key in keys:
        key.check_effect(sites, names)

    plan = Plan([], [])
    for group in groups:
        decision = _decide(group, keys, filter_fn)
        if isinstance(decision, Target):
            plan.targets.append(decision)
        else:
            plan.skips.append(decision)
    return plan


def _tied_sites(model: nn.Module) -> list[tuple[Site, ...]]:
    """The sites of each parameter; what makes it impossible to quantize at one of them holds for all."""
    groups: dict[int, list[Site]] = {}
    for site in _sites(model):
        groups.setdefault(id(site.parameter), []).append(site)
    tied = []
    for group in groups.values():
        impossible = next((site.impossible for site in group if site.impossible), None)
        if len({None if site.layout is None else site.layout.k_axis[site.attribute] for site in group}) > 1:
            impossible = "tied weights that are not multiplied alike"
        tied.append(tuple(replace(site, impossible=impossible) for site in group))
    return tied


def _decide(sites: tuple[Site, ...], keys: list[_Key], filter_fn: FilterFn | None) -> Target | Skip:
    """What becomes of the one parameter that is registered at `sites`."""
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
    """The key that decides at `site`, None where none applies."""
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
    """A key of the mapping, resolved against the names of one model."""

    text: str
    config: _MXConfig | None
    level: int
    matched: frozenset[str]
    """The names of modules and parameters that it matches; empty for a kind."""
    pattern: re.Pattern[str] | None = None

    @classmethod
    def parse(cls, text: str, config: _MXConfig | None, names: set[str]) -> _Key:
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
        """Whether it matches the parameter, its module or a module above."""
        if self.level == _KIND:
            return site.kind in {"linear": ["linear"], "moe": ["experts"]}.get(self.text, ["linear", "experts"])
        return site.name in self.matched or any(name in self.matched for name in lineage(site.module_name))

    def names(self, site: Site) -> bool:
        """Whether it means this very module or parameter, not only whatever lies in some place."""
        if self.level == _KIND:
            return self.text == "moe" and site.kind == "experts"
        if self.pattern is None:
            return self.text in (site.name, site.module_name)
        elsewhere = _join(site.module_name.rpartition(".")[0], "z")
        renamed = [(site.module_name, elsewhere), (site.name, _join(elsewhere, site.attribute))]
        if site.attribute != "weight":
            renamed.append((site.name, _join(site.module_name, "z")))
        return any(self.pattern.fullmatch(name) and not self.pattern.fullmatch(other) for name, other in renamed)

    def applies(self, site: Site) -> bool:
        """Whether it decides about `site`, more specific keys aside. What is skipped by default has to be named."""
        if not self.covers(site):
            return False
        if self.config is None:
            return True
        if site.kind == "experts" and site.impossible is not None:
            return self.names(site)
        return site.impossible is None and (site.left_alone is None or self.names(site))

    def check_effect(self, sites: list[Site], names: set[str]) -> None:
        """Refuse a key that matches nothing, or, where it has a config, only what cannot be or is not quantized."""
        covered = [site for site in sites if self.covers(site)]
        if not covered and not self.matched:
            raise ValueError(self._matches_nothing(names))
        if self.config is None or any(self.applies(site) for site in covered):
            return
        reasons = [f"{site.name} ({site.impossible or f'{site.left_alone}, unless named'})" for site in covered]
        more = f" and {len(reasons) - 3} more" if len(reasons) > 3 else ""
        raise ValueError(
            f"{self._described} selects nothing: it covers {', '.join(reasons[:3]) or 'no weight'}{more}; "
            "name nn.Linear or nn.Embedding modules or experts, or map it to None"
        )

    @property
    def _described(self) -> str:
        return "the config" if self.text == EVERY_KIND else f"the config's key {self.text!r}"

    def _matches_nothing(self, names: set[str]) -> str:
        what = "is a kind that this model has none of" if self.level == _KIND else "matches no module or parameter"
        near = "" if self.level == _KIND else suggestion(self.text, (*KINDS, *names))
        if self.text in CONFIG_FIELDS:
            near = f"; a dict that is one config has only the keys {', '.join(CONFIG_FIELDS)}"
        if self.text == EVERY_KIND:
            return (
                "the config selects nothing: this model has neither nn.Linear modules nor experts. An nn.Embedding is "
                "quantized where a mapping names it, such as {'embed': 'mxfp8'}; other layers are not quantized"
            )
        return f"{self._described} {what}; use 'linear', 'moe', a name or a pattern{near}"


def _sites(model: nn.Module) -> Iterator[Site]:
    """Every place of a parameter that could be thought to be quantized: two or more dimensions, or not yet known."""
    modules = dict(model.named_modules(remove_duplicate=False))
    outputs = _output_embedding_weights(model, modules)
    for module_name, module in modules.items():
        for attribute, parameter in module._parameters.items():
            if parameter is None or not (is_lazy(parameter) or parameter.ndim >= 2):
                continue
            site = Site(module, module_name, attribute, parameter)
            parent = modules.get(module_name.rpartition(".")[0]) if module_name else None
            if isinstance(module, nn.Linear) and attribute == "weight":
                yield _linear_site(site, parent, id(parameter) in outputs)
            elif isinstance(module, nn.Embedding) and attribute == "weight":
                yield replace(site, kind="embedding", left_alone="embedding", impossible=_embedding_fault(module))
            elif is_lazy(parameter) or parameter.is_floating_point():
                yield _other_site(site, parent)


def _linear_site(site: Site, parent: nn.Module | None, is_output: bool) -> Site:
    left_alone = impossible = None
    if type(site.module).forward is not nn.Linear.forward:
        impossible = f"{type(site.module).__name__} has a forward of its own"
    elif is_output or site.module_name.rpartition(".")[2] in _OUTPUT_EMBEDDINGS:
        left_alone = "output embedding"
    elif _is_router(site, parent):
        left_alone = "MoE router"
    return replace(site, kind="linear", left_alone=left_alone, impossible=impossible)


def _embedding_fault(embedding: nn.Embedding) -> str | None:
    if embedding.max_norm is not None:
        return "an embedding with max_norm, which rewrites its weight in forward"
    if embedding.sparse:
        return "an embedding with sparse=True, which is for training its weight"
    return None


def _other_site(site: Site, parent: nn.Module | None) -> Site:
    if _is_router(site, parent):
        return replace(site, impossible="MoE router")
    layout = experts_layout(site.module)
    if layout is not None and site.attribute in layout.k_axis:
        return replace(site, kind="experts", layout=layout)
    if layout is not None and site.attribute in layout.biases.values():
        return replace(site, impossible="bias of experts")
    if layout is None and _may_be_experts(site):
        return replace(site, kind="experts", impossible=unknown_experts(site.module))
    owner = type(site.module).__name__
    return replace(site, impossible=f"a parameter of {owner}, neither nn.Linear nor nn.Embedding")


def _may_be_experts(site: Site) -> bool:
    """What a class called ...Experts holds, or a stack of matrices in any but a layer of torch."""
    if type(site.module).__name__.endswith("Experts"):
        return True
    return site.parameter.ndim >= 3 and site.parameter.shape[0] > 1 and not _is_torch_layer(site.module)


def _is_torch_layer(module: nn.Module) -> bool:
    """Whether its class is, or derives from, a layer of `torch.nn`, such as a convolution; containers are none."""
    containers = {"torch.nn.modules.module", "torch.nn.modules.container"}
    origins = {base.__module__ for base in type(module).__mro__} - containers
    return any(origin.startswith("torch.nn.") for origin in origins)


def _is_router(site: Site, parent: nn.Module | None) -> bool:
    path = site.module_name.split(".")
    if "router" in path[-2:] or path[-1] == "shared_expert_gate" or type(site.module).__name__.endswith("Router"):
        return True
    if parent is None or not hasattr(parent, "experts"):
        return False
    return path[-1] == "gate" or (isinstance(site.module, nn.Linear) and site.module.out_features < 32)


def _output_embedding_weights(model: nn.Module, modules: Mapping[str, nn.Module]) -> set[int]:
    """The ids of weights that the model says are its output embeddings, or that an `nn.Embedding` shares."""
    holders: list[object] = [module for module in modules.values() if isinstance(module, nn.Embedding)]
    ask = getattr(model, "get_output_embeddings", None)
    if callable(ask):
        holders.append(ask())
    weights = [getattr(holder, "weight", None) for holder in holders]
    return {id(weight) for weight in weights if isinstance(weight, nn.Parameter)}


def lineage(module_name: str) -> Iterator[str]:
    """`module_name` and the names of the modules above it, the root excepted."""
    while module_name:
        yield module_name
        module_name = module_name.rpartition(".")[0]


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
