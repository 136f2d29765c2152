"""The tables of operators that MXTensor implements. `views`, `lifecycle`, `matmul` and others fill them at import."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

OPERATORS: dict[Any, Callable[..., Any]] = {}
"""aten operator -> implementation, called with the operator's arguments."""
NAMED_OPERATORS: dict[Any, Callable[..., Any]] = {}
"""The same for operators of libraries that may not be imported yet, by what `str` gives of them."""
FUNCTIONS: dict[Any, Callable[..., Any]] = {}
"""Python function -> eager short cut, which may return NotImplemented to leave the call to the dispatcher."""


def implements(
    *operators: Any, table: dict[Any, Callable[..., Any]] = OPERATORS
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the implementation of `operators` on an MXTensor, in one of the tables above."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        table.update(dict.fromkeys(operators, function))
        return function

    return register
