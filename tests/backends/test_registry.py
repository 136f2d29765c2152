"""Selection: in order, with reasons, never raising and never guessing."""

import dataclasses
import itertools
import logging
import textwrap
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from matmul_reference import ACTIVATIONS, FORMATS, activation64, assert_product, decode64
from torch import Tensor

import mxquant
from mxquant import EmulatedMXTensor, MXTensor, list_backends, quantize, register_backend
from mxquant.backends import (
    ANY_LAYOUT,
    FORWARD,
    Backend,
    Operand,
    Problem,
    candidates,
    registry,
    select_backend,
    unregister_backend,
)
from mxquant.formats import get_format, resolve_scale_mode
from mxquant.scheme import Scheme
from mxquant.tensor import as_weight

pytestmark = pytest.mark.usefixtures("registry_restored")

NVIDIA_ONLY = ("fp8", "fp16")
CAPABILITIES = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)]


def problem(**changes: Any) -> Problem:
    """W4A4 of MXFP4, with `changes` to the fields of the problem and of its scheme."""
    names = {field.name for field in dataclasses.fields(Scheme)} & changes.keys()
    scheme = {"weight": "mxfp4", "activation": "mxfp4"} | {name: changes.pop(name) for name in names}
    base = Problem(
        Scheme(**scheme),
        out_features=128,
        in_features=256,
        block_offset=0,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        capability=None,
    )
    return dataclasses.replace(base, **changes)


class Doubling(Backend):
    """Takes weight-only MXFP4 and gives twice the product, so that its use shows."""

    name = "doubling"

    def reject(self, problem: Problem) -> str | None:
        if problem.weight != "mxfp4":
            return f"reads mxfp4 only, not {problem.weight}"
        if problem.activation is not None:
            return "weight-only"
        return None if problem.contraction == FORWARD else "contracts along the blocked axis only"

    def matmul(self, x: Tensor, weight: Operand, bias: Tensor | None, problem: Problem) -> Tensor:
        from mxquant.formats.block import dequantize_blocks

        w = dequantize_blocks(weight.qdata, weight.scale, get_format("mxfp4"), problem.in_features)
        y = 2 * (x.float() @ w.t())
        return (y if bias is None else y + bias).to(problem.dtype)


def test_a_device_that_is_absent_has_its_own_reason() -> None:
    absent = dict(candidates(problem(device=torch.device("cuda"))))
    here = dict(candidates(problem()))
    for name in ("fp8", "fp16", "triton"):
        assert absent[name] == "no CUDA device is here, so it cannot be asked"
        assert str(here[name]).endswith(" GPU, this is cpu")


# Order and registration


@pytest.mark.usefixtures("fixed_backends")
def test_emulation_is_last_and_takes_everything() -> None:
    assert list_backends()[-1] == "emulation"
    register_backend(Doubling)
    assert list_backends()[-2:] == ["doubling", "emulation"]
    assert select_backend(problem(activation=None, activation_scale_mode=None)).name == "doubling"
    assert select_backend(problem()).name == "emulation"


def test_before_names_the_backend_to_precede() -> None:
    class Third(Doubling):
        name = "third"

    register_backend(Doubling)
    register_backend(Third, before="doubling")
    names = list_backends()
    assert names.index("third") + 1 == names.index("doubling")


def test_register_backend_is_a_decorator() -> None:
    @register_backend
    class Decorated(Doubling):
        name = "decorated"

    assert isinstance(Decorated, type)
    assert "decorated" in list_backends()


class Nameless(Backend):
    def reject(self, problem: Problem) -> str | None:
        return None

    def matmul(self, x: Tensor, weight: Operand, bias: Tensor | None, problem: Problem) -> Tensor:
        return x


class Unfinished(Backend):
    name = "unfinished"


@pytest.mark.parametrize(
    "cls", [int, "emulation", pytest.param(object(), id="an object"), Unfinished, Nameless], ids=str
)
def test_classes_that_are_no_backend_are_refused(cls: object) -> None:
    before = list_backends()
    with pytest.raises((TypeError, ValueError)):
        register_backend(cls)  # type: ignore[type-var]
    assert list_backends() == before


@pytest.mark.parametrize("taken", ["emulation", "auto", ""])
def test_names_that_are_taken_are_refused(taken: str) -> None:
    cls = type("Taken", (Doubling,), {"name": taken})
    with pytest.raises(ValueError, match=f"'{taken}' is taken; registered: "):
        register_backend(cls)


def test_registering_twice_is_refused() -> None:
    register_backend(Doubling)
    with pytest.raises(ValueError, match=r"'doubling' is taken; .*\.unregister_backend\('doubling'\) frees it"):
        register_backend(Doubling)


