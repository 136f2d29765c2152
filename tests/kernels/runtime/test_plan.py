"""A plan's later calls launch what its first did, with addresses for tensors; seen by a driver without a device."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from kernels.runtime.noting_driver import Driver, Launched, add
from mxquant.kernels.runtime import launch
from mxquant.kernels.runtime.launch import cached_launch, entry
from mxquant.kernels.runtime.plan import Buffer, Plan, Step

pytestmark = pytest.mark.skipif(torch.version.hip is not None, reason="launched the ordinary way")

N, OPTIONS = 100, {"BLOCK": 16, "SUBTRACT": False}
# Of sizes that are no multiples of an alignment.
BETWEEN = {
    "sum": Buffer((N,), torch.float32),
    "half": Buffer((3, 1), torch.bfloat16),
    "last": Buffer((N,), torch.int32),
}
RESULT = Buffer((2, N), torch.float32)


@pytest.fixture
def plan(driver: Driver) -> Plan:
    """Of three launches; tensors and numbers in several places."""
    driver.device = None  # the index of a CPU's device
    kernel = cached_launch(triton.runtime.JITFunction(add))
    steps = [
        Step(kernel, (7,), ("x", "y", "sum", N, 1), OPTIONS),
        Step(kernel, (7, 2), ("sum", "half", "last", 16, N), OPTIONS | {"num_warps": 8}),
        Step(kernel, (7, 2, 3), ("last", "x", "result", N, 3), {"BLOCK": 32, "SUBTRACT": True}),
    ]
    return Plan(("x", "y"), ("result", RESULT), BETWEEN, steps, torch.device("cpu"))


def aligned(start: int = 0) -> Tensor:
    memory = torch.zeros(256)
    assert memory.data_ptr() % 16 == 0
    return memory[start : start + N]


@pytest.fixture
def ordinary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """How many launches went Triton's own way since it was asked last."""
    made: list[None] = []
    run = triton.runtime.JITFunction.run

    def counting(*arguments: Any, **options: Any) -> Any:
        made.append(None)
        return run(*arguments, **options)

    monkeypatch.setattr(triton.runtime.JITFunction, "run", counting)

    def count() -> int:
        number = len(made)
        made.clear()
        return number

    return count


def launched(driver: Driver, plan: Plan, *given: Tensor) -> tuple[Tensor, list[Launched]]:
    driver.launched.clear()
    result = plan(*given)
    return result, list(driver.launched)


def named(launches: list[Launched], result: Tensor, **given: Tensor) -> list[tuple[Any, ...]]:
    """The launches, with names for addresses: those between follow the first one, "sum", at fixed distances."""
    start = launches[0].passed[2]
    assert start is not None
    names = {tensor.data_ptr(): name for name, tensor in {**given, "result": result}.items()}
    names |= {start: "sum", start + 512: "half", start + 1024: "last"}
    return [(*one[:4], [names.get(value, value) for value in one.passed], one.count) for one in launches]  # type: ignore[arg-type]


def test_later_calls_launch_what_the_first_did(driver: Driver, plan: Plan, ordinary: Callable[[], int]) -> None:
    x, y, other = aligned(), aligned(), aligned(4)
    first, launches = launched(driver, plan, x, y)
    assert ordinary() == 3
    expected = named(launches, first, x=x, y=y)
    assert [passed for *_, passed, _ in expected] == [
        ["x", "y", "sum", N, 1], ["sum", "half", "last", 16, N], ["last", "x", "result", N, 3]
    ]  # fmt: skip
    for given in ((x, y), (other, y), (y, x)):
        result, launches = launched(driver, plan, *given)
        assert ordinary() == 0
        assert named(launches, result, x=given[0], y=given[1]) == expected
        assert (result.shape, result.dtype) == (RESULT.shape, RESULT.dtype)
        assert result.data_ptr() != first.data_ptr()


