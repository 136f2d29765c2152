"""A backend that has several ways to compute a product: which take a number of rows, and which of them is taken.

That is the one which was measured to be the fastest on this device (`tuned`), else the backend's own first choice. It
is looked up at every matmul, so an answer is kept.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from mxquant.backends import tuning_cache as tuned
from mxquant.backends.base import Backend, Operand, Problem

Multiply = Callable[[Tensor, Operand, Tensor | None, Problem], Tensor]
"""As `Backend.matmul`, of at least one row."""


class KernelChoice(NamedTuple):
    """One way to compute a product. All routes of a backend compute what the problem says, each with the same bits
    every time; from one to another, the order of sums in fp32 may differ.
    """

    name: str
    multiply: Multiply


class Choice(NamedTuple):
    route: KernelChoice
    is_tuned: bool
    """Whether it was measured to be the fastest; else it is the backend's own first choice."""


class TunableBackend(Backend):
    """A backend whose `matmul` takes one of its routes."""

    @abc.abstractmethod
    def routes(self, problem: Problem, rows: int) -> tuple[KernelChoice, ...]:
        """The routes that compute `rows` rows, 1 or more, of a problem that this backend takes; at least one, and first
        the one to take where nothing was measured. Equal questions have equal answers, which are kept.
        """

    def matmul(self, x: Tensor, weight: Operand, bias: Tensor | None, problem: Problem) -> Tensor:
        rows = x.shape[0]
        if rows == 0:
            width = problem.out_features if problem.contraction == "blocked" else problem.in_features
            return x.new_empty(0, width, dtype=problem.dtype)
        return choose_route(self, problem, rows).route.multiply(x, weight, bias, problem)


@functools.lru_cache(maxsize=1 << 14)
def choose_route(backend: TunableBackend, problem: Problem, rows: int) -> Choice:
    """The route that `backend.matmul` takes for `rows` rows, 1 or more."""
    first, *others = backend.routes(problem, rows)
    fastest = tuned.fastest_route(backend.name, problem, rows)
    for route in (first, *others):
        if route.name == fastest:
            return Choice(route, is_tuned=True)
    return Choice(first, is_tuned=False)


def forget_choices() -> None:
    """Read what was tuned anew at the next matmul."""
    tuned.table.cache_clear()
    choose_route.cache_clear()
