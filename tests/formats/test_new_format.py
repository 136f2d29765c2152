"""A format that is not the package's own works from its spec and its codec alone, and every kernel declines it.

Six-bit two's complement integers with four fractional bits, a power of two shared by each 32: an MXINT6. It is
registered as CONTRIBUTING says, for the duration of a test.
"""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mxquant import MXTensor, explain, flatten_state_dict, quantize, quantize_, unflatten_state_dict
from mxquant import config as configs
from mxquant.backends.registry import candidates
from mxquant.formats import ELEMENT_FORMATS, FORMATS, WEIGHT_FORMATS, ElementFormat, Format
from mxquant.formats.element import CODECS, Codec, encode, round_to_element
from mxquant.kernels import has_triton
from mxquant.tensor.choose import describe

INT6 = ElementFormat("int6", "integer", 6, mantissa_bits=4, min_exponent=0, max_exponent=0, max_value=31 / 16)
MXINT6 = Format("mxint6", INT6, 32, "e8m0", ("floor", "even"), "even")


def encode_integer(values: Tensor, element: ElementFormat) -> Tensor:
    steps = round_to_element(values, element) * 2.0**element.mantissa_bits
    return steps.to(torch.int32) & ((1 << element.bits) - 1)


def encode_full_range(values: Tensor, element: ElementFormat) -> Tensor:
    steps = (values * 2.0**element.mantissa_bits).round().clamp(-element.sign_code, element.sign_code - 1)
    return steps.to(torch.int32) & ((1 << element.bits) - 1)


def integer_value(code: int, element: ElementFormat) -> float:
    return (code - (1 << element.bits if code >= element.sign_code else 0)) / 2.0**element.mantissa_bits


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ELEMENT_FORMATS, INT6.name, INT6)
    monkeypatch.setitem(FORMATS, MXINT6.name, MXINT6)
    monkeypatch.setitem(CODECS, INT6.kind, Codec(encode_integer, integer_value))  # type: ignore[arg-type]
    monkeypatch.setattr(configs, "WEIGHT_FORMATS", (*WEIGHT_FORMATS, MXINT6.name))


def on_grid(x: Tensor) -> np.ndarray:
    """What the format makes of `x` [..., 32 n] in mode floor, in float64."""
    blocks = x.double().numpy().reshape(-1, 32)
    scale = 2.0 ** np.floor(np.log2(np.abs(blocks).max(-1, keepdims=True)))
    return (np.clip(np.rint(blocks / scale * 16), -31, 31) / 16 * scale).reshape(x.shape)


def test_codes_are_rounded_to_nearest_even_and_saturate() -> None:
    ties = torch.tensor([0.0, 0.5, 1.5, 2.5, -0.5, -1.5, 31.0, 31.5, 40.0, -31.0, -40.0]) / 16
    assert encode(ties, INT6).tolist() == [0, 0, 2, 2, 0, 62, 31, 31, 31, 33, 33]
    assert encode(-torch.zeros(1), INT6, canonical_zero=True).tolist() == [0]


