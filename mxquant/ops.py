"""Operations that have a kernel and a torch twin, and the only place that chooses between the two.

A kernel is chosen for tensors on a GPU, where triton is installed and the kernel's `reject` gives no reason against the
formats, dtypes and shapes. Everything else is left to the twin in `mxquant.reference` or `mxquant.formats`. Both give
the same bytes.

Kernel modules import triton, so each is imported where it is called.

Shape suffixes are those of the twins. NOTE: K is columns, but of `ids_TK` and `weights_TK` a token's top-k choices.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from mxquant.formats.block import quantize_blocks as quantize_blocks_torch
from mxquant.formats.spec import ElementFormat, Format
from mxquant.kernels import has_triton
from mxquant.reference.gated_activation import GatedActivation
from mxquant.reference.gptq_columns import gptq_columns as gptq_columns_torch
from mxquant.reference.hadamard import hadamard as hadamard_torch
from mxquant.reference.routing import Routing
from mxquant.reference.routing import combine as combine_torch
from mxquant.reference.routing import route as route_torch

_PLAIN = (Tensor, torch.nn.Parameter)


def is_traced(*tensors: Tensor | None) -> bool:
    """Whether a graph is being traced: one of the plain tensors is a stand-in (fake, functional, a proxy, meta)."""
    for tensor in tensors:
        if tensor is not None and (type(tensor) not in _PLAIN or tensor.is_meta):
            return True
    return torch.compiler.is_compiling()


# NOTE: enough for `quantize_blocks` and `gptq_columns`: they are called only inside an operator or in eager, below
# tracing, and are not differentiated. The MoE operations below may be both, so they ask `_runs_kernels`.
def _on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda and has_triton()


def _runs_kernels(*tensors: Tensor) -> bool:
    """Whether a kernel may take the place of torch operators that are traced and differentiated: not while either
    happens, and only on GPUs with bf16.
    """
    # NOTE: is_traced comes before has_triton, which Dynamo cannot trace.
    if not tensors[0].is_cuda or is_traced(*tensors) or not has_triton() or not _has_bfloat16(tensors[0].device):
        return False
    return not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))


@functools.cache
def _has_bfloat16(device: torch.device) -> bool:
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def quantize_blocks(
    x: Tensor,
    fmt: Format,
    scale_mode: str,
    *,
    per_tensor_scale: Tensor | None = None,
    canonical_zero: bool = False,
    rotation: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantize `x` [..., K] along its last axis, as `mxquant.formats.quantize_blocks`. Not differentiable.

    Args:
        rotation: the size of Hadamard blocks: rotate each block first, in fp32; K is a multiple of it.
    """
    if _on_gpu(x):
        import mxquant.kernels.quantize.strided as kernel

        if kernel.reject(fmt, scale_mode, x.dtype) is None:
            return kernel.quantize_blocks(
                x,
                fmt,
                scale_mode,
                per_tensor_scale=per_tensor_scale,
                canonical_zero=canonical_zero,
                rotation=rotation,
            )
    if rotation is not None:
        x = hadamard(x, rotation, torch.promote_types(x.dtype, torch.float32))
    return quantize_blocks_torch(x, fmt, scale_mode, per_tensor_scale=per_tensor_scale, canonical_zero=canonical_zero)


def hadamard(x: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """`mxquant.reference.hadamard` of `x` [..., K], rounded once to `dtype`. Not differentiable."""
    if not is_traced(x) and _on_gpu(x):
        import mxquant.kernels.quantize.hadamard as kernel

        if kernel.reject(size, x.dtype, dtype) is None:
            return kernel.hadamard(x, size, dtype)
    return hadamard_torch(x, size).to(dtype)


def gptq_columns(w_KN: Tensor, scale_KN: Tensor, factor_KK: Tensor, element: ElementFormat) -> tuple[Tensor, Tensor]:
    """GPTQ's rounding of the columns of one block, as `mxquant.reference.gptq_columns`. May work on `w_KN` in place."""
    if _on_gpu(w_KN):
        import mxquant.kernels.quantize.gptq_columns as kernel

        if kernel.reject(element) is None:
            return kernel.gptq_columns(w_KN, scale_KN, factor_KK, element)
    return gptq_columns_torch(w_KN, scale_KN, factor_KK, element)


def gated_activation(gate_up_S2F: Tensor, gate: GatedActivation) -> Tensor:
    """`gate` of gates and ups [S, 2F]: [S, F]. Differentiable, by torch's operators."""
    if _runs_kernels(gate_up_S2F):
        import mxquant.kernels.moe.gated_activation as kernel

        if kernel.reject(gate_up_S2F) is None:
            return kernel.gated_activation(gate_up_S2F, gate)
    return gate(None, gate_up_S2F)  # without the module, which a GatedActivation does not read


def route(ids_TK: Tensor, experts: int) -> Routing:
    """Sort token-expert pairs by expert, as `mxquant.reference.routing`; `ids_TK` of any integer type."""
    if ids_TK.dtype not in (torch.int32, torch.int64):
        ids_TK = ids_TK.to(torch.int64)  # a narrow type may not hold the number of experts
    if _runs_kernels(ids_TK) and ids_TK.numel():
        import mxquant.kernels.moe.routing as kernel

        return kernel.route(ids_TK, experts)
    return route_torch(ids_TK, experts)


def combine(y_SH: Tensor, routing: Routing, weights_TK: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Add up each token's experts, as `mxquant.reference.routing`. Differentiable, by torch's operators."""
    tensors = (y_SH,) if weights_TK is None else (y_SH, weights_TK)
    if _runs_kernels(*tensors):
        import mxquant.kernels.moe.routing as kernel

        if kernel.reject_combine(y_SH) is None:
            return kernel.combine(y_SH, routing, weights_TK, dtype)
    return combine_torch(y_SH, routing, weights_TK, dtype)
