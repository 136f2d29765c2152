"""The weights of a model: where each is registered, what it is used for, and whether it can be quantized."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn
from torch.nn.parameter import is_lazy

from mxquant.formats.spec import FORMATS, WEIGHT_FORMATS
from mxquant.modules.experts import ExpertsLayout
from mxquant.modules.experts_layouts import experts_layout, unknown_experts
from mxquant.modules.linear import has_own_forward, linear_k_axis

SKIP_REASON = "_mxquant_skipped"
"""The attribute of a module that says why parameters of its own are not quantized: a reason by parameter name."""

MIN_IN_FEATURES = min(FORMATS[name].block_size or 1 for name in WEIGHT_FORMATS)
"""A linear layer inside a model with fewer input features is skipped unless a key names it.

Its rows fill no format's block, so that scales take much of what codes save: MXFP4 has 6 bits a weight at 4 features,
16 at 1. Such layers mix coefficients (AltUp of Gemma3n, 4 x 4) or read coordinates; none holds a model's memory.
"""
_PEFT_WRAPPERS = {"BaseTunerLayer", "AuxiliaryTrainingWrapper"}
"""The classes by which peft wraps a layer. peft is optional, so they are recognized by name."""
_OUTPUT_EMBEDDINGS = {"lm_head", "embed_out"}


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

    @property
    def name(self) -> str:
        return join(self.module_name, self.attribute)

    @property
    def k_axis(self) -> int:
        """The axis that the module's matmul contracts."""
        if self.layout is not None:
            return self.layout.k_axis[self.attribute]
        return linear_k_axis(self.module) or -1

    @property
    def biases(self) -> list[nn.Parameter]:
        """The biases that belong to this weight's module."""
        names = ("bias",) if self.layout is None else self.layout.biases.values()
        return [bias for name in names if (bias := self.module._parameters.get(name)) is not None]

    def record_skip(self, reason: str) -> None:
        """Leave with the module why this parameter is not quantized, for `summary`."""
        self.module.__dict__.setdefault(SKIP_REASON, {})[self.attribute] = reason

    def forget_skip(self) -> None:
        reasons = self.module.__dict__.get(SKIP_REASON, {})
        reasons.pop(self.attribute, None)
        if not reasons:
            self.module.__dict__.pop(SKIP_REASON, None)


@dataclass(frozen=True, eq=False)
class TiedSites:
    """Everywhere that one parameter is registered."""

    sites: tuple[Site, ...]

    @property
    def name(self) -> str:
        return self.sites[0].name

    @property
    def parameter(self) -> nn.Parameter:
        return self.sites[0].parameter


def find_sites(model: nn.Module) -> list[tuple[Site, ...]]:
    """The sites of each floating parameter of two or more dimensions, or of a size that is not known yet (lazy).

    Tied weights are one tuple. What makes a parameter impossible to quantize at one site holds for all.
    """
    groups: dict[int, list[Site]] = {}
    for site in _sites(model):
        groups.setdefault(id(site.parameter), []).append(site)
    tied = []
    for group in groups.values():
        impossible = next((site.impossible for site in group if site.impossible), None)
        if len({(site.k_axis, site.layout is None) for site in group}) > 1:
            impossible = "tied weights that are not multiplied alike"
        tied.append(tuple(replace(site, impossible=impossible) for site in group))
    return tied


def _sites(model: nn.Module) -> Iterator[Site]:
    modules = dict(model.named_modules(remove_duplicate=False))
    adapters = _adapters(modules)
    outputs = _output_embedding_weights(model, modules)
    for module_name, module in modules.items():
        for attribute, parameter in module._parameters.items():
            if parameter is None or not (is_lazy(parameter) or parameter.ndim >= 2):
                continue
            site = Site(module, module_name, attribute, parameter)
            parent = modules.get(module_name.rpartition(".")[0]) if module_name else None
            if linear_k_axis(module) is not None and attribute == "weight":
                linear = _linear_site(site, parent, id(parameter) in outputs)
                in_adapter = any(name in adapters for name in lineage(module_name))
                yield replace(linear, left_alone="adapter of peft") if in_adapter else linear
            elif isinstance(module, nn.Embedding) and attribute == "weight":
                yield replace(site, kind="embedding", left_alone="embedding", impossible=_embedding_fault(module))
            elif is_lazy(parameter) or parameter.is_floating_point():
                yield _other_site(site, parent)


def _adapters(modules: Mapping[str, nn.Module]) -> set[str]:
    """The modules that peft put beside the layers that it wraps: `lora_A`, `lora_B`, copies that are trained."""
    return {
        join(name, child)
        for name, module in modules.items()
        if any(base.__name__ in _PEFT_WRAPPERS and base.__module__.startswith("peft.") for base in type(module).__mro__)
        for child in module._modules
        if child not in ("base_layer", "original_module")
    }


def _linear_site(site: Site, parent: nn.Module | None, is_output: bool) -> Site:
    left_alone = impossible = None
    if has_own_forward(site.module):
        impossible = f"{type(site.module).__name__} has a forward of its own"
    elif site.module_name and not is_lazy(site.parameter) and site.parameter.shape[site.k_axis] < MIN_IN_FEATURES:
        left_alone = f"fewer than {MIN_IN_FEATURES} input features, no format's block"
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
    """Whether the class is called ...Experts, or holds a stack of matrices and is no layer of torch."""
    if type(site.module).__name__.endswith("Experts"):
        return True
    return site.parameter.ndim >= 3 and site.parameter.shape[0] > 1 and not _is_torch_layer(site.module)


def _is_torch_layer(module: nn.Module) -> bool:
    """Whether its class is, or derives from, a layer of `torch.nn` such as a convolution. Containers are no layers."""
    containers = {"torch.nn.modules.module", "torch.nn.modules.container"}
    origins = {base.__module__ for base in type(module).__mro__} - containers
    return any(origin.startswith("torch.nn.") for origin in origins)


def _is_router(site: Site, parent: nn.Module | None) -> bool:
    path = site.module_name.split(".")
    if (
        "router" in path[-2:]
        or path[-1].endswith(("_router", "shared_expert_gate"))
        or type(site.module).__name__.endswith("Router")
    ):
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


def join(prefix: str, name: str) -> str:
    """A name below a module, which is "" for the root."""
    return f"{prefix}.{name}" if prefix else name