def test_an_unknown_before_is_refused_with_the_known_names() -> None:
    with pytest.raises(ValueError, match=r"(?s)nowhere.*emulation"):
        register_backend(Doubling, before="nowhere")
    assert "doubling" not in list_backends()


@pytest.mark.usefixtures("fixed_backends")
def test_a_backend_registered_later_serves_existing_tensors() -> None:
    """Selection happens at the call; what was chosen earlier is forgotten when the registry changes."""
    x, weight = torch.randn(3, 64), quantize(torch.randn(8, 64), "mxfp4")
    plain = F.linear(x, weight)
    register_backend(Doubling)
    torch.testing.assert_close(F.linear(x, weight), 2 * plain)
    unregister_backend("doubling")
    assert torch.equal(F.linear(x, weight), plain)


# Requests


def test_an_explicit_backend_is_used() -> None:
    register_backend(Doubling)
    x, weight = torch.randn(3, 64), quantize(torch.randn(8, 64), "mxfp4")
    named, emulated = as_weight(weight, "doubling"), as_weight(weight, "emulation")
    assert (type(named), named.backend) == (MXTensor, "doubling")
    assert (type(emulated), emulated.backend) == (EmulatedMXTensor, "emulation")
    torch.testing.assert_close(F.linear(x, named), 2 * F.linear(x, emulated))
    assert_product(F.linear(x, emulated), x.double(), decode64(weight))


@pytest.mark.parametrize(
    "name, hint", [("cuda", 'a device is no backend: leave backend="auto"'), ("Triton", "did you mean 'triton'")]
)
def test_a_near_miss_of_a_backends_name_is_answered_with_the_remedy(name: str, hint: str) -> None:
    with pytest.raises(ValueError, match=f"backend '{name}' is unknown; registered: .*; {hint}"):
        select_backend(problem(), name)


@pytest.mark.usefixtures("fixed_backends")
def test_auto_takes_the_native_backend_first() -> None:
    register_backend(Doubling)
    assert type(as_weight(quantize(torch.randn(8, 64), "mxfp4"))) is MXTensor
    assert type(as_weight(quantize(torch.randn(8, 64), "nvfp4"))) is EmulatedMXTensor


def message(requested: str, **changes: object) -> str:
    with pytest.raises(ValueError) as caught:
        select_backend(problem(**changes), requested)
    return textwrap.fill(str(caught.value), 100)


@pytest.mark.usefixtures("fixed_backends")
def test_an_explicit_backend_is_used_or_an_error_says_why_not() -> None:
    register_backend(Doubling)
    assert_expected_inline(
        message("typo"), """backend 'typo' is unknown; registered: fp8, fp16, triton, doubling, emulation"""
    )
    assert_expected_inline(
        message("doubling"),
        """\
backend 'doubling' cannot compute this matmul: weight-only. Use backend="auto" for the best one that
can, or explain() for what each says""",
    )
    assert_expected_inline(
        message("doubling", weight="nvfp4"),
        """\
backend 'doubling' cannot compute this matmul: reads mxfp4 only, not nvfp4. Use backend="auto" for
the best one that can, or explain() for what each says""",
    )
    weight = quantize(torch.randn(8, 64), "mxfp8").with_activation("mxfp8")
    for requested, text in (("typo", "(?s)typo.*emulation"), ("doubling", "(?s)doubling.*mxfp4 only.*mxfp8_e4m3")):
        with pytest.raises(ValueError, match=text):
            as_weight(weight, requested)


def test_an_explicit_backend_that_rejects_the_call_raises() -> None:
    """A weight that was bound to a backend and later asks for what it cannot compute: an error, not emulation."""
    register_backend(Doubling)
    weight = as_weight(quantize(torch.randn(8, 64), "mxfp4"), "doubling")
    with pytest.raises(ValueError, match=r"(?s)doubling.*weight-only"):
        F.linear(torch.randn(3, 64), weight.with_activation("mxfp4"))
    with pytest.raises(ValueError, match=r"(?s)doubling.*blocked axis"):
        torch.randn(3, 8) @ weight


# Capabilities

DEVICES = [("cpu", None), ("meta", None), ("mps", None), ("xpu", None), *(("cuda", c) for c in CAPABILITIES)]


@pytest.mark.parametrize("device, capability", DEVICES)
def test_selection_never_raises_and_always_finds_something(device: str, capability: tuple[int, int] | None) -> None:
    """Every format pair, odd shapes, every dtype, on every machine, present here or not."""
    pairs = itertools.product(FORMATS, ACTIVATIONS)
    shapes = [(1, 1), (1, 32), (464, 176), (232, 40), (128, 2880), (0, 64), (130, 100)]
    for (weight, activation), (n, k) in itertools.product(pairs, shapes):
        mode = None
        if activation is not None:
            mode = resolve_scale_mode(get_format(activation, activation=True), None)
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
            asked = problem(
                weight=weight, activation=activation, activation_scale_mode=mode, out_features=n, in_features=k,
                dtype=dtype, device=torch.device(device), capability=capability,
            )  # fmt: skip
            answers = candidates(asked)
            assert [name for name, _ in answers] == list_backends()
            assert answers[-1] == ("emulation", None)
            assert all(reason is None or (isinstance(reason, str) and reason) for _, reason in answers)
            assert select_backend(asked).name == next(name for name, reason in answers if reason is None)


