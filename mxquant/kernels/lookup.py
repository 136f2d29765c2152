"""Decode packed codes by table look-up: 16 bits of the packed bytes at a time give two to four values.

On a CPU this is what makes emulation usable: 16-bit words that are gathered as 8-byte entries decode E2M1 several
times faster than shifting and masking, and than a table of single codes. Twin: `dequantize_blocks` of
`mxquant.formats.block`, equal bit by bit.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from mxquant.formats.element import decode as decode_elements
from mxquant.formats.scale import e4m3_to_float, e8m0_to_float
from mxquant.formats.spec import ElementFormat, Format

# Integer or complex types whose item is as wide as a table entry: one gather then moves all the values of a word.
_ENTRY_DTYPES = {4: torch.int32, 8: torch.int64, 16: torch.complex128}


def _codes_per_word(element: ElementFormat) -> int:
    return 16 // element.bits


@functools.cache
def _element_table(element: ElementFormat, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Entry w holds the values of the codes in the 16-bit word w, viewed as one item.

    Of 6-bit codes a word holds two, and four bits of a neighbour: above them in a word that starts with a group of
    three bytes, below them in a word that ends with one. The second half of the table is for the latter.
    """
    words = torch.arange(1 << 16, device=device)
    mask = (1 << element.bits) - 1
    starts = (0, 4) if element.bits == 6 else (0,)
    shifts = [[start + element.bits * i for i in range(_codes_per_word(element))] for start in starts]
    codes = torch.cat([torch.stack([(words >> shift) & mask for shift in row], -1) for row in shifts])
    values = decode_elements(codes, element, dtype)
    return values.view(_ENTRY_DTYPES[values.shape[-1] * values.itemsize]).view(-1)


@functools.cache
def _scale_table(scale_format: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    to_float = e4m3_to_float if scale_format == "e4m3" else e8m0_to_float
    return to_float(torch.arange(256, dtype=torch.uint8, device=device), dtype)


def decoded_rows(
    qdata: Tensor, scale: Tensor, fmt: Format, length: int, *, block_offset: int, dtype: torch.dtype, step: int
) -> Iterator[tuple[slice, Tensor]]:
    """The values of `step` rows at a time, element x block scale; the per-tensor scale is left out.

    All chunks share one buffer, so each is gone with the next. That matters as much as the table: fresh buffers of a
    megabyte cost a page fault every 4 KiB.

    Args:
        qdata, scale: uint8 [N, bytes] and [N, blocks], any strides.
        length: elements a row.
        block_offset: codes to leave out at the start of each row's first block.
        dtype: bf16 or fp32; the product is exact in either within its range.

    Yields:
        the rows, and their values [<= step, length].
    """
    assert fmt.block_size is not None
    rows, blocks = scale.shape
    step = max(1, min(step, rows))
    words_per_row = blocks * fmt.block_size // _codes_per_word(fmt.element)
    columns = slice(block_offset, block_offset + length)
    table = _element_table(fmt.element, dtype, qdata.device)
    scale_table = _scale_table(fmt.scale_format, dtype, qdata.device)
    scales = scale_table.index_select(0, scale.reshape(-1).to(torch.int32)).view(rows, blocks, 1)
    source = qdata if fmt.element.bits == 6 else _as_words(qdata)
    # Zeros, since the words that complete a partial last block are never written.
    words = torch.zeros(step, words_per_row, dtype=torch.int32, device=qdata.device)
    entries = torch.empty(step * words_per_row, dtype=table.dtype, device=qdata.device)
    values = torch.empty(step, blocks, fmt.block_size, dtype=dtype, device=qdata.device)
    for start in range(0, rows, step):
        chunk = slice(start, min(start + step, rows))
        count = chunk.stop - start
        if count < step:
            words, entries, values = words[:count], entries[: count * words_per_row], values[:count]
        _fill_words(words, source[chunk], fmt.element.bits)
        torch.index_select(table, 0, words.view(-1), out=entries)
        torch.mul(entries.view(dtype).view(values.shape), scales[chunk], out=values)
        yield chunk, values.flatten(1)[:, columns]


def _as_words(qdata: Tensor) -> Tensor:
    """The packed bytes [N, bytes] as 16-bit words, copied only where pairs of bytes cannot be viewed as words."""
    odd = qdata.shape[1] % 2
    if odd or qdata.stride(0) % 2 or qdata.storage_offset() % 2:
        qdata = F.pad(qdata, (0, odd)).clone()
    return qdata.view(torch.uint16)


def _fill_words(words: Tensor, source: Tensor, bits: int) -> None:
    """Write the indices of the table's entries into the head of int32 `words` [n, m]."""
    if bits != 6:
        words[:, : source.shape[1]].copy_(source)
        return
    b0, b1, b2 = source.unflatten(1, (source.shape[1] // 3, 3)).unbind(-1)
    pairs = words[:, : 2 * b0.shape[1]].unflatten(1, (b0.shape[1], 2))
    pairs[..., 0].copy_(b1).mul_(1 << 8).add_(b0)
    pairs[..., 1].copy_(b2).add_(1 << 8).mul_(1 << 8).add_(b1)
