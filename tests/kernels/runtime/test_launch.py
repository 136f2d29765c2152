"""A cached launch passes on what an ordinary one does, seen by a driver that compiles but has no device.

Kernels are compiled for compute capability 9.0, the interpreter notwithstanding, and what would be launched is noted.
"""

import itertools
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from kernels.runtime.noting_driver import Driver, add
from mxquant.kernels.runtime import launch
from mxquant.kernels.runtime.launch import cached_launch, cdiv, next_power_of_2

pytestmark = pytest.mark.skipif(torch.version.hip is not None, reason="launched the ordinary way")


class Kernel:
    """`add` both ways, and how often it was launched the ordinary way."""

    def __init__(self) -> None:
        self.ordinary = triton.runtime.JITFunction(add)
        self.cached = cached_launch(self.ordinary)
        self.ordinary_launches = 0
        run = self.ordinary.run

        def counting(*arguments: Any, **options: Any) -> Any:
            self.ordinary_launches += 1
            return run(*arguments, **options)

        self.ordinary.run = counting


MEMORY = torch.zeros(256)
TENSORS = [MEMORY, MEMORY[64:], MEMORY.bfloat16(), MEMORY.int(), MEMORY[1:]]  # the last off a multiple of 16 bytes
SIZES = [1, 2, 16, 17, 2**31, 2**31 + 1, 2**33 + 16]
OPTIONS: list[dict[str, Any]] = [
    {"BLOCK": 16, "SUBTRACT": False},
    {"BLOCK": 32, "SUBTRACT": False},
    {"BLOCK": 16, "SUBTRACT": True},
    {"BLOCK": 16, "SUBTRACT": False, "num_warps": 8},
    {"BLOCK": 16, "SUBTRACT": False, "num_warps": 4, "num_stages": 2},
]
CASES: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    *(((x, None, MEMORY, 5, 1), OPTIONS[0]) for x in TENSORS),
    *(((MEMORY, y, MEMORY, 5, 1), OPTIONS[0]) for y in TENSORS),
    *(((MEMORY, None, MEMORY, n, stride), OPTIONS[0]) for n, stride in itertools.product(SIZES, (1, 3, 16))),
    *(((MEMORY, MEMORY, MEMORY, 5, 1), options) for options in OPTIONS),
]


def test_every_launch_is_the_ordinary_one(driver: Driver) -> None:
    """The same compiled kernel, grid, stream and arguments, whatever was launched before."""
    kernel = Kernel()
    for arguments, options in CASES:
        kernel.cached[(2,)](*arguments, **options)
    for grid in ((3,), (3, 2), (3, 2, 4)):
        for arguments, options in CASES:
            kernel.ordinary[grid](*arguments, **options)
            before = kernel.ordinary_launches
            kernel.cached[grid](*arguments, **options)
            misaligned = any(isinstance(a, Tensor) and a.data_ptr() % 16 for a in arguments)
            assert kernel.ordinary_launches - before == misaligned
            expected, got = driver.launched[-2:]
            assert got[0] == (*grid, 1, 1)[:3]
            assert got == expected, (arguments, options)


def test_streams_and_devices_are_the_current_ones(driver: Driver) -> None:
    kernel = Kernel()
    functions = set()
    for device, stream in ((0, 0), (0, 1), (1, 0), (1, 3), (0, 2)):
        driver.device, driver.stream = device, stream
        kernel.cached[(1,)](MEMORY, MEMORY, MEMORY, 5, 1, **OPTIONS[0])
        _, launched_on, function, *_ = driver.launched[-1]
        assert launched_on == (device, stream)
        functions.add((device, function))
    assert len(functions) == 2
    assert kernel.ordinary_launches == 2


