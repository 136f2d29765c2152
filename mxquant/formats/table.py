"""Tables of values that are made once for each device and kept."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

_K = TypeVar("_K")


def kept_table(make: Callable[[_K, torch.dtype], Tensor]) -> Callable[[_K, torch.dtype, torch.device], Tensor]:
    """Decorates a function that makes a table on the CPU: the same on a device, made at the first call and kept.

    It is of real memory also where a tracing mode is active, as it outlives it. It outlives the stream of the first
    call, too, and a CUDA graph that is being captured: the copy has ended when it returns (while a graph is captured,
    CUDA refuses it: run once before).
    """

    @functools.cache
    def table(kind: _K, dtype: torch.dtype, device: torch.device) -> Tensor:
        with _disable_current_modes(), torch.inference_mode(False):
            return make(kind, dtype).to(device)

    return functools.update_wrapper(table, make)
