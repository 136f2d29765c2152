"""Every expert block of the installed transformers: found by reading its sources, built small from its own config."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers
from torch import nn

EXPERTS, HIDDEN, INTERMEDIATE = 4, 90, 72
"""Sizes that are multiples of no block: 90 = 2 x 32 + 26 (a shard of 2880), 72 = 2 x 32 + 8."""

# Attributes of configs, wherever a config has them. Others (the activation, limits) stay as the model has them.
SIZES = {
    EXPERTS: ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts"),
    HIDDEN: ("hidden_size", "moe_hidden_size", "d_model"),
    INTERMEDIATE: ("intermediate_size", "moe_intermediate_size", "expert_ffn_hidden_size", "ffn_hidden_size"),
}


def decorated_classes() -> list[tuple[str, str]]:
    """Module and name of every class that `use_experts_implementation` decorates."""
    models = Path(transformers.__file__).parent / "models"
    found = []
    for path in sorted(models.glob("*/modeling_*.py")):
        source = path.read_text(encoding="utf-8")
        if "use_experts_implementation" in source:
            module = f"transformers.models.{path.parent.name}.{path.stem}"
            found += [(module, name) for name in _decorated(ast.parse(source))]
    return found


def _decorated(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for decorator in node.decorator_list:
                function = decorator.func if isinstance(decorator, ast.Call) else decorator
                if getattr(function, "id", getattr(function, "attr", None)) == "use_experts_implementation":
                    yield node.name


def build(module_name: str, class_name: str, implementation: str = "eager") -> nn.Module:
    """A block with random weights of about unit gain, and biases and norm weights that are not trivial.

    Raises:
        LookupError: none of the model's config classes has what the block reads.
    """
    module = importlib.import_module(module_name)
    cls = getattr(module, class_name)
    signature = inspect.signature(cls.__init__).parameters
    failures = []
    for config in _small_configs(module, cls):
        config._experts_implementation = implementation
        options = {"intermediate_size": INTERMEDIATE} if "intermediate_size" in signature else {}
        try:
            experts = cls(config, **options)
        except (AttributeError, TypeError, KeyError, RuntimeError) as error:
            failures.append(f"{type(config).__name__}: {error}")
            continue
        return fill(experts)
    raise LookupError(f"{class_name}: {failures}")


def _small_configs(module: ModuleType, cls: type[nn.Module]) -> Iterator[Any]:
    """The config class that the block's __init__ names, then the others of the model, each made small."""
    annotation = inspect.signature(cls.__init__).parameters["config"].annotation
    named = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    base = transformers.PreTrainedConfig if hasattr(transformers, "PreTrainedConfig") else transformers.PretrainedConfig
    configuration = importlib.import_module(module.__name__.replace(".modeling_", ".configuration_"))
    classes = [c for c in vars(configuration).values() if isinstance(c, type) and issubclass(c, base) and c is not base]
    for config_class in sorted(classes, key=lambda c: c.__name__ != named):
        config = config_class()
        # Where layers differ, a block gets the config of its layer.
        config = (
            config.per_layer_config[config.num_hidden_layers - 1] if "_heterogeneity_spec" in vars(config) else config
        )
        for size, names in SIZES.items():
            for name in names:
                if hasattr(config, name) and not isinstance(getattr(config, name), list):
                    setattr(config, name, size)
        yield config


@torch.no_grad()
def fill(experts: nn.Module) -> nn.Module:
    for name, parameter in experts.named_parameters():
        if parameter.dim() >= 3:
            parameter.copy_(torch.randn(parameter.shape) * min(parameter.shape[1:]) ** -0.5)
        elif "norm" in name:
            parameter.copy_(1 + 0.2 * torch.randn(parameter.shape))
        else:
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    return experts.eval().requires_grad_(False)


def width_of(experts: nn.Module) -> int:
    """Of a token, as the block takes it."""
    up = getattr(experts, "gate_up_proj", None)
    up = experts.up_proj if up is None else up
    return int(up.shape[-2 if getattr(experts, "is_transposed", False) else -1])
