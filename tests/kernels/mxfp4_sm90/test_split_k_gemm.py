"""The kernels that decode a tiled weight in registers, against float64: one matrix, and groups of rows with a stack.

In the interpreter the decoding is written out; that in PTX, and tensor cores' accumulation, are for `tests/gpu`.
"""

import pytest
import torch
from matmul_reference import assert_product
from torch import Tensor

from kernels.mxfp4_sm90.packed_weights import weight
from kernels.mxfp4_sm90.rescaled_rows import MXFP4
from mxquant.formats import dequantize_blocks, quantize_blocks
from mxquant.kernels.mxfp4_sm90.grouped_gemm import multiply_groups
from mxquant.kernels.mxfp4_sm90.split_k_gemm import multiply_few
from mxquant.ops import route
from mxquant.reference.hadamard import hadamard

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def activations(rows: int, columns: int, mode: str | None) -> tuple[Tensor, Tensor]:
    """bf16 rows, the last of which does not fold, and what they are in float64 once quantized."""
    x = torch.randn(rows, columns)
    x[-1, :32] *= 2.0**-60
    x = x.bfloat16()
    return x, x.double() if mode is None else dequantize_blocks(
        *quantize_blocks(x, MXFP4, mode), MXFP4, columns, dtype=torch.float64
    )


@pytest.mark.parametrize("mode", ["even", None])
@pytest.mark.parametrize("columns", [288, 480, 512])
@pytest.mark.parametrize("rows", [1, 17])
def test_a_few_rows(rows: int, columns: int, mode: str | None, device: torch.device) -> None:
    """K split among programs and not, with every kind of rest of 256 columns; in fp32, so nearly exact."""
    tiles, w64 = weight(128, columns)
    (x, x64), bias = activations(rows, columns, mode), torch.randn(128)
    on_device = [t.to(device) for t in tiles]
    x = x.to(device)
    for added in (bias, None) if columns == 512 else (bias,):  # K is split there, and the bias added in one part
        y = multiply_few(x, *on_device, None if added is None else added.to(device), 128, mode, torch.float32).cpu()
        # FP8 tensor cores keep 14 bits of a partial sum: the bound of half-precision outputs is theirs.
        y = y.bfloat16() if device.type == "cuda" and mode else y
        assert_product(y, x64, w64, added)
        with pytest.raises(AssertionError):
            assert_product(y, x64, w64, 100 * bias)


def test_rows_rotated_on_the_way(device: torch.device) -> None:
    """As rows rotated before: those that fold, and the last one, which is recomputed."""
    tiles, _ = weight(64, 288)
    on_device = [t.to(device) for t in tiles]
    x, _ = activations(5, 288, "even")
    x[-1, :32] *= 2.0**-60
    y = multiply_few(x.to(device), *on_device, None, 64, "even", torch.float32, rotated=True)
    before = hadamard(x, 32).bfloat16().to(device)
    assert torch.equal(y, multiply_few(before, *on_device, None, 64, "even", torch.float32))
    assert not torch.equal(y, multiply_few(x.to(device), *on_device, None, 64, "even", torch.float32))
    offsets = torch.tensor([2, 5], dtype=torch.int32, device=device)
    stack = [torch.stack([t, t]) for t in on_device]
    arguments = (*stack, None, offsets, None, 64, "even", torch.float32)
    grouped = multiply_groups(x.to(device), *arguments, rotated=True)
    assert torch.equal(grouped, multiply_groups(before, *arguments))


@pytest.mark.parametrize("mode", ["even", None])
def test_calls_that_differ_in_all_but_their_sizes(mode: str | None, device: torch.device) -> None:
    """Each by a plan of its own: other strides, biases and dtypes, and the first again."""
    tiles, w64 = weight(64, 256)
    words, bytes_ = (t.to(device) for t in tiles)
    (x, x64), bias = activations(2, 256, mode), 10 * torch.randn(64)
    apart = torch.full((2, 300), torch.nan).bfloat16()
    apart[:, :256] = x
    strided, half, fp32, bf16 = apart[:, :256], bias.bfloat16(), torch.float32, torch.bfloat16
    # Each differs from the one before it in one thing, there and back.
    calls = [(x, None, fp32), (strided, None, fp32), (strided, bias, fp32), (x, bias, fp32), (x, half, fp32)]
    calls += [(x, half, bf16), (x, bias, bf16), (x, None, bf16), (x, None, fp32)]
    for given, added, dtype in 2 * calls if device.type == "cuda" else calls:  # a GPU launches planned ones otherwise
        y = multiply_few(given.to(device), words, bytes_, None if added is None else added.to(device), 64, mode, dtype)
        assert y.dtype == dtype
        assert_product(y.cpu().bfloat16(), x64, w64, added)


@pytest.mark.parametrize("mode", ["even", None])
@pytest.mark.parametrize("columns", [256, 352])
def test_groups_of_rows(columns: int, mode: str | None, device: torch.device) -> None:
    """An expert without rows, one with more than a tile of them, rows of no expert, a row that does not fold."""
    tiles, w64 = weight(3, 64, columns)
    (x, x64), bias = activations(12, columns, mode), torch.randn(3, 64)
    ids = torch.tensor([[0, 2]] * 9 + [[0, 3], [3, 0], [0, 2]])
    routing = route(ids, 3)
    x, (offsets, rows) = x.to(device), (routing.offsets_E.to(device), routing.token_S.to(device))
    y = multiply_groups(
        x, *(t.to(device) for t in tiles), bias.to(device), offsets, rows, 64, mode, torch.float32
    ).cpu()
    y = y.bfloat16() if device.type == "cuda" and mode else y
    ends = [0, *routing.offsets_E.tolist()]
    assert ends == [0, 12, 12, 22]
    for expert in (0, 2):
        places = slice(ends[expert], ends[expert + 1])
        assert_product(y[places], x64[routing.token_S[places]], w64[expert], bias[expert])
        with pytest.raises(AssertionError):
            assert_product(y[places], x64[routing.token_S[places]], w64[2 - expert], bias[expert])
    assert not y[22:].any()
