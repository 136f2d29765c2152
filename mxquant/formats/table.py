"""Tables of values, made once for each device and kept."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

_K = TypeVar("_K")


def kept_table(make: Callable[[_K, torch.dtype], Tensor]) -> Callable[[_K, torch.dtype, torch.device], Tensor]:
    """Decorates a function that makes a table on the CPU. The first call for a device copies the table there and keeps
    it.

    NOTE: the table outlives that call. A thread of its own makes it, where no tracing mode and no inference mode is
    active, and no CUDA graph's pool gives the memory. The copy has ended when the call returns. CUDA refuses the copy
    while a graph is captured: run once before.
    """

    @functools.cache
    def table(kind: _K, dtype: torch.dtype, device: torch.device) -> Tensor:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(lambda: make(kind, dtype).to(device)).result()

    return functools.update_wrapper(table, make)
