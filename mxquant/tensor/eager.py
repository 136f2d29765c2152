"""What is done by kernels of our own where a tensor has values and nobody differentiates, else by torch's operators."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from mxquant.kernels import has_triton
from mxquant.reference.gated_activation import GatedActivation
from mxquant.tensor.construct import is_traced


@functools.cache
def _has_bfloat16(device: torch.device) -> bool:
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def runs_kernels(*tensors: Tensor) -> bool:
    """Whether Triton kernels stand in for torch's operators: on a GPU, in eager, where nothing needs a gradient."""
    first = tensors[0]
    if not first.is_cuda or first.dtype == torch.float64 or is_traced(*tensors) or not has_triton():
        return False
    if not _has_bfloat16(first.device):
        return False
    return not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))


def gated(both_S2F: Tensor, gate: GatedActivation) -> Tensor:
    """`gate` of gates and ups: [S, F]."""
    if not runs_kernels(both_S2F) or not both_S2F.is_contiguous():
        return gate(None, both_S2F)
    from mxquant.kernels.moe.gated_activation import gate as gate_kernel  # imports triton, which is not everywhere

    return gate_kernel(both_S2F, gate)
