"""The decoding kernel gives what `mxquant.formats.dequantize_blocks` gives, bit for bit."""

import pytest
import torch
from torch import Tensor

from kernels.bits import bits
from mxquant.formats import FORMATS, get_format
from mxquant.formats.block import dequantize_blocks
from mxquant.formats.pack import pack_codes
from mxquant.kernels.quantize.dequantize import FORMATS as KERNEL_FORMATS
from mxquant.kernels.quantize.dequantize import dequantize

# Overflow and NaN are wanted here; NumPy, which Triton's interpreter computes with, warns of them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def random_operand(name: str, rows: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Codes and scales of every bit pattern, NaN ones included."""
    fmt = get_format(name)
    qdata = torch.randint(0, 256, (rows, fmt.packed_size(length)), dtype=torch.uint8)
    scale = torch.randint(0, 256, (rows, fmt.num_blocks(length)), dtype=torch.uint8)
    return qdata.to(device), scale.to(device)


def check(name: str, qdata: Tensor, scale: Tensor, length: int, offset: int, dtype: torch.dtype) -> None:
    values = dequantize(qdata, scale, FORMATS[name], length, block_offset=offset, dtype=dtype)
    expected = dequantize_blocks(qdata.cpu(), scale.cpu(), FORMATS[name], length, block_offset=offset, dtype=dtype)
    assert values.dtype == dtype
    assert values.is_contiguous()
    assert torch.equal(bits(values), bits(expected))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KERNEL_FORMATS)
def test_every_code_under_every_scale_byte(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """256 rows, one a scale byte; each row holds every code."""
    fmt = FORMATS[name]
    assert fmt.block_size is not None
    count = max(1 << fmt.element.bits, fmt.block_size)
    codes = torch.arange(count).remainder(1 << fmt.element.bits).to(torch.uint8).expand(256, count)
    scale = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, fmt.num_blocks(count)).contiguous()
    check(name, pack_codes(codes, fmt.element.bits).to(device), scale.to(device), count, 0, dtype)


@pytest.mark.parametrize("length", [1, 5, 7, 8, 31, 33, 40, 100, 1000, 4200])
@pytest.mark.parametrize("name", KERNEL_FORMATS)
def test_lengths(name: str, length: int, device: torch.device) -> None:
    check(name, *random_operand(name, 3, length, device), length, 0, torch.bfloat16)


@pytest.mark.parametrize("name", KERNEL_FORMATS)
def test_offsets(name: str, device: torch.device) -> None:
    for offset in (1, 3, 8, 13, 31):
        for length in (1, 50):
            check(name, *random_operand(name, 5, offset + length, device), length, offset, torch.float32)


@pytest.mark.parametrize("name", KERNEL_FORMATS)
def test_views_of_a_larger_weight(name: str, device: torch.device) -> None:
    """Rows with a stride, columns that start at odd bytes, bytes that are no aligned words, transposed bytes."""
    fmt = FORMATS[name]
    assert fmt.block_size is not None
    block = fmt.block_size
    qdata, scale = random_operand(name, 9, 6 * block, device)
    check(name, qdata[1::2], scale[1::2], 6 * block, 0, torch.float32)
    for first in (1, 2):
        columns = slice(fmt.packed_size(first * block), fmt.packed_size(6 * block))
        check(name, qdata[:, columns], scale[:, first:], (6 - first) * block, 0, torch.float32)
        check(name, qdata[2:5, columns], scale[2:5, first:], (6 - first) * block - 3, 3, torch.bfloat16)
    shifted = torch.empty(qdata.numel() + 1, dtype=torch.uint8, device=device)[1:].view(qdata.shape).copy_(qdata)
    check(name, shifted, scale, 6 * block, 0, torch.bfloat16)
    check(name, qdata.t().contiguous().t(), scale.t().contiguous().t(), 6 * block, 0, torch.bfloat16)
    check(name, qdata[:0], scale[:0], 6 * block, 0, torch.bfloat16)


def test_another_offset_is_noticed(device: torch.device) -> None:
    qdata, scale = random_operand("mxfp4", 4, 64, device)
    ours = dequantize(qdata, scale, FORMATS["mxfp4"], 32, block_offset=1, dtype=torch.float32)
    other = dequantize_blocks(qdata.cpu(), scale.cpu(), FORMATS["mxfp4"], 32)
    assert not torch.equal(bits(ours), bits(other))
