"""GPTQ for block formats: codes that minimize the error of a layer's outputs instead of its weights.

Columns are rounded one after the other. The output error of each is compensated in the columns that are not rounded
yet, by the inverse Hessian. A block's scale is chosen when its first column is reached, from the weights as compensated
so far. Sources: "GPTQ" (arXiv 2210.17323); blocks and scales as in "Bridging the Gap Between Promise and Performance
for Microscaling FP4" (arXiv 2509.23202).

Legend: N output features, K input features, B blocks along K. All in fp32, but for the Cholesky factor in fp64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mxquant.config import GPTQ
from mxquant.formats.element import encode
from mxquant.formats.pack import pack_codes
from mxquant.formats.scale import e4m3_to_float, e8m0_to_float
from mxquant.formats.spec import Format
from mxquant.ops import gptq_columns, quantize_blocks
from mxquant.reference.hadamard import hadamard


class Grid(NamedTuple):
    """The format, scale mode and per-tensor scale that weights are rounded to."""

    format: Format
    scale_mode: str
    per_tensor_scale: Tensor | None
    """NVFP4: fp32, 0-dim or [N, 1]."""


def rotated_hessian(hessian_KK: Tensor, rotation: int) -> Tensor:
    """The Hessian of the rotated inputs: H^T X^T X H."""
    return hadamard(hadamard(hessian_KK, rotation).t(), rotation)


def gptq(w_NK: Tensor, hessian_KK: Tensor, grid: Grid, settings: GPTQ) -> tuple[Tensor, Tensor]:
    """Quantize one matrix, or several with the same inputs stacked along N.

    Args:
        w_NK: fp32, finite; already rotated if the config has a rotation.
        hessian_KK: X^T X of the inputs X [tokens, K], in fp32, up to a factor; rotated likewise.

    Returns:
        packed codes, uint8 [N, packed bytes]; scales, uint8 [N, B].

    Raises:
        torch.linalg.LinAlgError: the damped Hessian is not positive definite.
    """
    fmt, size = grid.format, grid.format.block_size
    assert size is not None
    n, k = w_NK.shape
    scale_NB = torch.empty(n, fmt.num_blocks(k), dtype=torch.uint8, device=w_NK.device)
    order = torch.arange(k, device=w_NK.device)
    if settings.act_order:
        # Columns of one block are not reached together, so all scales are chosen first.
        _, scale_NB = _quantize_to_grid(w_NK, grid)
        order = hessian_KK.diagonal().argsort(descending=True, stable=True)
    factor_KK = _inverse_factor(hessian_KK[order][:, order], settings.damping)
    w_KN = w_NK.t()[order].contiguous()
    rounded_KN = torch.empty_like(w_KN)  # in units of the block's scale
    for first in range(0, k, size):
        last = min(first + size, k)
        if settings.act_order:
            scale_KN = _float_scale(scale_NB, grid).t()[order[first:last] // size]
        else:
            block = first // size
            scale_NB[:, block] = _quantize_to_grid(w_KN[first:last].t(), grid)[1][:, 0]
            scale_KN = _float_scale(scale_NB[:, block], grid).expand(last - first, n)
        rounded_KN[first:last], error_KN = gptq_columns(
            w_KN[first:last], scale_KN, factor_KK[first:last, first:last], fmt.element
        )
        w_KN[last:].addmm_(factor_KK[first:last, last:].t(), error_KN, alpha=-1)
    in_place_KN = torch.empty_like(rounded_KN)
    in_place_KN[order] = rounded_KN
    codes_NK = encode(in_place_KN.t(), fmt.element)
    return pack_codes(codes_NK, fmt.element.bits)[:, : fmt.packed_size(k)].contiguous(), scale_NB


def _quantize_to_grid(w_NK: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    return quantize_blocks(w_NK, grid.format, grid.scale_mode, per_tensor_scale=grid.per_tensor_scale)


def _float_scale(scale: Tensor, grid: Grid) -> Tensor:
    """The scale of each scale byte [N, ...], with the per-tensor scale, in fp32."""
    if grid.format.scale_format == "e8m0":
        return e8m0_to_float(scale)
    per_tensor = grid.per_tensor_scale
    assert per_tensor is not None
    if per_tensor.numel() > 1:
        per_tensor = per_tensor.view(-1, *[1] * (scale.dim() - 1))
    return e4m3_to_float(scale) * per_tensor


def _inverse_factor(hessian_KK: Tensor, damping: float) -> Tensor:
    """Upper triangular U with U^T U = inverse of the damped Hessian, in fp32.

    Damping adds a share of the diagonal's mean to the diagonal. U is taken from the Cholesky factor of the Hessian with
    rows and columns reversed. That is as accurate as inverting the Hessian and factoring the inverse, at half the work.
    """
    damped = hessian_KK.double()
    diagonal = damped.diagonal()
    mean = diagonal.mean()
    # The mean is 0 if all inputs are 0: any positive diagonal will do.
    diagonal.add_(damping * mean + (mean == 0))
    reversed_factor = torch.linalg.cholesky(damped.flip(0, 1)).flip(0, 1)
    identity = torch.eye(reversed_factor.shape[0], dtype=reversed_factor.dtype, device=reversed_factor.device)
    return torch.linalg.solve_triangular(reversed_factor, identity, upper=True).float()