def test_what_lies_between_has_room(driver: Driver, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one allocation, which holds the last of it too."""
    made: list[Tensor] = []
    empty = torch.empty

    def noting(*arguments: Any, **options: Any) -> Tensor:
        made.append(empty(*arguments, **options))
        return made[-1]

    plan(aligned(), aligned())
    monkeypatch.setattr(torch, "empty", noting)
    result, (first, second, _) = launched(driver, plan, aligned(), aligned())
    assert len(made) == 2
    assert made[0] is result
    begin, end = made[1].data_ptr(), made[1].data_ptr() + made[1].nbytes
    places = [first.passed[2], second.passed[1], second.passed[2]]
    for place, following, buffer in zip(places, [*places[1:], end], BETWEEN.values(), strict=True):
        assert begin <= place
        assert place % 16 == 0
        assert place + buffer.nbytes <= following


def test_a_misaligned_tensor_goes_the_ordinary_way(driver: Driver, plan: Plan, ordinary: Callable[[], int]) -> None:
    """It is compiled for anew, and what was compiled for it is not kept for others, nor the other way round."""
    x, misaligned = aligned(), aligned(1)

    def function(*given: Tensor) -> Any:
        return launched(driver, plan, *given)[1][0].function

    for_misaligned, kept = function(misaligned, x), function(x, x)
    assert for_misaligned != kept
    ordinary()
    for given in ((misaligned, x), (x, misaligned)):
        assert function(*given) != kept
        assert ordinary() > 0
        assert function(x, x) == kept
        assert ordinary() == 0


def test_the_current_stream(driver: Driver, plan: Plan) -> None:
    for stream in (0, 3, 0, 5):
        driver.stream = stream
        assert {one.stream for one in launched(driver, plan, aligned(), aligned())[1]} == {(None, stream)}


def test_whoever_listens_hears_every_launch(driver: Driver, plan: Plan) -> None:
    names: list[str] = []

    def hook(data: Any) -> None:
        names.append(data.get()["name"])

    plan(aligned(), aligned())
    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        plan(aligned(), aligned())
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    plan(aligned(), aligned())
    assert names == ["add"] * 3


def test_settings_that_compile_anew(driver: Driver, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    functions = []
    for debug in (False, False, True, True, False):
        monkeypatch.setattr(triton.knobs.runtime, "debug", debug)
        functions.append(launched(driver, plan, aligned(), aligned())[1][0].function)
    assert functions[0] == functions[1] == functions[4] != functions[2] == functions[3]


def test_kernels_that_are_not_cached_stay_so(driver: Driver, ordinary: Callable[[], int]) -> None:
    """Those of an unknown version of Triton."""
    driver.device = None
    steps = [Step(triton.runtime.JITFunction(add), (7,), ("x", "x", "result", N, 1), OPTIONS)]
    plan = Plan(("x",), ("result", RESULT), {}, steps, torch.device("cpu"))
    for _ in range(3):
        plan(aligned())
        assert ordinary() == 1


class CudaLauncher:
    """Of Triton 3.6."""

    launch_cooperative_grid, launch_pdl = False, True

    def __init__(self, global_scratch: int, profile_scratch: int) -> None:
        self.global_scratch_size, self.profile_scratch_size = global_scratch, profile_scratch

    def launch(self) -> None: ...


class Compiled:
    function, packed_metadata = 17, (4, 1, 0)

    def __init__(self, run: Any) -> None:
        self.run = run


def test_the_short_way_into_triton_3_6_is_for_kernels_that_need_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, hungry = Compiled(CudaLauncher(0, 0)), [Compiled(CudaLauncher(8, 0)), Compiled(CudaLauncher(0, 8))]
    monkeypatch.setattr(launch, "_VERSION", (3, 6))
    assert entry(plain) == (plain.run.launch, (17, False, True, None, None, (4, 1, 0), None, None, None))
    for compiled in hungry:
        assert entry(compiled) == (compiled.run, (17, (4, 1, 0), None, None, None))
    monkeypatch.setattr(launch, "_VERSION", (3, 7))
    assert entry(plain) == (plain.run, (17, (4, 1, 0), None, None, None))
