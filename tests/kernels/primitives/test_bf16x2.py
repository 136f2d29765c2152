"""What `mxquant.kernels.primitives.bf16x2` computes, in PTX on a GPU and in the interpreter, against torch."""

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from mxquant.formats import ELEMENT_FORMATS
from mxquant.formats.element import encode
from mxquant.kernels.primitives.bf16x2 import byte_perm, fma_pairs, fp8_word, max_pairs, min_pairs, odd_pair
from mxquant.kernels.runtime.launch import cdiv

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SIZE = tl.constexpr(8192)


@triton.jit
def _pairs_kernel(a_ptr: tl.tensor, b_ptr: tl.tensor, c_ptr: tl.tensor, y_ptr: tl.tensor, WHAT: tl.constexpr) -> None:
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    a, b, c = tl.load(a_ptr + i), tl.load(b_ptr + i), tl.load(c_ptr + i)
    if WHAT == "fma":
        y = fma_pairs(a, b, c)
    elif WHAT == "max":
        y = max_pairs(a, b)
    elif WHAT == "min":
        y = min_pairs(a, b)
    elif WHAT == "bytes":
        y = byte_perm(a, b, 0x7160)
    else:
        y = odd_pair(a, b)
    tl.store(y_ptr + i, y)


@triton.jit
def _fp8_kernel(x_ptr: tl.tensor, y_ptr: tl.tensor, EXPONENT_BITS: tl.constexpr, MANTISSA_BITS: tl.constexpr) -> None:
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    x = x_ptr + 4 * i
    word = fp8_word(tl.load(x), tl.load(x + 1), tl.load(x + 2), tl.load(x + 3), EXPONENT_BITS, MANTISSA_BITS)
    tl.store(y_ptr + i, word)


def run(what: str, *words: Tensor) -> Tensor:
    """The function of up to three int32 tensors of a multiple of `SIZE`."""
    a, b, c = (*words, words[0], words[0])[:3]
    y = torch.empty_like(a)
    _pairs_kernel[(cdiv(a.numel(), SIZE.value),)](a, b, c, y, WHAT=what)
    return y.cpu()


def every_bfloat16() -> Tensor:
    """int16 [65536]."""
    return torch.arange(65536, dtype=torch.int32).to(torch.int16)


def words(low: Tensor, high: Tensor) -> Tensor:
    """int32 [n] of the bits of 16-bit tensors [n]."""
    return torch.stack([low.view(torch.int16), high.view(torch.int16)], -1).view(torch.int32).flatten()


@pytest.mark.parametrize("anchor", [0.0, 64.0, 66.0, 16.0, 0.25])
def test_a_fused_multiply_add_rounds_once(anchor: float, device: torch.device) -> None:
    """Every finite bf16 number times powers of two, plus a constant. Subnormal products alone, where fp32 and fp64
    round before bf16 does, are left out: what is that small gets the code 0 anyhow.
    """
    a = every_bfloat16().view(torch.bfloat16)
    a = a.where(a.isfinite(), 1.0)
    for exponent in (-126, -20, -1, 0, 3, 60, 127):
        factor, c = (torch.full_like(a, value) for value in (2.0**exponent, anchor))
        small = (a.double() * 2.0**exponent).abs() < 2.0**-126
        numbers = a if anchor else a.masked_fill(small, 1.0)
        given = (words(t, t.flip(0)).to(device) for t in (numbers, factor, c))
        expected = (numbers.double() * 2.0**exponent + anchor).to(torch.bfloat16)
        assert torch.equal(run("fma", *given), words(expected, expected.flip(0))), exponent


@pytest.mark.parametrize("what, function", [("max", torch.maximum), ("min", torch.minimum)])
def test_extremes_of_halves(what: str, function: Callable[..., Tensor], device: torch.device) -> None:
    a, b = every_bfloat16(), every_bfloat16()[torch.randperm(65536)]
    larger = function(a.int() & 0xFFFF, b.int() & 0xFFFF).to(torch.int16)
    assert torch.equal(
        run(what, words(a, a.flip(0)).to(device), words(b, b.flip(0)).to(device)), words(larger, larger.flip(0))
    )


def test_chosen_bytes(device: torch.device) -> None:
    a, b = (torch.randint(-(2**31), 2**31, (SIZE.value,), dtype=torch.int32) for _ in range(2))
    both = torch.cat([t.view(torch.uint8).view(-1, 4) for t in (a, b)], 1)
    assert torch.equal(run("bytes", a.to(device), b.to(device)).view(torch.uint8).view(-1, 4), both[:, [0, 6, 1, 7]])


def test_rounding_to_odd(device: torch.device) -> None:
    top = every_bfloat16().int() << 16
    for low in (0, 1, 0x7FFF, 0x8000, 0xFFFF):
        bits = top | low
        expected = ((bits >> 16) | (low != 0)).to(torch.int16)
        odd = run("odd", bits.to(device), bits.flip(0).to(device))
        assert torch.equal(odd, words(expected, expected.flip(0)))
    assert not torch.equal(odd, words(*[bits.view(torch.float32).bfloat16()] * 2))  # the control: rounded to nearest


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_conversion_to_fp8(name: str, device: torch.device) -> None:
    """Every bf16 number but NaN, and its neighbours in fp32: ties, subnormals, saturation, infinities, both zeros."""
    element = ELEMENT_FORMATS[name]
    top = every_bfloat16().int() << 16
    for low in (0, 1, 0xFFFF):
        x = (top | low).view(torch.float32)
        x = x.where(~x.isnan(), 0.0)
        y = torch.empty(x.numel() // 4, dtype=torch.int32, device=device)
        _fp8_kernel[(cdiv(y.numel(), SIZE.value),)](
            x.to(device), y, EXPONENT_BITS=element.exponent_bits, MANTISSA_BITS=element.mantissa_bits
        )
        assert torch.equal(y.cpu().view(torch.uint8), encode(x, element).to(torch.uint8))
