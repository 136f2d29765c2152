"""The split-K kernels against float64: of one matrix, and of groups of rows with a stack.

The interpreter does not run the PTX that decodes, nor tensor cores' accumulation: those are tested in `tests/gpu`.
"""

import pytest
import torch
from matmul_reference import assert_product
from torch import Tensor

from kernels.mxfp4_sm90.packed_weights import random_weight
from kernels.mxfp4_sm90.rescaled_rows import MXFP4
from mxquant.formats import dequantize_blocks, quantize_blocks
from mxquant.kernels.mxfp4_sm90.grouped_gemm import grouped_gemm
from mxquant.kernels.mxfp4_sm90.split_k_gemm import split_k_gemm
from mxquant.ops import route
from mxquant.reference.hadamard import hadamard
from mxquant.reference.rescale import Prologue

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def activations(rows: int, columns: int, mode: str | None) -> tuple[Tensor, Tensor]:
    """bf16 rows, the last of which is out of range; and in float64 what they are once quantized."""
    x = torch.randn(rows, columns)
    x[-1, :32] *= 2.0**-60
    x = x.bfloat16()
    return x, x.double() if mode is None else dequantize_blocks(
        *quantize_blocks(x, MXFP4, mode), MXFP4, columns, dtype=torch.float64
    )


@pytest.mark.parametrize("mode", ["even", None])
@pytest.mark.parametrize("columns", [288, 480, 512])
@pytest.mark.parametrize("rows", [1, 17])
def test_split_k_gemm(rows: int, columns: int, mode: str | None, device: torch.device) -> None:
    """K split among programs and not, with every kind of tail; in fp32, so nearly exact."""
    packed, w64 = random_weight(128, columns)
    (x, x64), bias = activations(rows, columns, mode), torch.randn(128)
    on_device = [t.to(device) for t in packed]
    x = x.to(device)
    for added in (bias, None) if columns == 512 else (bias,):  # K is split there, and the bias added once
        given = None if added is None else added.to(device)
        y = split_k_gemm(x, *on_device, given, 128, Prologue(mode), torch.float32).cpu()
        # FP8 tensor cores keep 14 bits of a partial sum: the bound of half-precision outputs is theirs.
        y = y.bfloat16() if device.type == "cuda" and mode else y
        assert_product(y, x64, w64, added)
        with pytest.raises(AssertionError):
            assert_product(y, x64, w64, 100 * bias)


def test_rotated_rows(device: torch.device) -> None:
    """As rows rotated before; also the last one, which is recomputed."""
    packed, _ = random_weight(64, 288)
    on_device = [t.to(device) for t in packed]
    x, _ = activations(5, 288, "even")
    x[-1, :32] *= 2.0**-60
    plain, rotated = (Prologue("even"), torch.float32), (Prologue("even", rotated=True), torch.float32)
    y = split_k_gemm(x.to(device), *on_device, None, 64, *rotated)
    before = hadamard(x, 32).bfloat16().to(device)
    assert torch.equal(y, split_k_gemm(before, *on_device, None, 64, *plain))
    assert not torch.equal(y, split_k_gemm(x.to(device), *on_device, None, 64, *plain))
    offsets = torch.tensor([2, 5], dtype=torch.int32, device=device)
    stack = [torch.stack([t, t]) for t in on_device]
    arguments = (*stack, None, offsets, None, 64)
    grouped = grouped_gemm(x.to(device), *arguments, *rotated)
    assert torch.equal(grouped, grouped_gemm(before, *arguments, *plain))


@pytest.mark.parametrize("mode", ["even", None])
def test_calls_of_the_same_sizes(mode: str | None, device: torch.device) -> None:
    """Each has its own plan: other strides, biases and dtypes, and the first again."""
    packed, w64 = random_weight(64, 256)
    on_device = [t.to(device) for t in packed]
    (x, x64), bias = activations(2, 256, mode), 10 * torch.randn(64)
    apart = torch.full((2, 300), torch.nan).bfloat16()
    apart[:, :256] = x
    strided, half, fp32, bf16 = apart[:, :256], bias.bfloat16(), torch.float32, torch.bfloat16
    # Each differs from the one before it in one thing, there and back.
    calls = [(x, None, fp32), (strided, None, fp32), (strided, bias, fp32), (x, bias, fp32), (x, half, fp32)]
    calls += [(x, half, bf16), (x, bias, bf16), (x, None, bf16), (x, None, fp32)]
    for given, added, dtype in 2 * calls if device.type == "cuda" else calls:  # a GPU launches planned ones otherwise
        on_device_bias = None if added is None else added.to(device)
        y = split_k_gemm(given.to(device), *on_device, on_device_bias, 64, Prologue(mode), dtype)
        assert y.dtype == dtype
        assert_product(y.cpu().bfloat16(), x64, w64, added)


@pytest.mark.parametrize("mode", ["even", None])
@pytest.mark.parametrize("columns", [256, 352])
def test_grouped_gemm(columns: int, mode: str | None, device: torch.device) -> None:
    """An expert without rows, one with more than a tile of them, rows of no expert, a row out of range."""
    packed, w64 = random_weight(3, 64, columns)
    (x, x64), bias = activations(12, columns, mode), torch.randn(3, 64)
    ids = torch.tensor([[0, 2]] * 9 + [[0, 3], [3, 0], [0, 2]])
    routing = route(ids, 3)
    x, (offsets, rows) = x.to(device), (routing.offsets_E.to(device), routing.token_S.to(device))
    on_device = [t.to(device) for t in (*packed, bias)]
    y = grouped_gemm(x, *on_device, offsets, rows, 64, Prologue(mode), torch.float32).cpu()
    y = y.bfloat16() if device.type == "cuda" and mode else y
    ends = [0, *routing.offsets_E.tolist()]
    assert ends == [0, 12, 12, 22]
    for expert in (0, 2):
        places = slice(ends[expert], ends[expert + 1])
        assert_product(y[places], x64[routing.token_S[places]], w64[expert], bias[expert])
        with pytest.raises(AssertionError):
            assert_product(y[places], x64[routing.token_S[places]], w64[2 - expert], bias[expert])
    assert not y[22:].any()
