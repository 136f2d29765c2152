"""The block Hadamard rotation: every `size` neighbours along the last axis times the orthonormal Hadamard matrix.

The matrix is Sylvester's, divided by the square root of its size. It is symmetric, so it is its own inverse. A weight
that is rotated before it is quantized multiplies activations that are rotated likewise: (x H)(W H)^T = x W^T. The
rotation spreads an outlier over its block; outliers are where MXFP4 loses most. The blocks are the format's own: "Block
Rotation is All You Need for MXFP4 Quantization" (arXiv 2511.04214); QuaRot (arXiv 2404.00456).

Computed by stages of sums and differences (the fast Walsh-Hadamard transform), then one product with a constant. Every
operation is IEEE and the order is fixed: every device gives the same values, and TF32 settings change nothing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def hadamard(x: Tensor, size: int) -> Tensor:
    """`x` rotated in blocks of `size` along its last axis. `hadamard(hadamard(x))` is `x` up to rounding.

    The order of additions is part of the definition: stage by stage, elements 1, 2, 4, ... apart become their sum and
    their difference. The product with 1 / sqrt(size), rounded to fp32, comes last.

    Computed in fp32 (fp64 for fp64). Finite values beyond 2^128 / size may become infinite.

    Args:
        x: [..., K], floating; K a multiple of `size`, which is a power of two.
    """
    values = x.to(torch.promote_types(x.dtype, torch.float32))
    stage = values.reshape(-1, size).t().contiguous()  # [size, blocks]: sums run along the blocks
    half = 1
    while half < size:
        pairs = stage.view(size // (2 * half), 2, half, stage.shape[-1])
        stage = torch.stack((pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]), 1).view(stage.shape)
        half *= 2
    return (stage * (1 / math.sqrt(size))).t().reshape(x.shape)
