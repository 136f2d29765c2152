"""transformers' experts implementation "mxquant", known to transformers whichever of the two is imported first.

Importing this module imports no transformers.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from mxquant.modules.moe import experts_forward
from mxquant.tensor import MXTensor

NAME = "mxquant"
_REGISTRY = "transformers.integrations.moe"


def _register(moe: ModuleType) -> None:
    """Register the implementation in transformers' module of experts implementations."""
    functions: Any = moe.ALL_EXPERTS_FUNCTIONS

    def forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """`mxquant.experts_forward` for blocks with quantized weights, transformers' grouped matmul for others."""
        if any(isinstance(parameter, MXTensor) for parameter in self._parameters.values()):
            return experts_forward(self, hidden_states, top_k_index, top_k_weights)
        return functions["grouped_mm"](self, hidden_states, top_k_index, top_k_weights)

    functions.register(NAME, forward)


class _RegisterAfterImport(importlib.abc.MetaPathFinder):
    """Finds transformers' module as Python would, and registers the implementation once it has run."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != _REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_register(module: ModuleType) -> None:
            run(module)
            if hasattr(module, "ALL_EXPERTS_FUNCTIONS"):  # releases before transformers 5 lack it
                _register(module)

        spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec


if _REGISTRY in sys.modules:
    _register(sys.modules[_REGISTRY])
else:
    sys.meta_path.insert(0, _RegisterAfterImport())
