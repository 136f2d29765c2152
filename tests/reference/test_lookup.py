"""The table look-up decodes what `mxquant.formats` decodes, bit for bit."""

import pytest
import torch
from matmul_reference import BLOCK, FORMATS
from torch import Tensor

from mxquant.formats import get_format
from mxquant.formats.block import dequantize_blocks
from mxquant.reference.lookup import decoded_rows

DTYPES = [torch.bfloat16, torch.float32]


def random_operand(format: str, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of every bit pattern, NaN ones included."""
    fmt = get_format(format)
    qdata = torch.randint(0, 256, (rows, fmt.packed_size(length)), dtype=torch.uint8)
    scale = torch.randint(0, 256, (rows, fmt.num_blocks(length)), dtype=torch.uint8)
    return qdata, scale


def bits(x: Tensor) -> Tensor:
    """The bit pattern, every NaN alike."""
    integer = torch.int16 if x.element_size() == 2 else torch.int32
    return x.contiguous().masked_fill(x.isnan(), torch.nan).view(integer)


def check(format: str, qdata: Tensor, scale: Tensor, length: int, offset: int, dtype: torch.dtype) -> None:
    fmt = get_format(format)
    # Element x block scale: the per-tensor scale of NVFP4 is applied after the sum.
    ones = torch.ones(()) if fmt.per_tensor else None
    expected = dequantize_blocks(qdata, scale, fmt, length, block_offset=offset, per_tensor_scale=ones, dtype=dtype)
    for step in (qdata.shape[0], 2):
        covered = 0
        for rows, values in decoded_rows(qdata, scale, fmt, length, block_offset=offset, dtype=dtype, step=step):
            assert rows.start == covered
            assert values.dtype == dtype
            assert torch.equal(bits(values), bits(expected[rows]))
            covered = rows.stop
        assert covered == qdata.shape[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
def test_every_code_under_every_scale_byte(format: str, dtype: torch.dtype) -> None:
    """256 rows, one a scale byte; each row holds every code."""
    fmt = get_format(format)
    from mxquant.formats.pack import pack_codes

    count = max(1 << fmt.element.bits, BLOCK[format])
    codes = torch.arange(count).remainder(1 << fmt.element.bits).to(torch.uint8).expand(256, count)
    scale = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, fmt.num_blocks(count)).contiguous()
    check(format, pack_codes(codes, fmt.element.bits), scale, count, 0, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
def test_every_pair_of_neighbouring_codes(format: str, dtype: torch.dtype) -> None:
    """Whatever stands beside a code in its word of the table."""
    fmt = get_format(format)
    length = BLOCK[format] * 64
    qdata, _ = random_operand(format, 64, length)
    scale = torch.full((64, fmt.num_blocks(length)), 0x38 if fmt.per_tensor else 127, dtype=torch.uint8)
    check(format, qdata, scale, length, 0, dtype)


@pytest.mark.parametrize("format", FORMATS)
def test_every_length(format: str) -> None:
    for length in range(1, 2 * BLOCK[format] + 4):
        check(format, *random_operand(format, 3, length), length, 0, torch.float32)


@pytest.mark.parametrize("format", FORMATS)
def test_every_offset(format: str) -> None:
    for offset in range(BLOCK[format]):
        for length in (1, 7, 50):
            check(format, *random_operand(format, 3, offset + length), length, offset, torch.bfloat16)


@pytest.mark.parametrize("format", FORMATS)
def test_non_contiguous_codes_and_scales(format: str) -> None:
    """Views of a larger weight: rows with a stride, columns of blocks that start at odd bytes."""
    fmt, block = get_format(format), BLOCK[format]
    qdata, scale = random_operand(format, 8, 6 * block)
    check(format, qdata[1::2], scale[1::2], 6 * block, 0, torch.float32)
    for first in range(4):
        columns = slice(fmt.packed_size(first * block), fmt.packed_size(6 * block))
        check(format, qdata[:, columns], scale[:, first:], (6 - first) * block, 0, torch.float32)
        check(format, qdata[2:5, columns], scale[2:5, first:], (6 - first) * block - 3, 3, torch.bfloat16)
    shifted = torch.empty(qdata.numel() + 1, dtype=torch.uint8)[1:].view(qdata.shape).copy_(qdata)
    check(format, shifted, scale, 6 * block, 0, torch.float32)


@pytest.mark.parametrize("format", FORMATS)
def test_a_shorter_last_chunk_and_no_rows(format: str) -> None:
    """What earlier chunks left in the shared buffers does not show."""
    for rows in (5, 3, 1, 0):
        check(format, *random_operand(format, rows, 45), 45, 0, torch.float32)


def test_chunks_share_one_buffer() -> None:
    """No page faults for fresh memory: each chunk takes the place of the one before."""
    chunks = decoded_rows(
        *random_operand("mxfp4", 6, 64), get_format("mxfp4"), 64, block_offset=0, dtype=torch.float32, step=2
    )
    assert len({values.data_ptr() for _, values in chunks}) == 1
