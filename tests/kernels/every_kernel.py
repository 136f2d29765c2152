"""Each kernel beside its twin, as one function from rows of activations or weights to pairs that must be equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kernels.bits import bits
from mxquant.formats import FORMATS, WEIGHT_FORMATS, get_format
from mxquant.formats.block import dequantize_blocks
from mxquant.formats.block import quantize_blocks as quantize_twin
from mxquant.kernels.mxfp4_sm90.activation import rescale_activation
from mxquant.kernels.quantize import dequantize, fake_quantize, strided
from mxquant.reference.fake_quantize import fake_quantize as fake_quantize_twin
from mxquant.reference.lookup import decoded_rows
from mxquant.reference.rescale import Prologue, rescale_to_fp8, rescale_to_fp16

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


def _rescale_to_fp8(x: Tensor, mode: str | None) -> Pairs:
    for permute in (False, True):
        values, scales, _ = rescale_activation(x, Prologue(mode or "even"), permute=permute)
        yield from _rescaled((values, scales), rescale_to_fp8(x.cpu(), mode or "even", permute=permute))


def _rescale_to_fp16(x: Tensor, mode: str | None) -> Pairs:
    values, scales, _ = rescale_activation(x, Prologue(None), permute=True)
    yield from _rescaled((values, scales), rescale_to_fp16(x.cpu()))


def _rescaled(ours: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> Pairs:
    """Row scales, which are NaN for rows out of range; and the values of the other rows, but for the sign of zero,
    which no product shows.
    """
    yield ours[1], expected[1]
    in_range = ~expected[1].squeeze(1).isnan()
    yield ours[0].cpu()[in_range].float() + 0.0, expected[0][in_range].float() + 0.0


KERNELS: dict[str, Run] = {
    **{f"quantize {name}": _quantize(name) for name in strided.FORMATS},
    **{f"dequantize {name}": _dequantize(name) for name in dequantize.FORMATS},
    **{f"lookup {name}": _lookup(name) for name in WEIGHT_FORMATS},
    **{f"fake_quantize {name}": _fake_quantize(name) for name in fake_quantize.FORMATS},
    "rescale mxfp4": _rescale_to_fp8,
    "rescale bfloat16": _rescale_to_fp16,
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
    dtypes = {"rescale mxfp4": (torch.bfloat16, torch.float16), "rescale bfloat16": (torch.bfloat16,)}
    return kernel not in dtypes or (x.dtype in dtypes[kernel] and x.shape[1] % 32 == 0)


def assert_same_bits(ours: Tensor, expected: Tensor) -> None:
    """Equal bit by bit, every NaN alike."""
    assert ours.shape == expected.shape
    assert ours.dtype == expected.dtype
    if ours.is_floating_point():
        ours, expected = bits(ours), bits(expected)
    assert torch.equal(ours.cpu(), expected)