ROCM = {"gfx90a": (9, 0), "gfx942": (9, 4), "gfx950": (9, 5)}  # as torch.cuda.get_device_capability gives them


@pytest.mark.parametrize("architecture", ROCM)
def test_nvidia_kernels_decline_amd_gpus(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """ROCm calls its devices "cuda" and counts its architectures as capabilities, one of which is Hopper's 9.0."""
    monkeypatch.setattr(torch.version, "hip", "7.0.0")
    registry.preferences.cache_clear()
    try:
        test_selection_never_raises_and_always_finds_something("cuda", ROCM[architecture])
        for activation in (None, "mxfp4"):
            asked = problem(
                activation=activation, activation_scale_mode="even" if activation else None,
                device=torch.device("cuda"), capability=ROCM[architecture], layout=ANY_LAYOUT,
            )  # fmt: skip
            reasons = dict(candidates(asked))
            assert all("NVIDIA" in str(reasons[name]) for name in NVIDIA_ONLY)
    finally:
        registry.preferences.cache_clear()


@pytest.mark.usefixtures("fixed_backends")
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_tensor_core_backends_take_their_own_capability_only(capability: tuple[int, int]) -> None:
    """Hopper's instructions are on no other GPU, older or newer. The others get what runs from 8.0 on, or emulation."""
    for activation in (None, "mxfp4"):
        mode = "even" if activation else None
        asked = problem(
            activation=activation, activation_scale_mode=mode, device=torch.device("cuda"), capability=capability,
            layout=ANY_LAYOUT,
        )  # fmt: skip
        chosen = select_backend(asked).name
        if capability == (9, 0):
            assert chosen == ("fp8" if activation else "fp16" if "fp16" in list_backends() else "triton")
        else:
            assert chosen == ("triton" if capability >= (8, 0) else "emulation")


@pytest.mark.parametrize(
    "changes",
    [{"block_offset": 7}, {"contraction": "unblocked", "activation": None, "activation_scale_mode": None},
     {"static_activation_scale": True, "activation": "nvfp4"}],
    ids=["off a border", "unblocked", "static scale"],
)  # fmt: skip
def test_unusual_problems_find_a_backend(changes: dict[str, object]) -> None:
    for device, capability in DEVICES:
        asked = problem(device=torch.device(device), capability=capability, **changes)
        assert select_backend(asked).reject(asked) is None


def test_problems_are_hashable_and_describe_themselves() -> None:
    assert hash(problem()) == hash(problem())
    assert problem() != problem(in_features=64)
    assert "mxfp4" in repr(problem())


@pytest.mark.parametrize("format", FORMATS)
def test_every_registered_backend_serves_a_tiny_layer(format: str) -> None:
    """Whatever is selectable converts the weight and multiplies: no backend without a branch for its conversion."""
    x, weight = torch.randn(3, 64), quantize(torch.randn(8, 64), format)
    for activation in ACTIVATIONS:
        bound = weight.with_activation(activation)
        for name in list_backends():
            try:
                served = as_weight(bound, name)
            except ValueError as error:
                assert name in str(error)  # noqa: PT017
                continue
            assert_product(F.linear(x, served), activation64(x, activation), decode64(weight))


# The log


@pytest.mark.usefixtures("fixed_backends")
def test_emulation_on_an_accelerator_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    registry._log_emulation.cache_clear()
    registry.preferences.cache_clear()
    with caplog.at_level(logging.DEBUG, logger="mxquant"):
        for k in (64, 96, 128):
            select_backend(problem(device=torch.device("cuda"), capability=(7, 5), in_features=k))
    assert len(caplog.records) == 1
    assert caplog.records[0].levelno == logging.WARNING
    assert "emulat" in caplog.text
    assert "cuda" in caplog.text


@pytest.mark.usefixtures("fixed_backends")
def test_emulation_on_a_cpu_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    registry.preferences.cache_clear()
    with caplog.at_level(logging.DEBUG, logger="mxquant"):
        select_backend(problem())
        select_backend(problem(device=torch.device("meta")))
    assert not caplog.records


def test_the_public_names() -> None:
    assert mxquant.register_backend is register_backend
    assert mxquant.list_backends is list_backends
