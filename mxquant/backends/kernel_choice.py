"""Backends with several kernels for one product, and the choice among them by the number of rows.

The choice is the kernel that was measured to be the fastest on this device (`tuning_cache`), else the backend's
default. It is needed at every matmul, so it is cached.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from mxquant.backends import tuning_cache
from mxquant.backends.base import Backend, Operand, Problem

Multiply = Callable[[Tensor, Operand, Tensor | None, Problem], Tensor]
"""As `Backend.matmul`, of at least one row."""


class KernelChoice(NamedTuple):
    """One of a backend's kernels for a product: it computes what the problem says, with the same bits every time. The
    order of fp32 sums may differ from one kernel to another.
    """

    name: str
    multiply: Multiply


class Selected(NamedTuple):
    kernel: KernelChoice
    is_tuned: bool
    """Whether it was measured to be the fastest. Else it is the backend's default."""


class TunableBackend(Backend):
    """A backend with several kernels for one product. `mxquant.tune` measures which one is the fastest."""

    @abc.abstractmethod
    def kernel_choices(self, problem: Problem, rows: int) -> tuple[KernelChoice, ...]:
        """The kernels that compute `rows` rows, 1 or more, of a problem that this backend takes; at least one.

        The first is the default. The answer is cached, so it may depend on the arguments alone.
        """

    def matmul(self, x: Tensor, weight: Operand, bias: Tensor | None, problem: Problem) -> Tensor:
        rows = x.shape[0]
        if rows == 0:
            return x.new_empty(0, problem.width, dtype=problem.dtype)
        return select_kernel(self, problem, rows).kernel.multiply(x, weight, bias, problem)


@functools.lru_cache(maxsize=1 << 14)
def select_kernel(backend: TunableBackend, problem: Problem, rows: int) -> Selected:
    """The kernel that `backend.matmul` uses for `rows` rows, 1 or more."""
    choices = backend.kernel_choices(problem, rows)
    fastest = tuning_cache.fastest_kernel(backend.name, problem, rows)
    for choice in choices:
        if choice.name == fastest:
            return Selected(choice, is_tuned=True)
    return Selected(choices[0], is_tuned=False)


def forget_selected() -> None:
    """Read the tuning cache anew at the next matmul."""
    tuning_cache.load_table.cache_clear()
    select_kernel.cache_clear()