def test_canonical_zero_keeps_the_most_negative_integer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A codec that uses the whole range writes `sign_code` for -2.0. That code is no zero."""
    full_range = Codec(encode_full_range, integer_value)
    monkeypatch.setitem(CODECS, INT6.kind, full_range)
    values = torch.tensor([-2.0, -0.0, -40.0, 1.0])
    assert encode(values, INT6, canonical_zero=True).tolist() == [32, 0, 32, 16]
    monkeypatch.setitem(CODECS, INT6.kind, full_range._replace(has_negative_zero=True))  # the control
    assert encode(values, INT6, canonical_zero=True).tolist() == [0, 0, 0, 16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_it_quantizes_and_dequantizes(dtype: torch.dtype) -> None:
    x = torch.randn(5, 96).to(dtype)
    found = quantize(x, "mxint6", scale_mode="floor")
    assert found.qdata.shape == (5, 72)
    np.testing.assert_array_equal(found.dequantize(torch.float64).numpy(), on_grid(x))
    partial = quantize(x, "mxint6", scale_mode="floor", axis=0)
    expected = on_grid(F.pad(x.t(), (0, 27)))[:, :5].T
    np.testing.assert_array_equal(partial.dequantize(torch.float64).numpy(), expected)


@pytest.mark.parametrize("exponent", [-149, -135, -128, -127, -126, 0, 126, 127])
@pytest.mark.parametrize("mode", ["floor", "even"])
def test_its_largest_and_smallest_blocks(exponent: int, mode: str) -> None:
    """Its largest power of two is 1, so its scales reach 2^127, the largest there is."""
    x = torch.zeros(3, 32)
    x[:, 0] = torch.tensor([1.0, 1.5, 1.99]) * 2.0**exponent
    found = quantize(x, "mxint6", scale_mode=mode)
    byte = min(max(exponent, -127) + 127, 254)
    rounded_up = 1 if mode == "even" and -127 <= exponent < 127 else 0
    assert found.scale.flatten().tolist() == [byte, byte, byte + rounded_up]
    error = (found.dequantize(torch.float64) - x.double()).abs().max().item()
    assert error <= 2.0 ** max(exponent, -127) / 16


@pytest.mark.parametrize("activation", ["same", None, "mxfp8", "nvfp4"])
def test_a_linear_multiplies_it_by_emulation(activation: str | None) -> None:
    linear, x = nn.Linear(64, 48), torch.randn(7, 64)
    quantize_(linear, {"linear": {"weight": "mxint6", "activation": activation}})
    assert explain(linear).chosen == "emulation"
    w = linear.weight
    assert isinstance(w, MXTensor)
    given = x
    if activation is not None:
        given = quantize(x, "mxint6" if activation == "same" else activation).dequantize()
        if activation == "nvfp4":  # activations have one scale a row
            given = torch.cat([quantize(row, "nvfp4").dequantize() for row in x.split(1)])
    expected = F.linear(given, w.dequantize(), linear.bias)
    torch.testing.assert_close(linear(x), expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(linear(x), F.linear(x, w.dequantize() * 1.1, linear.bias), atol=1e-3)


def test_it_is_saved_and_loaded(tmp_path: Path) -> None:
    linear = nn.Linear(64, 48)
    quantize_(linear, "mxint6")
    expected = linear(x := torch.randn(3, 64))
    torch.save(linear.state_dict(), tmp_path / "state.pt")
    for state in (
        torch.load(tmp_path / "state.pt"),
        unflatten_state_dict(*flatten_state_dict(linear.state_dict())),
        copy.deepcopy(linear).state_dict(),
    ):
        loaded = nn.Linear(64, 48)
        loaded.load_state_dict(state, assign=True)
        assert loaded.weight.format == "mxint6"
        assert torch.equal(loaded.weight.qdata, linear.weight.qdata)
        assert torch.equal(loaded(x), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("rotation", [None, 32])
def test_a_gpu_gives_its_bytes_without_a_kernel(rotation: int | None) -> None:
    x = torch.randn(5, 96)
    here, there = (quantize(t, "mxint6", rotation=rotation) for t in (x, x.cuda()))
    assert torch.equal(there.qdata.cpu(), here.qdata)
    assert torch.equal(there.scale.cpu(), here.scale)


@pytest.mark.skipif(not has_triton(), reason="needs triton")
def test_every_kernel_declines_it_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from mxquant.kernels.quantize import dequantize, fake_quantize, gptq_columns, strided

    def reasons() -> list[str | None]:
        return [
            strided.reject(MXINT6, "even", torch.bfloat16),
            dequantize.reject(MXINT6),
            fake_quantize.reject(MXINT6, "even", torch.bfloat16),
            gptq_columns.reject(INT6),
        ]

    assert all("int6" in str(reason) for reason in reasons())
    for kernel in (strided, dequantize, fake_quantize):  # the control: a kernel that names it
        monkeypatch.setattr(kernel, "FORMATS", (*kernel.FORMATS, "mxint6"))
    monkeypatch.setattr(gptq_columns, "ELEMENTS", (*gptq_columns.ELEMENTS, "int6"))
    assert reasons() == [None] * 4


@pytest.mark.skipif(not has_triton(), reason="needs triton")
@pytest.mark.parametrize("weight, activation", [("mxint6", None), ("mxint6", "mxint6"), ("mxfp4", "mxint6")])
def test_every_kernel_backend_declines_it(weight: str, activation: str | None) -> None:
    linear = nn.Linear(64, 64)
    quantize_(linear, {"linear": {"weight": weight, "activation": activation}})
    problem = dataclasses.replace(
        describe(linear.weight),  # type: ignore[arg-type]
        device=torch.device("cuda"),
        capability=(9, 0),
        dtype=torch.bfloat16,
    )
    answers = dict(candidates(problem))
    assert answers.pop("emulation") is None
    assert None not in answers.values()
    assert all("mxint6" in str(answers[name]) for name in ("fp8", "fp16", "triton"))
