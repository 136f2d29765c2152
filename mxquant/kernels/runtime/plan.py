"""A sequence of kernels that computes one tensor, planned once for a shape and launched again for other tensors.

For a small product the host spends most of its time on allocations and launches. A plan knows its grids, integers and
compiled kernels after its first call. Further calls allocate the result and one workspace, and pass addresses alone.
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

# Bytes: buffers begin at multiples of it in the workspace, as torch's own allocations do on a GPU.
_ALIGNMENT = 512


Kind = tuple[torch.dtype, torch.device]
"""A plan is cached by the kind of each input, beside sizes and strides: kernels are compiled for its dtype, and its
address is of its device.
"""


def kind(tensor: Tensor | None) -> Kind | None:
    return None if tensor is None else (tensor.dtype, tensor.device)


class Buffer(NamedTuple):
    """Shape and dtype of a tensor that a plan allocates."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(*self.shape, dtype=self.dtype, device=device)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Step(NamedTuple):
    """`kernel[grid](*arguments, **constants)`; a string stands for the tensor of that name."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[str | int, ...]
    constants: dict[str, Any]

    def launch(self, tensors: Mapping[str, Tensor]) -> Any:
        """Returns the compiled kernel, where that is known."""
        arguments = (tensors[argument] if isinstance(argument, str) else argument for argument in self.arguments)
        launched = self.kernel[self.grid](*arguments, **self.constants)
        return launched if isinstance(self.kernel, CachedLaunch) else None


class Plan:
    """Steps, in order, from input tensors to one result.

    A plan holds for all inputs that differ only in values and addresses: cache it by everything else that its steps
    depend on, and by the kind of each input.
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
            given: names of the input tensors, all on `device`.
            result: name and buffer of the tensor that a call returns.
            between: temporaries that pass values from step to step, in one workspace.
        """
        self._given, (self._name, self._result), self._between = tuple(given), result, between
        self._steps, self._device = steps, device
        self._offsets, self._bytes = [], 0
        for buffer in between.values():
            self._offsets.append(self._bytes)
            self._bytes += -(-buffer.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._launches: Sequence[tuple[Callable[..., None], Callable[[tuple[Any, ...]], tuple[Any, ...]]]] = ()
        """For each step the launcher, and a getter that picks its arguments from the stream, addresses and `_fixed`."""
        self._fixed: list[Any] = []
        self._settings: Any = None

    def __call__(self, *given: Tensor) -> Tensor:
        if not self._launches or is_observed() or self._settings != settings():
            return self._call_ordinarily(given)
        addresses = [tensor.data_ptr() for tensor in given]
        for address in addresses:
            if address % 16:  # the kernels are specialized for aligned tensors
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
        """Launch as Triton does, and keep the kernels that are compiled for aligned tensors."""
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
        positions = {name: position for position, name in enumerate(tensors, 1)}  # after the stream
        fixed: list[Any] = []

        def keep(value: Any) -> int:
            fixed.append(value)
            return len(positions) + len(fixed)

        launches = []
        for step, kernel in zip(self._steps, compiled, strict=True):
            run, before = entry(kernel)
            arguments = [positions[a] if isinstance(a, str) else keep(a) for a in step.arguments]
            # Each constexpr has a placeholder.
            constants = [None] * (len(step.kernel.ordinary.params) - len(arguments))
            picked = *map(keep, (*step.grid, 1, 1)[:3]), 0, *map(keep, before), *arguments, *map(keep, constants)
            launches.append((run, operator.itemgetter(*picked)))
        self._fixed, self._settings, self._launches = fixed, settings(), launches