def test_hooks_hear_every_launch_and_only_while_they_are_there(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, names = Kernel(), []

    def launch_once() -> None:
        kernel.cached[(1,)](MEMORY, MEMORY, MEMORY, 5, 1, **OPTIONS[0])

    def hook(data: Any) -> None:
        names.append(data.get()["name"])

    launch_once()
    for name in ("launch_enter_hook", "launch_exit_hook"):
        getattr(triton.knobs.runtime, name).add(hook)
        launch_once()
        getattr(triton.knobs.runtime, name).remove(hook)
        monkeypatch.setattr(triton.knobs.runtime, name, hook)
        launch_once()
        monkeypatch.undo()
        monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    launch_once()
    assert names == ["add"] * 4
    assert kernel.ordinary_launches == 5


def test_settings_that_compile_anew(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()
    for debug in (False, True, False, True):
        monkeypatch.setattr(triton.knobs.runtime, "debug", debug)
        kernel.cached[(1,)](MEMORY, MEMORY, MEMORY, 5, 1, **OPTIONS[0])
    plain, debugged, *again = (function for _, _, function, *_ in driver.launched)
    assert plain != debugged
    assert again == [plain, debugged]
    assert kernel.ordinary_launches == 2


def test_a_tensor_elsewhere_is_never_a_mere_address(driver: Driver) -> None:
    class Elsewhere(Tensor):
        def get_device(self) -> int:
            return 1

    kernel = Kernel()
    for x in (MEMORY, MEMORY.as_subclass(Elsewhere), MEMORY):
        kernel.cached[(1,)](x, MEMORY, MEMORY, 5, 1, **OPTIONS[0])
    assert kernel.ordinary_launches == 2


@pytest.mark.parametrize("n", [5.0, True])
def test_what_is_neither_a_tensor_nor_an_int_goes_the_ordinary_way(driver: Driver, n: object) -> None:
    kernel = Kernel()
    for _ in range(2):
        kernel.cached[(1,)](MEMORY, MEMORY, MEMORY, n, 1, **OPTIONS[0])
    kernel.cached[(1,)](MEMORY, MEMORY, MEMORY, int(n), 1, **OPTIONS[0])  # type: ignore[call-overload]
    assert kernel.ordinary_launches == 3


def test_numbers_by_name_go_the_ordinary_way(driver: Driver) -> None:
    kernel = Kernel()
    for _ in range(2):
        kernel.cached[(1,)](MEMORY, MEMORY, MEMORY, 5, stride=1, **OPTIONS[0])
    assert kernel.ordinary_launches == 2


def test_names_of_constants_count(driver: Driver) -> None:
    kernel = Kernel()
    kernel.cached[(1,)](MEMORY, MEMORY, MEMORY, 5, 1, BLOCK=1, SUBTRACT=0)
    kernel.cached[(1,)](MEMORY, MEMORY, MEMORY, 5, 1, SUBTRACT=1, BLOCK=2)
    kernel.cached[(1,)](MEMORY, MEMORY, MEMORY, 5, 1, BLOCK=1, SUBTRACT=2)
    kernel.cached[(1,)](MEMORY, MEMORY, MEMORY, 5, 1, SUBTRACT=0, BLOCK=1)
    first, *others, last = (function for _, _, function, *_ in driver.launched)
    assert first == last
    assert len({first, *others}) == 3


def test_few_compiled_kernels_are_kept(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_MOST", 4)
    kernel = Kernel()
    for n in range(2, 15):
        kernel.cached[(1,)](MEMORY, MEMORY, MEMORY, n, 1, **OPTIONS[0])
        assert len(kernel.cached._compiled) <= 4


def test_interpreted_kernels_and_unknown_versions_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreted, compiled = triton.runtime.interpreter.InterpretedFunction(add), triton.runtime.JITFunction(add)
    assert cached_launch(interpreted) is interpreted
    assert cached_launch(compiled) is not compiled
    monkeypatch.setattr(launch, "_KNOWN", False)
    assert cached_launch(compiled) is compiled


def test_arithmetic_is_that_of_triton() -> None:
    for n in range(1, 300):
        assert next_power_of_2(n) == triton.next_power_of_2(n)
        for divisor in (1, 2, 7, 32, 128):
            assert cdiv(n, divisor) == triton.cdiv(n, divisor)
