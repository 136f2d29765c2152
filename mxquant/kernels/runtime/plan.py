"""Several kernels that make one tensor, planned once for a shape and launched again for other tensors.

What a call of a small product costs the host is mostly allocations and launches. A plan knows its grids, numbers and
compiled kernels from its first call; afterwards a call allocates the result and one workspace, and each launch takes
addresses alone.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel

from mxquant.kernels.runtime.launch import CachedLaunch, entry, is_observed, settings

# Bytes: what a workspace is cut into begins at multiples of it, as torch's own allocations for a GPU do.
_ALIGNMENT = 512


Kind = tuple[torch.dtype, torch.device]
"""What a plan is kept by for each tensor given, beside sizes and strides: kernels are compiled for its dtype, and on
another device its address means nothing.
"""


def kind(tensor: Tensor | None) -> Kind | None:
    return None if tensor is None else (tensor.dtype, tensor.device)


class Buffer(NamedTuple):
    """A tensor that is yet to be made."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(*self.shape, dtype=self.dtype, device=device)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Step(NamedTuple):
    """`kernel[grid](*arguments, **constants)`, where a text stands for the tensor of that name."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[str | int, ...]
    constants: dict[str, Any]

    def launch(self, tensors: Mapping[str, Tensor]) -> Any:
        """Returns what was launched, where that is known."""
        arguments = (tensors[argument] if isinstance(argument, str) else argument for argument in self.arguments)
        launched = self.kernel[self.grid](*arguments, **self.constants)
        return launched if isinstance(self.kernel, CachedLaunch) else None


class Plan:
    """Steps, in order, from tensors given to a tensor returned.

    Whatever the steps depend on but for the values and addresses of the tensors must be settled: keep a plan by all of
    it, and by the kind of each tensor.
    """

    def __init__(
        self,
        given: Sequence[str],
        result: tuple[str, Buffer],
        between: Mapping[str, Buffer],
        steps: Sequence[Step],
        device: torch.device,
    ) -> None:
        """
        Args:
            given: names of the tensors that a call passes, all on `device`.
            result: name of the tensor that a call makes and returns.
            between: the tensors that pass values from step to step, and are gone afterwards.
        """
        self._given, (self._name, self._result), self._between = tuple(given), result, between
        self._steps, self._device = steps, device
        self._offsets, self._bytes = [], 0
        for buffer in between.values():
            self._offsets.append(self._bytes)
            self._bytes += -(-buffer.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._launches: Sequence[tuple[Callable[..., None], Callable[[tuple[Any, ...]], tuple[Any, ...]]]] = ()
        """What launches each step, and what picks its arguments from the stream, addresses and `_fixed`."""
        self._fixed: list[Any] = []
        self._settings: Any = None

    def __call__(self, *given: Tensor) -> Tensor:
        if not self._launches or is_observed() or self._settings != settings():
            return self._call_ordinarily(given)
        addresses = [tensor.data_ptr() for tensor in given]
        for address in addresses:
            if address % 16:  # the kernels were compiled for aligned tensors
                return self._call_ordinarily(given)
        driver = triton.runtime.driver.active
        device = driver.get_current_device()
        if device != self._device.index:
            with torch.cuda.device(self._device):
                return self(*given)
        result = torch.empty(*self._result.shape, dtype=self._result.dtype, device=self._device)
        workspace = torch.empty(self._bytes, dtype=torch.uint8, device=self._device)
        start = workspace.data_ptr()
        between = [start + offset for offset in self._offsets]
        values = (driver.get_current_stream(device), *addresses, result.data_ptr(), *between, *self._fixed)
        for run, pick in self._launches:
            run(*pick(values))
        return result

    def _call_ordinarily(self, given: tuple[Tensor, ...]) -> Tensor:
        """Launch tensors as Triton does, and keep what is compiled for aligned ones."""
        result = self._result.empty(self._device)
        workspace = torch.empty(self._bytes, dtype=torch.uint8, device=self._device)
        tensors = dict(zip((*self._given, self._name), (*given, result), strict=True))
        for (name, buffer), offset in zip(self._between.items(), self._offsets, strict=True):
            tensors[name] = workspace[offset : offset + buffer.nbytes].view(buffer.dtype).view(buffer.shape)
        with torch.cuda.device_of(result):
            compiled = [step.launch(tensors) for step in self._steps]
        aligned = not any(tensor.data_ptr() % 16 for tensor in given)
        if aligned and all(isinstance(kernel, CompiledKernel) for kernel in compiled):
            self._keep(compiled, tensors)
        return result

    def _keep(self, compiled: Sequence[CompiledKernel], tensors: Iterable[str]) -> None:
        places = {name: place for place, name in enumerate(tensors, 1)}  # behind the stream
        fixed: list[Any] = []

        def keep(value: Any) -> int:
            fixed.append(value)
            return len(places) + len(fixed)

        launches = []
        for step, kernel in zip(self._steps, compiled, strict=True):
            run, before = entry(kernel)
            arguments = [places[a] if isinstance(a, str) else keep(a) for a in step.arguments]
            # A place is kept for each constant.
            constants = [None] * (len(step.kernel.ordinary.params) - len(arguments))
            picked = *map(keep, (*step.grid, 1, 1)[:3]), 0, *map(keep, before), *arguments, *map(keep, constants)
            launches.append((run, operator.itemgetter(*picked)))
        self._fixed, self._settings, self._launches = fixed, settings(), launches
