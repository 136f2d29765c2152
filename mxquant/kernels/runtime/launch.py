"""Cached launches: launching a Triton kernel again costs the host a fraction of the first launch.

Triton's `kernel[grid](...)` inspects each argument and builds a string to look up the compiled kernel. At a batch of
one that takes longer than the kernel runs. Here a compiled kernel is looked up by everything that Triton specialized it
for, and launched as Triton would. Any other launch takes Triton's own way.
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

# NOTE: `CompiledKernel.run` is private; its arguments are the same in these versions. For ROCm, Triton also specializes
# for the sizes of tensors.
_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
_KNOWN = (3, 6) <= _VERSION <= (3, 9) and torch.version.hip is None
_MOST = 4096


def cached_launch(kernel: Any) -> Any:
    """Decorates a kernel, above `triton.jit`: `kernel[grid](...)` is cached from the second launch on.

    The grid is a tuple. Tensors and ints come first, by position; constexprs come after them or by name.
    """
    # In Triton's interpreter a kernel is of another class.
    return CachedLaunch(kernel) if _KNOWN and isinstance(kernel, JITFunction) else kernel


class CachedLaunch:
    """A kernel whose launches are cached; `ordinary` is Triton's."""

    def __init__(self, kernel: JITFunction) -> None:
        self.ordinary = kernel
        self._constant = tuple(parameter.is_constexpr for parameter in kernel.params)
        self._compiled: dict[tuple[Any, ...], tuple[CompiledKernel, Entry]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], /, *arguments: Any, **constants: Any) -> CompiledKernel:
        """Returns the compiled kernel."""
        driver = triton.runtime.driver.active
        device = driver.get_current_device()
        # Equal ints are specialized alike. The device of each tensor is part of the key, so that a tensor on the CPU is
        # never passed as an address: Triton refuses it.
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
            # Kept only if specialized for aligned tensors, and if only constexprs were given by name.
            if addresses % 16 == 0 and isinstance(compiled, CompiledKernel) and all(self._constant[len(values) :]):
                if len(self._compiled) >= _MOST:
                    self._compiled.clear()
                self._compiled[tuple(key)] = compiled, entry(compiled)
            return compiled
        compiled, (run, fixed) = known
        # Each constexpr has a placeholder.
        values += (None,) * (len(self._constant) - len(values))
        run(*(*grid, 1, 1)[:3], driver.get_current_stream(device), *fixed, *values)
        return compiled


class Entry(NamedTuple):
    """How to launch a compiled kernel: `run(x, y, z, stream, *fixed, *arguments)`, with the grid x, y, z.

    The arguments are an address for each tensor and None for each constexpr.
    """

    run: Callable[..., None]
    fixed: tuple[Any, ...]


def entry(compiled: CompiledKernel) -> Entry:
    run, hooks = compiled.run, (None, None, None)  # launch metadata, enter hook, exit hook
    is_known = _VERSION == (3, 6) and type(run).__name__ == "CudaLauncher"
    if is_known and run.global_scratch_size == run.profile_scratch_size == 0:
        # `run` allocates scratch memory, here none, and calls this: less than half the time.
        kind = run.launch_cooperative_grid, run.launch_pdl
        return Entry(run.launch, (compiled.function, *kind, None, None, compiled.packed_metadata, *hooks))
    return Entry(run, (compiled.function, compiled.packed_metadata, *hooks))


def settings() -> tuple[object, ...]:
    """The settings that Triton specializes for, too."""
    return triton.knobs.runtime.debug, triton.knobs.compilation.instrumentation_mode


def is_observed() -> bool:
    """Whether a profiler hooks launches, which then take Triton's own way. NOTE: a chain of hooks may be empty."""
    enter, leave = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def cdiv(a: int, b: int) -> int:
    """`triton.cdiv`, which itself takes as long as allocating a tensor."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """`triton.next_power_of_2`, in less time."""
    return 1 << (n - 1).bit_length()


@functools.lru_cache(maxsize=64)
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 elsewhere, where kernels are interpreted."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1
