"""Tables of values that are made once for each device and kept."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

_K = TypeVar("_K")


def kept_table(make: Callable[[_K, torch.dtype], Tensor]) -> Callable[[_K, torch.dtype, torch.device], Tensor]:
    """Decorates a function that makes a table on the CPU: the same on a device, made at the first call and kept.

    It outlives the first call, so it is made in a thread of its own: there no tracing mode and no inference mode is
    active, and no CUDA graph's pool gives the memory. It outlives the stream of that call, too: the copy has ended when
    it returns (while a graph is captured, CUDA refuses it: run once before).
    """

    @functools.cache
    def table(kind: _K, dtype: torch.dtype, device: torch.device) -> Tensor:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(lambda: make(kind, dtype).to(device)).result()

    return functools.update_wrapper(table, make)
