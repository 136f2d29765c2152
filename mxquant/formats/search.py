"""Scales found by search: of the candidates, the one with the least squared error over the block.

- `mse`, MX formats: the exponent of `even`, or one less. One less saturates the largest elements and halves the step of
  the others. One more is tried only for formats without a full top mantissa (E4M3, where that code is NaN); for others
  it adds no value, since after `even`'s rounding nothing carries into the next binade.
- `four_over_six`, NVFP4: the block's maximum becomes 6 or 4. At 4 the largest elements are a third nearer to each
  other. "Four Over Six" (arXiv 2512.02010).

Errors are relative to the first candidate's scale. They are summed in fp32, as a tree of fixed order, by IEEE
operations: equal values give equal scales in every dtype and on every device. On equal errors `even` wins, and 6.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxquant.formats.element import MAGNITUDE_MASK, round_to_element
from mxquant.formats.scale import e4m3_from_amax, e4m3_to_float, e8m0_from_amax, e8m0_reciprocal
from mxquant.formats.spec import ElementFormat

_SMALLER_MAX = 4.0


def search_e8m0(blocks: Tensor, element: ElementFormat) -> Tensor:
    """The E8M0 bytes of mode `mse`: int32 [..., blocks], of fp32 [..., blocks, block_size]; 255 for NaN and Inf."""
    amax_bits = (blocks.contiguous().view(torch.int32) & MAGNITUDE_MASK).amax(-1)
    even = e8m0_from_amax(amax_bits, element, "even")
    scaled = blocks * e8m0_reciprocal(even).unsqueeze(-1)
    least, found = _squared_sum(round_to_element(scaled, element) - scaled), even
    has_full_top_mantissa = (element.max_code + 1) % (1 << element.mantissa_bits) == 0
    for step in (-1,) if has_full_top_mantissa else (1, -1):
        error = _squared_sum(round_to_element(scaled * 2.0**-step, element) * 2.0**step - scaled)
        # NOTE: with NaN no comparison holds, so byte 255 stays.
        better = (error < least) & (even + step >= 0)
        least, found = torch.where(better, error, least), torch.where(better, even + step, found)
    return found


def search_e4m3(blocks: Tensor, element: ElementFormat, per_tensor_scale: Tensor) -> Tensor:
    """The E4M3 bytes of mode `four_over_six`: uint8 [..., blocks], of fp32 [..., blocks, block_size];
    `per_tensor_scale` is fp32, broadcastable to [..., blocks].
    """
    amax = blocks.abs().amax(-1)
    relative = blocks / per_tensor_scale.unsqueeze(-1)
    errors, candidates = [], []
    for largest in (element.max_value, _SMALLER_MAX):
        byte = e4m3_from_amax(amax, per_tensor_scale, largest)
        scale = e4m3_to_float(byte)
        rounded = round_to_element(blocks / (scale * per_tensor_scale).unsqueeze(-1), element)
        errors.append(_squared_sum(rounded * scale.unsqueeze(-1) - relative))
        candidates.append(byte)
    return torch.where(errors[1] < errors[0], candidates[1], candidates[0])


def _squared_sum(difference: Tensor) -> Tensor:
    """Over the last axis, whose length is a power of two, by adding halves."""
    total = difference * difference
    while total.shape[-1] > 1:
        first, second = total.chunk(2, -1)
        total = first + second
    return total.squeeze(-1)
