"""Launching a Triton kernel again at a fraction of what its first launch costs the host.

`kernel[grid](...)` binds and inspects each argument and builds a text by which to look the compiled kernel up; at a
batch of one that takes longer than the kernel runs. Here a compiled kernel is found by all that Triton compiled it
for, and launched as Triton itself would. Whatever that does not cover goes the ordinary way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

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
    return CachedLaunch(kernel) if _KNOWN and isinstance(kernel, JITFunction) else kernel


class CachedLaunch:
    """A kernel whose launches are cached; `ordinary` is the one that Triton made."""

    def __init__(self, kernel: JITFunction) -> None:
        self.ordinary = kernel
        self._constant = tuple(parameter.is_constexpr for parameter in kernel.params)
        self._compiled: dict[tuple[Any, ...], tuple[CompiledKernel, Entry]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], /, *arguments: Any, **constants: Any) -> CompiledKernel:
        """Returns what was launched."""
        driver = triton.runtime.driver.active
        device = driver.get_current_device()
        # Equal ints are compiled for alike. Where a tensor is counts, so that one on no GPU is never passed as a mere
        # address: the ordinary way says what is wrong with it.
        key = [device, settings(), *constants.items()]
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
                return self.ordinary[grid](*arguments, **constants)
        known = self._compiled.get(tuple(key))
        if known is None or addresses % 16 or is_observed():
            compiled = self.ordinary[grid](*arguments, **constants)
            # Kept only if compiled for aligned tensors, and if nothing but constants was given by name.
            if addresses % 16 == 0 and isinstance(compiled, CompiledKernel) and all(self._constant[len(values) :]):
                if len(self._compiled) >= _MOST:
                    self._compiled.clear()
                self._compiled[tuple(key)] = compiled, entry(compiled)
            return compiled
        compiled, (run, fixed) = known
        # A place is kept for each constant.
        values += (None,) * (len(self._constant) - len(values))
        run(*(*grid, 1, 1)[:3], driver.get_current_stream(device), *fixed, *values)
        return compiled


class Entry(NamedTuple):
    """How to launch a compiled kernel: `run(x, y, z, stream, *fixed, *arguments)`, with x, y and z of the grid, an
    address for each tensor and None for each constant.
    """

    run: Callable[..., None]
    fixed: tuple[Any, ...]


def entry(compiled: CompiledKernel) -> Entry:
    run, hooks = compiled.run, (None, None, None)  # what they would be told, and those before and after
    is_known = _VERSION == (3, 6) and type(run).__name__ == "CudaLauncher"
    if is_known and run.global_scratch_size == run.profile_scratch_size == 0:
        # What `run` calls after allocating what the kernel asks for, here nothing. It takes less than half as long.
        kind = run.launch_cooperative_grid, run.launch_pdl
        return Entry(run.launch, (compiled.function, *kind, None, None, compiled.packed_metadata, *hooks))
    return Entry(run, (compiled.function, compiled.packed_metadata, *hooks))


def settings() -> tuple[object, ...]:
    """What else Triton compiles for."""
    return triton.knobs.runtime.debug, triton.knobs.compilation.instrumentation_mode


def is_observed() -> bool:
    """Whether a profiler listens to launches, which are then made the ordinary way; a chain of hooks may be empty."""
    enter, leave = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def cdiv(a: int, b: int) -> int:
    """As `triton.cdiv`, which takes as long as a tensor's allocation."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """As `triton.next_power_of_2`."""
    return 1 << (n - 1).bit_length()


@functools.lru_cache(maxsize=64)
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; 1 elsewhere, where kernels are interpreted."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1
