"""The tables of operators that MXTensor implements. `views`, `lifecycle`, `matmul` and others fill them at import."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

OPERATORS: dict[Any, Callable[..., Any]] = {}
"""aten operator -> implementation, called with the operator's arguments."""
FUNCTIONS: dict[Any, Callable[..., Any]] = {}
"""Python function -> eager short cut, which may return NotImplemented to leave the call to the dispatcher."""


def implements(*operators: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the implementation of aten `operators` on an MXTensor."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        OPERATORS.update(dict.fromkeys(operators, function))
        return function

    return register


def implements_function(function: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register an eager short cut for a Python `function` such as F.linear."""

    def register(implementation: Callable[..., Any]) -> Callable[..., Any]:
        FUNCTIONS[function] = implementation
        return implementation

    return register
