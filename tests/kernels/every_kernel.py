"""Each kernel beside its twin, as one function from rows of activations or weights to pairs that must be equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from mxquant.formats import ACTIVATION_FORMATS, FORMATS, WEIGHT_FORMATS, get_format
from mxquant.formats.block import dequantize_blocks
from mxquant.formats.block import quantize_blocks as cast_twin
from mxquant.kernels.cast import quantize_blocks as cast
from mxquant.kernels.expand import dequantize as expand
from mxquant.kernels.fakequant import quantize_dequantize as fakequant
from mxquant.kernels.fold import fold_activation, fold_activation_torch
from mxquant.kernels.lookup import decoded_rows
from mxquant.kernels.qdq import quantize_dequantize as fakequant_twin

Pairs = Iterator[tuple[Tensor, Tensor]]
Run = Callable[[Tensor, "str | None"], Pairs]
"""From x [rows, columns] and a scale mode to pairs of what a kernel wrote and what its twin did."""


def _cast(name: str) -> Run:
    def run(x: Tensor, mode: str | None) -> Pairs:
        yield from zip(cast(x, FORMATS[name], mode), cast_twin(x.cpu(), FORMATS[name], mode))

    return run


def _expand(name: str) -> Run:
    """Of the codes of x: what the twin made of it."""

    def run(x: Tensor, mode: str | None) -> Pairs:
        fmt, length = FORMATS[name], x.shape[1]
        qdata, scale = cast_twin(x.cpu(), fmt, mode)
        for dtype in (torch.bfloat16, torch.float32):
            values = expand(qdata.to(x.device), scale.to(x.device), fmt, length, dtype=dtype)
            yield values, dequantize_blocks(qdata, scale, fmt, length, dtype=dtype)

    return run


def _lookup(name: str) -> Run:
    def run(x: Tensor, mode: str | None) -> Pairs:
        fmt, length = FORMATS[name], x.shape[1]
        qdata, scale = cast_twin(x.cpu(), fmt, mode)
        moved = qdata.to(x.device), scale.to(x.device)
        expected = dequantize_blocks(qdata, scale, fmt, length)
        for rows, values in decoded_rows(*moved, fmt, length, block_offset=0, dtype=torch.float32, step=7):
            yield values.clone(), expected[rows]  # chunks share one buffer

    return run


def _fakequant(name: str) -> Run:
    fmt = get_format(name, activation=True)

    def run(x: Tensor, mode: str | None) -> Pairs:
        pairs = zip(
            fakequant(x, fmt, mode, None, torch.float32), fakequant_twin(x.cpu(), fmt, mode, None, torch.float32)
        )
        yield from ((ours, expected) for ours, expected in pairs if expected is not None)

    return run


def _fold(name: str) -> Run:
    """Of the rows that FP8 holds; which those are is compared, the sign of zero, which no product shows, is not."""

    def run(x: Tensor, mode: str | None) -> Pairs:
        for permute in (False, True):
            values, scales, unfit = fold_activation(x, mode or "even", permute=permute)
            expected, expected_scales, expected_unfit = fold_activation_torch(x.cpu(), mode or "even", permute=permute)
            yield unfit, expected_unfit
            fit = expected_unfit == 0
            yield values.cpu()[fit].float() + 0.0, expected[fit].float() + 0.0
            yield scales.cpu()[fit], expected_scales[fit]

    return run


KERNELS: dict[str, Run] = {
    **{f"cast {name}": _cast(name) for name in WEIGHT_FORMATS},
    **{f"expand {name}": _expand(name) for name in WEIGHT_FORMATS},
    **{f"lookup {name}": _lookup(name) for name in WEIGHT_FORMATS},
    **{f"fakequant {name}": _fakequant(name) for name in ACTIVATION_FORMATS},
    "fold mxfp4": _fold("mxfp4"),
}


def modes_of(kernel: str) -> tuple[str | None, ...]:
    """The scale modes of the format that a kernel is named with; None where it has none to choose from."""
    fmt = get_format(kernel.split()[1], activation=True)
    return fmt.scale_modes if fmt.scale_format == "e8m0" else (None,)


def takes(kernel: str, x: Tensor) -> bool:
    """Whether the kernel reads activations of this dtype and width."""
    return not kernel.startswith("fold") or (x.dtype != torch.float32 and x.shape[1] % 128 == 0)


def assert_same_bits(ours: Tensor, expected: Tensor) -> None:
    """Equal bit by bit, every NaN alike."""
    assert ours.shape == expected.shape
    assert ours.dtype == expected.dtype
    ours = ours.cpu()
    if ours.is_floating_point():
        integer = torch.int16 if ours.element_size() == 2 else torch.int32
        ours, expected = (t.contiguous().masked_fill(t.isnan(), torch.nan).view(integer) for t in (ours, expected))
    assert torch.equal(ours, expected)
