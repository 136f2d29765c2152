"""Activations quantized and dequantized in one go equal quantizing to codes and decoding them."""

import pytest
import torch
from matmul_reference import ACTIVATIONS, activation64

from mxquant.formats import get_format, resolve_scale_mode
from mxquant.reference.fake_quantize import fake_quantize

FORMATS = [a for a in ACTIVATIONS if a is not None]


def values64(x: torch.Tensor, activation: str, mode: str | None = None) -> torch.Tensor:
    fmt = get_format(activation, activation=True)
    values, outer = fake_quantize(x, fmt, resolve_scale_mode(fmt, mode), None, torch.float32)
    return values.double() if outer is None else values.double() * outer.double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("activation", FORMATS)
def test_equal_to_the_codes(activation: str, dtype: torch.dtype) -> None:
    for length in (1, 16, 40, 97):
        x = (torch.randn(9, length) * torch.exp2(torch.randint(-8, 8, (9, 1)).float())).to(dtype)
        x[3] = 0
        assert torch.equal(values64(x, activation), activation64(x, activation))


@pytest.mark.parametrize("mode", ["floor", "even", "ceil", "rceil", "even_fp4"])
@pytest.mark.parametrize("activation", [f for f in FORMATS if f.startswith("mxfp")])
def test_every_scale_mode(activation: str, mode: str) -> None:
    x = torch.randn(64, 64) * torch.exp2(torch.randint(-30, 30, (64, 1)).float())
    assert torch.equal(values64(x, activation, mode), activation64(x, activation, mode))


@pytest.mark.parametrize("activation", FORMATS)
def test_every_bfloat16_value(activation: str) -> None:
    """All finite patterns, each the loudest of its block and each among louder ones."""
    every = torch.arange(65536).to(torch.uint16).view(torch.bfloat16).float()
    every = every[every.isfinite() & (every.abs() < 1.75 * 2.0**127)]
    alone = torch.zeros(every.numel(), 4)
    alone[:, 1], alone[:, 3] = every, every / 3
    among = every[: every.numel() // 64 * 64].view(64, -1).t().contiguous()
    for x in (alone, among):
        result, expected = values64(x, activation), activation64(x, activation)
        assert torch.equal(result.nan_to_num(1e300), expected.nan_to_num(1e300))


@pytest.mark.parametrize("activation", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_value_spoils_its_block_only(activation: str, bad: float) -> None:
    x = torch.randn(3, 64)
    x[1, 5] = bad
    spoiled = values64(x, activation).isnan()
    assert spoiled[1, :16].all()
    assert not spoiled[0].any()
    assert not spoiled[2].any()
    if activation.startswith("mxfp"):
        assert not spoiled[1, 32:].any()


def test_ties_go_to_even() -> None:
    x = torch.tensor([[6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -2.5]])
    expected = [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 0.0, -2.0]
    assert values64(x, "mxfp4").tolist() == [expected]


def test_fp64_inputs_round_once() -> None:
    """A value between a tie and its fp32 rounding goes to its own side."""
    x = torch.tensor([[6.0, 2.5 + 2.0**-40, 2.5 - 2.0**-40]], dtype=torch.float64)
    assert values64(x, "mxfp4").tolist() == [[6.0, 3.0, 2.0]]
