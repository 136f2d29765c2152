"""Decode packed codes by table look-up: one 16-bit (or 12-bit) word of the packed bytes gives two to four values at
once.

On a CPU this is what makes emulation usable: 16-bit words gathered as 8-byte entries decode E2M1 several times faster
than shifting and masking, and than a table of single codes. Twin: `mxquant.formats.block.dequantize_blocks`, equal
bit by bit.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from mxquant.formats.element import decode as decode_elements
from mxquant.formats.scale import e4m3_to_float, e8m0_to_float
from mxquant.formats.spec import ElementFormat, Format

# Integer or complex types whose item is as wide as a table entry: one gather then moves all the values of a word.
_ENTRY_DTYPES = {4: torch.int32, 8: torch.int64, 16: torch.complex128}


def _word_bits(element: ElementFormat) -> int:
    return 12 if element.bits == 6 else 16


@functools.cache
def _element_table(element: ElementFormat, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Entry w holds the values of the codes in word w, viewed as one item."""
    words = torch.arange(1 << _word_bits(element), device=device)
    mask = (1 << element.bits) - 1
    codes = [(words >> shift) & mask for shift in range(0, _word_bits(element), element.bits)]
    values = decode_elements(torch.stack(codes, -1), element, dtype)
    return values.view(_ENTRY_DTYPES[values.shape[-1] * values.itemsize]).view(-1)


@functools.cache
def _scale_table(scale_format: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    to_float = e4m3_to_float if scale_format == "e4m3" else e8m0_to_float
    return to_float(torch.arange(256, dtype=torch.uint8, device=device), dtype)


class RowDecoder:
    """Decodes up to `rows` rows at a time into a buffer of its own, which the next call overwrites.

    Reusing the buffers matters as much as the table: fresh ones of a megabyte cost a page fault every 4 KiB.

    Args:
        fmt: a block format.
        rows: the most rows one call is given.
        length: elements a row.
        block_offset: codes to leave out at the start of each row's first block.
        dtype: bf16 or fp32; element x block scale is exact in either within its range.
    """

    def __init__(
        self, fmt: Format, rows: int, length: int, block_offset: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        assert fmt.block_size is not None
        self._fmt = fmt
        self._columns = slice(block_offset, block_offset + length)
        blocks = fmt.num_blocks(block_offset + length)
        self._table = _element_table(fmt.element, dtype, device)
        self._scales = _scale_table(fmt.scale_format, dtype, device)
        words = blocks * fmt.block_size * fmt.element.bits // _word_bits(fmt.element)
        # Zeros, since the words that complete a partial last block are never written.
        self._words = torch.zeros(rows, words, dtype=torch.int32, device=device)
        self._entries = torch.empty(rows * words, dtype=self._table.dtype, device=device)
        self._values = torch.empty(rows, blocks, fmt.block_size, dtype=dtype, device=device)

    def __call__(self, qdata: Tensor, scale: Tensor) -> Tensor:
        """Values [n, length] of `qdata` [n, bytes] and `scale` [n, blocks], the per-tensor scale left out."""
        rows = qdata.shape[0]
        words, values = self._words[:rows], self._values[:rows]
        _fill_words(words, qdata, self._fmt.element.bits)
        entries = torch.index_select(self._table, 0, words.view(-1), out=self._entries[: words.numel()])
        block_scale = self._scales.index_select(0, scale.reshape(-1).to(torch.int32)).view(rows, scale.shape[1], 1)
        torch.mul(entries.view(values.dtype).view_as(values), block_scale, out=values)
        return values.flatten(1)[:, self._columns]


def _fill_words(words: Tensor, qdata: Tensor, bits: int) -> None:
    """Write the packed bytes [n, bytes] as words into the head of int32 `words` [n, m]."""
    if bits == 6:
        b0, b1, b2 = qdata.to(torch.int32).unflatten(-1, (-1, 3)).unbind(-1)
        words[:, 0 : 2 * b0.shape[1] : 2] = b0 | ((b1 & 0xF) << 8)
        words[:, 1 : 2 * b0.shape[1] : 2] = (b1 >> 4) | (b2 << 4)
        return
    if qdata.shape[1] % 2 or qdata.stride(0) % 2 or qdata.storage_offset() % 2:
        qdata = F.pad(qdata, (0, qdata.shape[1] % 2)).clone()  # pairs of bytes that can be viewed as words
    words[:, : qdata.shape[1] // 2].copy_(qdata.view(torch.uint16))
