"""Bit patterns, in which every NaN is alike."""

import torch
from torch import Tensor


def bits(x: Tensor) -> Tensor:
    """The bits of a floating tensor, on the CPU."""
    integer = torch.int16 if x.element_size() == 2 else torch.int32
    return x.contiguous().masked_fill(x.isnan(), torch.nan).view(integer).cpu()
