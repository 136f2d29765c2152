"""Memory that tells when it is read before it is written, or where it should not be read at all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mxquant import MXTensor

POISONS = [0x7F, 0xFF]
"""As bytes of a float: a NaN or a number of about 3e38; as codes or scales: the largest, or NaN."""


@contextlib.contextmanager
def poisoned_workspaces(byte: int) -> Iterator[list[Tensor]]:
    """Every tensor that torch makes without values holds `byte` throughout. Yields the tensors made so."""
    made: list[Tensor] = []

    def filling(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def fill(*arguments: Any, **options: Any) -> Tensor:
            tensor = make(*arguments, **options)
            if type(tensor) is Tensor and not tensor.is_meta:
                tensor.untyped_storage().fill_(byte)
                made.append(tensor)
            return tensor

        return fill

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (Tensor, "new_empty")):
            patch.setattr(owner, name, filling(getattr(owner, name)))
        yield made


def amid_poison(tensor: Tensor, byte: int = 0xFF) -> Tensor:
    """The same values as a view into a larger buffer of `byte`: reading one element too far, either way, shows.

    A matrix keeps a gap after each row, so its rows have a stride; of other ranks the whole is kept contiguous.
    """
    gap = 16
    if tensor.dim() == 2:
        rows, columns = tensor.shape
        buffer = torch.zeros(rows + 2, columns + 2 * gap, dtype=tensor.dtype, device=tensor.device)
        buffer.untyped_storage().fill_(byte)
        view = buffer[1 : rows + 1, gap : gap + columns]
    else:
        buffer = torch.zeros(tensor.numel() + 2 * gap, dtype=tensor.dtype, device=tensor.device)
        buffer.untyped_storage().fill_(byte)
        view = buffer[gap : gap + tensor.numel()].view(tensor.shape)
    return view.copy_(tensor)


def weight_amid_poison(weight: MXTensor, byte: int = 0xFF) -> MXTensor:
    """The same weight with its inner tensors amid poison, and what a packed row holds beyond its last code set to
    ones.
    """
    is_canonical = weight.metadata.layout == "canonical"
    operand = weight.operand.map(lambda t: amid_poison(t if is_canonical else t.flatten(), byte).view(t.shape))
    bits = {"mxfp4": 4, "nvfp4": 4, "mxfp6_e2m3": 6, "mxfp6_e3m2": 6}.get(weight.format, 8)
    length = weight.shape[-1] + weight.metadata.block_offset
    unused = operand.qdata.shape[-1] * 8 - length * bits
    if is_canonical and unused:
        # The codes of a row are one little-endian number, so the unused bits are the upper ones of its last bytes.
        ones = ((1 << unused) - 1) << (24 - unused)
        for place in range(1, min(3, operand.qdata.shape[-1]) + 1):
            operand.qdata[..., -place] |= (ones >> (24 - 8 * place)) & 0xFF
    return weight.rewrap(operand)
