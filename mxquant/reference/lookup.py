"""Decode packed codes by table look-up: each 16 bits of packed bytes index an entry of two to four values.

This makes emulation usable on a CPU: gathering 8-byte entries decodes E2M1 several times faster than shifting and
masking, or than a table of single codes. Twin: `dequantize_blocks` of `mxquant.formats.block`, equal bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mxquant.formats.element import decode as decode_elements
from mxquant.formats.scale import scale_to_float
from mxquant.formats.spec import ElementFormat, Format
from mxquant.formats.table import kept_table

# Types as wide as a table entry: one gather moves all the values of a word.
_ENTRY_DTYPES = {4: torch.int32, 8: torch.int64, 16: torch.complex128}

# Elements decoded at a time on a CPU: the buffers between packed bytes and values stay in the L2 cache.
_CHUNK = 1 << 19


@kept_table
def _element_table(element: ElementFormat, dtype: torch.dtype) -> Tensor:
    """Entry w holds the values of the codes in the 16-bit word w, viewed as one item.

    A word holds two 6-bit codes and four bits of a neighbour. Three bytes hold four codes: in the word of the first two
    bytes the neighbour's bits are above, in the word of the last two below. The latter use the table's second half.
    """
    words = torch.arange(1 << 16)
    mask = (1 << element.bits) - 1
    starts = (0, 4) if element.bits == 6 else (0,)
    shifts = [[start + element.bits * i for i in range(16 // element.bits)] for start in starts]
    codes = torch.cat([torch.stack([(words >> shift) & mask for shift in row], -1) for row in shifts])
    values = decode_elements(codes, element, dtype)
    return values.view(_ENTRY_DTYPES[values.shape[-1] * values.itemsize]).view(-1)


@kept_table
def _scale_table(scale_format: str, dtype: torch.dtype) -> Tensor:
    return scale_to_float(torch.arange(256, dtype=torch.uint8), scale_format, dtype)


def decoded_rows(
    qdata: Tensor, scale: Tensor, fmt: Format, length: int, *, block_offset: int, dtype: torch.dtype, step: int
) -> Iterator[tuple[slice, Tensor]]:
    """The values of `step` rows at a time: element x block scale, without the per-tensor scale.

    NOTE: all chunks share one buffer, so the next chunk overwrites this one. That matters as much as the table: fresh
    buffers of a megabyte cost a page fault every 4 KiB.

    `length` and `block_offset` are those of `dequantize_blocks`.

    Args:
        qdata, scale: uint8 [N, bytes] and [N, blocks], any strides.
        dtype: bf16 or fp32; the product is exact in either within its range.

    Yields:
        the rows, and their values [<= step, length].
    """
    assert fmt.block_size is not None
    rows, blocks = scale.shape
    step = max(1, min(step, rows))
    table = _element_table(fmt.element, dtype, qdata.device)
    scale_table = _scale_table(fmt.scale_format, dtype, qdata.device)
    scales = scale_table.index_select(0, scale.reshape(-1).to(torch.int32)).view(rows, blocks, 1)
    source = qdata if fmt.element.bits == 6 else _sixteen_bit_words(qdata)
    values = torch.empty(step, blocks, fmt.block_size, dtype=dtype, device=qdata.device)
    columns = slice(block_offset, block_offset + length)
    height = min(step, max(1, _CHUNK // values[0].numel())) if qdata.device.type == "cpu" else step
    whole = _Buffers.empty(height, values.shape[1:], source.shape[1], fmt.element, table, dtype)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        for first in range(start, stop, height):
            part = slice(first, min(first + height, stop))
            buffers = whole if part.stop - first == height else whole.head(part.stop - first)
            _fill_words(buffers.targets, source[part])
            torch.index_select(table, 0, buffers.words, out=buffers.entries)
            torch.mul(buffers.decoded, scales[part], out=values[first - start : part.stop - start])
        yield slice(start, stop), values[: stop - start].flatten(1)[:, columns]


class _Buffers(NamedTuple):
    """The buffers between packed bytes and values, for some rows."""

    targets: Tensor
    """Where to write the indices of table entries: int32 [rows, words], or [rows, groups, 2] for 6-bit codes."""
    words: Tensor
    """All indices, int32 [n]; zeros where a partial last block has no bytes."""
    entries: Tensor
    """The entries found, [n]."""
    decoded: Tensor
    """The same as values, [rows, blocks, block_size]."""

    @classmethod
    def empty(
        cls, rows: int, shape: torch.Size, width: int, element: ElementFormat, table: Tensor, dtype: torch.dtype
    ) -> _Buffers:
        """`width`: of the rows that `_fill_words` is given."""
        count = shape.numel() // (16 // element.bits)
        words = torch.zeros(rows, count, dtype=torch.int32, device=table.device)
        entries = torch.empty(rows * count, dtype=table.dtype, device=table.device)
        groups = width // 3
        targets = words[:, : 2 * groups].unflatten(1, (groups, 2)) if element.bits == 6 else words[:, :width]
        return cls(targets, words.view(-1), entries, entries.view(dtype).view(rows, *shape))

    def head(self, rows: int) -> _Buffers:
        count = rows * (self.words.numel() // self.targets.shape[0])
        return _Buffers(self.targets[:rows], self.words[:count], self.entries[:count], self.decoded[:rows])


def _sixteen_bit_words(qdata: Tensor) -> Tensor:
    """The packed bytes [N, bytes] as 16-bit words, copied only where pairs of bytes cannot be viewed as words."""
    odd = qdata.shape[1] % 2
    if odd or qdata.stride(0) % 2 or qdata.storage_offset() % 2:
        qdata = F.pad(qdata, (0, odd)).clone(memory_format=torch.contiguous_format)
    return qdata.view(torch.uint16)


def _fill_words(targets: Tensor, source: Tensor) -> None:
    """Write the indices of the table's entries for 16-bit words [n, m], or for the bytes [n, 3m] of 6-bit codes."""
    if targets.dim() == 2:
        targets.copy_(source)
        return
    b0, b1, b2 = source.unflatten(1, (targets.shape[1], 3)).unbind(-1)
    targets[..., 0].copy_(b1).mul_(1 << 8).add_(b0)
    targets[..., 1].copy_(b2).add_(1 << 8).mul_(1 << 8).add_(b1)
