"""GPTQ's inner loop: round the columns of one block in turn, and spread each column's error over those still to come.

Legend: K columns of the block, N rows of the weight. Tensors are transposed: each row holds a column of the weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxquant.formats.element import round_to_element
from mxquant.formats.spec import ElementFormat


def gptq_columns(w_KN: Tensor, scale_KN: Tensor, factor_KK: Tensor, element: ElementFormat) -> tuple[Tensor, Tensor]:
    """Columns rounded in units of their scales, and their errors divided by the factor's diagonal.

    Args:
        w_KN: fp32, contiguous; worked on in place.
        scale_KN: fp32, the scale of each element, with any per-tensor scale; may be expanded.
        factor_KK: fp32, upper triangular: row i has the weights by which column i's error changes each column.

    Returns:
        rounded, fp32 [K, N], values of the element format; errors, fp32 [K, N].
    """
    rounded_KN, error_KN = torch.empty_like(w_KN), torch.empty_like(w_KN)
    for i, pivot in enumerate(factor_KK.diagonal().tolist()):
        rounded_KN[i] = round_to_element(w_KN[i] / scale_KN[i], element)
        torch.div(w_KN[i].addcmul(rounded_KN[i], scale_KN[i], value=-1), pivot, out=error_KN[i])
        w_KN[i + 1 :].addr_(factor_KK[i, i + 1 :], error_KN[i], alpha=-1)
    return rounded_KN, error_KN
