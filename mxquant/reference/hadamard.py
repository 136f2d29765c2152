"""The block Hadamard rotation: every `size` neighbours along the last axis times the orthonormal Hadamard matrix.

The matrix (Sylvester's, divided by the square root of its size) is symmetric, so it is its own inverse. A weight that
is rotated before it is quantized multiplies activations that are rotated likewise: (x H)(W H)^T = x W^T. What is large
in one place is spread over its block, which is where MXFP4 loses most. Blocks as large as the format's own, not larger:
"Block Rotation is All You Need for MXFP4 Quantization" (arXiv 2511.04214); QuaRot (arXiv 2404.00456).

A butterfly of sums and differences, then one product with a constant: every operation is IEEE and their order fixed, so
every device gives the same values, and no setting for matmuls (TF32) changes them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def hadamard(x: Tensor, size: int) -> Tensor:
    """`x` rotated in blocks of `size` along its last axis. `hadamard(hadamard(x))` is `x` up to rounding.

    The order of additions is part of what is defined: stage by stage, elements 1, 2, 4, ... apart become their sum and
    their difference, then comes the product with 1 / sqrt(size) as fp32 rounds it.

    Computed in fp32 (fp64 for fp64). Finite values beyond 2^128 / size may become infinite.

    Args:
        x: [..., K], floating; K a multiple of `size`, which is a power of two.

    Returns:
        [..., K] in fp32, or fp64 for fp64.
    """
    values = x.to(torch.promote_types(x.dtype, torch.float32))
    stage = values.reshape(-1, size).t().contiguous()  # [size, blocks]: sums run along the blocks
    half = 1
    while half < size:
        pairs = stage.view(size // (2 * half), 2, half, stage.shape[-1])
        stage = torch.stack((pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]), 1).view(stage.shape)
        half *= 2
    return (stage * (1 / math.sqrt(size))).t().reshape(x.shape)
