"""Each kernel beside its twin, as one function from rows of activations or weights to pairs that must be equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kernels.bits import bits
from mxquant.formats import FORMATS, WEIGHT_FORMATS, get_format
from mxquant.formats.block import dequantize_blocks
from mxquant.formats.block import quantize_blocks as quantize_twin
from mxquant.kernels.mxfp4_sm90.activation_fp8 import (
    fold_activation,
    fold_activation_torch,
    fold_bfloat16,
    fold_bfloat16_torch,
)
from mxquant.kernels.quantize import dequantize, fake_quantize, strided
from mxquant.reference.fake_quantize import fake_quantize as fake_quantize_twin
from mxquant.reference.lookup import decoded_rows

Pairs = Iterator[tuple[Tensor, Tensor]]
Run = Callable[[Tensor, "str | None"], Pairs]
"""From x [rows, columns] and a scale mode to pairs of what a kernel wrote and what its twin did."""


def _quantize(name: str) -> Run:
    def run(x: Tensor, mode: str | None) -> Pairs:
        yield from zip(strided.quantize_blocks(x, FORMATS[name], mode), quantize_twin(x.cpu(), FORMATS[name], mode))

    return run


def _dequantize(name: str) -> Run:
    """Of the codes of x: what the twin made of it."""

    def run(x: Tensor, mode: str | None) -> Pairs:
        fmt, length = FORMATS[name], x.shape[1]
        qdata, scale = quantize_twin(x.cpu(), fmt, mode)
        for dtype in (torch.bfloat16, torch.float32):
            values = dequantize.dequantize(qdata.to(x.device), scale.to(x.device), fmt, length, dtype=dtype)
            yield values, dequantize_blocks(qdata, scale, fmt, length, dtype=dtype)

    return run


def _lookup(name: str) -> Run:
    def run(x: Tensor, mode: str | None) -> Pairs:
        fmt, length = FORMATS[name], x.shape[1]
        qdata, scale = quantize_twin(x.cpu(), fmt, mode)
        moved = qdata.to(x.device), scale.to(x.device)
        expected = dequantize_blocks(qdata, scale, fmt, length)
        for rows, values in decoded_rows(*moved, fmt, length, block_offset=0, dtype=torch.float32, step=7):
            yield values.clone(), expected[rows]  # chunks share one buffer

    return run


def _fake_quantize(name: str) -> Run:
    fmt = get_format(name, activation=True)

    def run(x: Tensor, mode: str | None) -> Pairs:
        pairs = zip(
            fake_quantize.fake_quantize(x, fmt, mode, None, torch.float32),
            fake_quantize_twin(x.cpu(), fmt, mode, None, torch.float32),
        )
        yield from ((ours, expected) for ours, expected in pairs if expected is not None)

    return run


def _fold(x: Tensor, mode: str | None) -> Pairs:
    for permute in (False, True):
        ours = fold_activation(x, mode or "even", permute=permute)
        yield from _folded(ours, fold_activation_torch(x.cpu(), mode or "even", permute=permute))


def _fold_bfloat16(x: Tensor, mode: str | None) -> Pairs:
    yield from _folded(fold_bfloat16(x), fold_bfloat16_torch(x.cpu()))


def _folded(ours: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> Pairs:
    """Scales, which tell the rows that do not fold; of those that do, values but for the sign of zero, which no product
    shows.
    """
    yield ours[1], expected[1]
    fit = ~expected[1].squeeze(1).isnan()
    yield ours[0].cpu()[fit].float() + 0.0, expected[0][fit].float() + 0.0


KERNELS: dict[str, Run] = {
    **{f"quantize {name}": _quantize(name) for name in strided.FORMATS},
    **{f"dequantize {name}": _dequantize(name) for name in dequantize.FORMATS},
    **{f"lookup {name}": _lookup(name) for name in WEIGHT_FORMATS},
    **{f"fake_quantize {name}": _fake_quantize(name) for name in fake_quantize.FORMATS},
    "fold mxfp4": _fold,
    "fold bfloat16": _fold_bfloat16,
}


def modes_of(kernel: str) -> tuple[str | None, ...]:
    """The scale modes of the format that a kernel is named with; None where it has none to choose from."""
    name = kernel.split()[1]
    if name not in FORMATS:
        return (None,)
    fmt = get_format(name, activation=True)
    return fmt.scale_modes if fmt.scale_format == "e8m0" else (None,)


def takes(kernel: str, x: Tensor) -> bool:
    """Whether the kernel reads activations of this dtype and width."""
    dtypes = {"fold mxfp4": (torch.bfloat16, torch.float16), "fold bfloat16": (torch.bfloat16,)}
    return kernel not in dtypes or (x.dtype in dtypes[kernel] and x.shape[1] % 32 == 0)


def assert_same_bits(ours: Tensor, expected: Tensor) -> None:
    """Equal bit by bit, every NaN alike."""
    assert ours.shape == expected.shape
    assert ours.dtype == expected.dtype
    if ours.is_floating_point():
        ours, expected = bits(ours), bits(expected)
    assert torch.equal(ours.cpu(), expected)
