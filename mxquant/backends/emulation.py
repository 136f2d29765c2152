"""Emulation: decode the weight a few rows at a time and multiply in high precision, on any device, for any formats.

Operands are exact:

- bf16 inputs are multiplied in bf16, which holds MX values exactly; products are summed in fp32.
- fp16 inputs are multiplied in fp32, since MX scales exceed fp16's range. So are operands that need a factor after the
  sum (NVFP4's per-tensor scale, FP8's row scale).
- fp32 and fp64 inputs are multiplied in their own dtype.

The whole weight is never held dequantized, and nothing is cached. Of a stack of experts, only those that have rows are
decoded, one after the other. Quantizing and decoding are the torch twins on every device: no kernel takes part.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from mxquant.backends.base import FORWARD, Backend, Groups, Operand, Problem
from mxquant.formats.block import dequantize_blocks
from mxquant.formats.spec import Format, get_format
from mxquant.reference.fake_quantize import fake_quantize
from mxquant.reference.lookup import decoded_rows

# Decoded bytes held at a time: few on a CPU, to stay in its cache; many on a GPU, for few launches.
_CPU_CHUNK = 1 << 21
_DEVICE_CHUNK = 1 << 25


class Emulation(Backend):
    """Dequantize, then an ordinary matmul."""

    name: ClassVar[str] = "emulation"
    native: ClassVar[bool] = False

    def reject(self, problem: Problem) -> str | None:
        return None

    def matmul(self, x: Tensor, weight: Operand, bias: Tensor | None, problem: Problem) -> Tensor:
        values, outer = _prepare(x, weight, problem)
        return _multiply_matrix(values, outer, weight, bias, problem)

    def grouped_matmul(
        self, x: Tensor, weights: Operand, bias: Tensor | None, groups: Groups, problem: Problem
    ) -> Tensor:
        static = weights.activation_scale
        if problem.activation is not None and static is not None and static.numel() > 1:
            # Each expert quantizes its rows with its own static scale.
            return super().grouped_matmul(x, weights, bias, groups, problem)
        # Quantize each row once, however many experts it goes to.
        values, outer = _prepare(x, weights, problem)
        y = x.new_zeros(groups.count(x), problem.width, dtype=problem.dtype)
        for expert, rows in groups.on_host():
            factor = None if outer is None else groups.pick(outer, rows)
            bias_N = None if bias is None else bias[expert]
            y[rows] = _multiply_matrix(groups.pick(values, rows), factor, weights.matrix(expert), bias_N, problem)
        return y


def _prepare(x: Tensor, weight: Operand, problem: Problem) -> tuple[Tensor, Tensor | None]:
    """The input as it is multiplied, quantized where the problem says so; and the factor [M, 1] to multiply the product
    with, or None.
    """
    dtype = _arithmetic_dtype(problem)
    if problem.activation is None:
        return x.to(dtype), None
    activation = get_format(problem.activation, activation=True)
    static = None if weight.activation_scale is None else weight.activation_scale.reshape(())
    return fake_quantize(x, activation, problem.activation_scale_mode, static, dtype)


def _multiply_matrix(x: Tensor, outer: Tensor | None, weight: Operand, bias: Tensor | None, problem: Problem) -> Tensor:
    """The product of a prepared input with one matrix."""
    fmt = get_format(problem.weight)
    multiply = _emulate_forward if problem.contraction == FORWARD else _emulate_dgrad
    factors = [factor for factor in (outer, weight.per_tensor_scale) if factor is not None]
    if not factors:
        return multiply(x, weight, None if bias is None else bias.to(x.dtype), problem, fmt).to(problem.dtype)
    y = multiply(x, weight, None, problem, fmt)
    for factor in factors:
        y.mul_(factor.reshape(-1, 1))
    return (y if bias is None else y.add_(bias)).to(problem.dtype)


def _arithmetic_dtype(problem: Problem) -> torch.dtype:
    if problem.dtype == torch.float64:
        return torch.float64
    fmt = get_format(problem.weight)
    activation = get_format(problem.activation, activation=True) if problem.activation else None
    has_outer_factor = fmt.per_tensor or (activation is not None and activation.scale_format != "e8m0")
    return torch.bfloat16 if problem.dtype == torch.bfloat16 and not has_outer_factor else torch.float32


def _emulate_forward(x: Tensor, weight: Operand, bias: Tensor | None, problem: Problem, fmt: Format) -> Tensor:
    """x [M, K] @ w[N, K].T, over chunks of the weight's rows.

    Each chunk writes whole rows of the transposed product in place; columns would need a copy.
    """
    n, k = problem.out_features, problem.in_features
    y_NM = torch.empty(n, x.shape[0], dtype=x.dtype, device=x.device)
    step = max(1, _chunk(x) // max(1, k))
    for rows, w in _decoded(weight.qdata, weight.scale, fmt, k, problem.block_offset, x.dtype, step):
        if bias is None:
            torch.mm(w, x.t(), out=y_NM[rows])
        else:
            torch.addmm(bias[rows].unsqueeze(1), w, x.t(), out=y_NM[rows])
    return y_NM.t().contiguous()


def _emulate_dgrad(x: Tensor, weight: Operand, bias: Tensor | None, problem: Problem, fmt: Format) -> Tensor:
    """x [M, N] @ w[N, K], over chunks of the weight's blocks, so that no partial sums are added."""
    assert fmt.block_size is not None
    n, end = problem.out_features, problem.block_offset + problem.in_features
    if n == 0:
        return x.new_zeros(x.shape[0], problem.in_features) + (0 if bias is None else bias)
    y = torch.empty(x.shape[0], problem.in_features, dtype=x.dtype, device=x.device)
    step = max(1, _chunk(x) // (max(1, n) * fmt.block_size)) * fmt.block_size
    for first in range(0, end, step):
        start, stop = max(first, problem.block_offset), min(first + step, end)
        qdata = weight.qdata[:, fmt.packed_size(first) : fmt.packed_size(stop)]
        scale = weight.scale[:, fmt.num_blocks(first) : fmt.num_blocks(stop)]
        out = slice(start - problem.block_offset, stop - problem.block_offset)
        for _, w in _decoded(qdata, scale, fmt, stop - start, start - first, x.dtype, n):
            y[:, out] = x @ w if bias is None else torch.addmm(bias[out], x, w)
    return y


def _decoded(
    qdata: Tensor, scale: Tensor, fmt: Format, length: int, block_offset: int, dtype: torch.dtype, step: int
) -> Iterator[tuple[slice, Tensor]]:
    """Chunks of decoded rows. fp64 takes the reference, which computes in fp64 throughout."""
    if dtype != torch.float64:
        yield from decoded_rows(qdata, scale, fmt, length, block_offset=block_offset, dtype=dtype, step=step)
        return
    for start in range(0, qdata.shape[0], step):
        rows = slice(start, start + step)
        yield rows, dequantize_blocks(qdata[rows], scale[rows], fmt, length, block_offset=block_offset, dtype=dtype)


def _chunk(x: Tensor) -> int:
    """Elements to decode at a time."""
    return (_CPU_CHUNK if x.device.type == "cpu" else _DEVICE_CHUNK) // x.itemsize
