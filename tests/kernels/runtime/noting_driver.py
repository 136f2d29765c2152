"""A driver of Triton's that compiles for compute capability 9.0, but has no device: what would be launched is noted."""

from typing import Any, NamedTuple

import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget

RUNTIME_ARGUMENTS = 5


def add(x: tl.tensor, y: tl.tensor, out: tl.tensor, n: tl.tensor, stride: tl.tensor, BLOCK: tl.constexpr,
        SUBTRACT: tl.constexpr) -> None:  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(x + at * stride, mask=at < n)
    if y is not None:
        other = tl.load(y + at * stride, mask=at < n)
        total = total - other if SUBTRACT else total + other
    tl.store(out + at, total, mask=at < n)


class Launched(NamedTuple):
    grid: tuple[int, int, int]
    stream: Any
    function: Any
    packed: Any
    passed: list[int | None]
    """Addresses and numbers; constants are left out."""
    count: int
    """Of the arguments, constants included."""


class Driver:
    """What Triton asks of a driver, and of its `utils`; `launched` is filled by what it takes for its launcher."""

    def __init__(self) -> None:
        self.device: int | None = 0
        self.stream = 0
        self.launched: list[Launched] = []
        self.utils = self

    def get_current_device(self) -> int | None:
        return self.device

    def get_current_stream(self, device: int) -> tuple[int, int]:
        return device, self.stream

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 1 << 17}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        """Module (none, so that there is none to unload), function, registers, spills, threads at most."""
        return None, (id(binary), device), 32, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return self.note

    def note(self, x: int, y: int, z: int, stream: Any, function: Any, packed: Any, data: Any, enter: Any, leave: Any,
             *arguments: Any) -> None:  # fmt: skip
        for hook in (enter, leave):
            if hook is not None:
                hook(data)
        passed = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments[:RUNTIME_ARGUMENTS]]
        self.launched.append(Launched((x, y, z), stream, function, packed, passed, len(arguments)))
