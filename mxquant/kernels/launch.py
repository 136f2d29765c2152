"""Launching a Triton kernel again at a fraction of what its first launch costs the host.

`kernel[grid](...)` binds and inspects each argument and builds a text by which to look the compiled kernel up; at a
batch of one that takes longer than the kernel runs. Here a compiled kernel is found by all that Triton compiled it
for, and launched as Triton itself would. Whatever that does not cover goes the ordinary way.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction

# `CompiledKernel.run` is no public interface; its arguments are the same in these versions. For ROCm, Triton also
# compiles for the sizes of the tensors.
_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
_KNOWN = (3, 6) <= _VERSION <= (3, 9) and torch.version.hip is None
_MOST = 4096


def cached_launch(kernel: Any) -> Any:
    """Decorates a kernel, above `triton.jit`: `kernel[grid](...)` is written as before, and quick from the second time.

    The grid is a tuple. Tensors and ints are given by position, what is `tl.constexpr` after them or by name.
    """
    # A kernel for Triton's interpreter is of another class.
    return _CachedLaunch(kernel) if _KNOWN and isinstance(kernel, JITFunction) else kernel


class _CachedLaunch:
    def __init__(self, kernel: Any) -> None:
        self.ordinary = kernel
        self._constant = tuple(parameter.is_constexpr for parameter in kernel.params)
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], /, *arguments: Any, **constants: Any) -> None:
        driver, runtime = triton.runtime.driver.active, triton.knobs.runtime
        device = driver.get_current_device()
        # Equal ints are compiled for alike. Where a tensor is counts, so that one on no GPU is never passed as a mere
        # address: the ordinary way says what is wrong with it.
        key = [device, runtime.debug, triton.knobs.compilation.instrumentation_mode, *constants.items()]
        values: list[int | None] = []
        addresses = 0
        for value in arguments:
            if type(value) is int or value is None:
                key.append(value)
                values.append(value)
            elif isinstance(value, Tensor):
                address = value.data_ptr()
                addresses |= address
                key += value.dtype, value.get_device()
                values.append(address)
            else:
                self.ordinary[grid](*arguments, **constants)
                return
        compiled = self._compiled.get(tuple(key))
        if compiled is None or addresses % 16 or _heard(runtime.launch_enter_hook) or _heard(runtime.launch_exit_hook):
            compiled = self.ordinary[grid](*arguments, **constants)
            # Kept only if compiled for aligned tensors, and if nothing but constants was given by name.
            if addresses % 16 == 0 and isinstance(compiled, CompiledKernel) and all(self._constant[len(values) :]):
                if len(self._compiled) >= _MOST:
                    self._compiled.clear()
                self._compiled[tuple(key)] = compiled
            return
        stream = driver.get_current_stream(device)
        # A place is kept for each constant.
        values += (None,) * (len(self._constant) - len(values))
        compiled.run(*(*grid, 1, 1)[:3], stream, compiled.function, compiled.packed_metadata, None, None, None, *values)


def _heard(hook: Any) -> bool:
    """Whether a profiler listens to launches, which are then made the ordinary way; a chain of hooks may be empty."""
    return bool(getattr(hook, "calls", hook))


def cdiv(a: int, b: int) -> int:
    """As `triton.cdiv`, which takes as long as a tensor's allocation."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """As `triton.next_power_of_2`."""
    return 1 << (n - 1).bit_length()
