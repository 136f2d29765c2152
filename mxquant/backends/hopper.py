"""What the Hopper backends share: the layout, what they ask of a problem, and their routes: the kernels that decode in
registers, and expansion.
"""

from __future__ import annotations

import functools
from typing import ClassVar

import torch
from torch import Tensor

from mxquant.backends.base import Groups, Layout, Operand, Problem, no_device
from mxquant.backends.kernel_choice import KernelChoice, Multiply
from mxquant.formats.spec import Format, get_format
from mxquant.kernels import has_triton
from mxquant.kernels.mxfp4_sm90.layout import BLOCK, LEAST_COLUMNS, ROWS, pack_tiles, unpack_tiles


class Tiles(Layout):
    """`mxquant.kernels.mxfp4_sm90.layout`, for MXFP4."""

    name: ClassVar[str] = "mxfp4_tiles"

    def pack(self, qdata: Tensor, scale: Tensor, fmt: Format) -> tuple[Tensor, Tensor] | None:
        if qdata.dim() == 2:
            return pack_tiles(qdata, scale)
        # One matrix of a stack at a time: what lies between codes and tiles is several times as large as both.
        *lead, n, _ = qdata.shape
        words = qdata.new_empty(*lead, n // ROWS, qdata.shape[-1] * ROWS)
        bytes_ = scale.new_empty(*lead, n // ROWS, scale.shape[-1] * ROWS)
        for index in range(lead[0]):
            packed = self.pack(qdata[index], scale[index], fmt)
            if packed is None:
                return None
            words[index], bytes_[index] = packed
        return words, bytes_

    def unpack(self, qdata: Tensor, scale: Tensor, fmt: Format, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        if len(shape) == 2:
            return unpack_tiles(qdata, scale, *shape)
        codes = qdata.new_empty(*shape[:-1], fmt.packed_size(shape[-1]))
        scales = scale.new_empty(*shape[:-1], fmt.num_blocks(shape[-1]))
        for index in range(shape[0]):
            codes[index], scales[index] = self.unpack(qdata[index], scale[index], fmt, shape[1:])
        return codes, scales


def reject_search(problem: Problem) -> str | None:
    """None unless activations are quantized by scales that are searched for, which no kernel does."""
    mode = problem.activation_scale_mode
    if problem.activation is None or mode not in get_format(problem.activation, activation=True).searched_scale_modes:
        return None
    return f"has no kernel for activations in scale mode {mode}, whose scales are searched for"


def reject_device(problem: Problem) -> str | None:
    """None where wgmma takes its first operand from registers and Triton is there."""
    if problem.capability is None:
        return no_device(problem, "an NVIDIA GPU")
    # ROCm counts its architectures as capabilities, too: gfx90a is its 9.0.
    if torch.version.hip is not None:
        return "needs an NVIDIA GPU, this is one of AMD's"
    if problem.capability != (9, 0):
        return "needs compute capability 9.0 (Hopper), this is {}.{}".format(*problem.capability)
    if not has_triton():
        return "needs the package triton, which is not installed"
    return reject_search(problem)


def reject_shape(problem: Problem) -> str | None:
    """None for bf16 and for a weight of whole tiles."""
    if problem.dtype != torch.bfloat16:
        return f"gives bfloat16 only, not the accuracy of {str(problem.dtype).removeprefix('torch.')}"
    n, k = problem.out_features, problem.in_features
    if n % ROWS or k % BLOCK or k < LEAST_COLUMNS or problem.block_offset:
        return f"needs out_features a multiple of {ROWS}, in_features of {BLOCK} from {LEAST_COLUMNS} on, whole blocks"
    return None


def aligned(weight: Operand) -> Operand:
    """The weight where kernels load vectors from; a copy if it begins elsewhere, as a view of other memory may.

    For other addresses the compiler would split the vectors, which the decoder takes whole.
    """
    if (weight.qdata.data_ptr() | weight.scale.data_ptr()) % 16 == 0:
        return weight
    return weight.map(torch.clone)


def walkable(x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Both as kernels take them, which walk along rows of x and along the bias; how far apart rows are is free."""
    return x if x.stride(-1) == 1 else x.contiguous(), None if bias is None else bias.contiguous()


def multiply_few(x: Tensor, weight: Operand, bias: Tensor | None, problem: Problem) -> Tensor:
    """`Backend.matmul` of a few rows."""
    # Imported here, as below: they import triton, which is not everywhere. `from` would take several times as long.
    import mxquant.kernels.mxfp4_sm90.split_k_gemm as tiled

    n, mode = problem.out_features, problem.activation_scale_mode
    weight = aligned(weight)
    x, bias = walkable(x, bias)
    return tiled.multiply_few(x, weight.qdata, weight.scale, bias, n, mode, problem.dtype, rotated=_rotated(problem))


def ready_for_kernels(multiply: Multiply) -> Multiply:
    """Decorates the function of a route: it runs on the device of its operands, which it gets as kernels take them."""

    @functools.wraps(multiply)
    def run(x: Tensor, weight: Operand, bias: Tensor | None, problem: Problem) -> Tensor:
        with torch.cuda.device_of(x):
            x, bias = walkable(x, bias)
            return multiply(x, aligned(weight), bias, problem)

    return run


@ready_for_kernels
def multiply_specialized(x: Tensor, weight: Operand, bias: Tensor | None, problem: Problem) -> Tensor:
    """`Backend.matmul` by a kernel that decodes and multiplies at the same time."""
    import mxquant.kernels.mxfp4_sm90.persistent_gemm as tiled

    n, mode, rotated = problem.out_features, problem.activation_scale_mode, _rotated(problem)
    return tiled.multiply_many(x, weight.qdata, weight.scale, bias, n, mode, problem.dtype, rotated=rotated)


_FEW, _SPECIALIZED = KernelChoice("few", multiply_few), KernelChoice("specialized", multiply_specialized)


def choose_from(
    problem: Problem, rows: int, specialized: range, few: int, expand: KernelChoice
) -> tuple[KernelChoice, ...]:
    """`TunableBackend.routes`, by what was measured on an H200.

    Args:
        specialized: numbers of rows that decoding and multiplying at the same time is the first choice for, where there
            is work for the whole device.
        few: so many rows at most are, elsewhere, for decoding in registers, once for every 128 of them.
        expand: by a workspace, for the others.
    """
    import mxquant.kernels.mxfp4_sm90.persistent_gemm as tiled

    n, k = problem.out_features, problem.in_features
    if rows in specialized and tiled.keeps_busy(rows, n, k, problem.device):
        first = _SPECIALIZED
    else:
        first = _FEW if rows <= few else expand
    there = (_FEW, _SPECIALIZED, expand) if tiled.takes_columns(k) else (_FEW, expand)
    return first, *(route for route in there if route is not first)


def multiply_groups(x: Tensor, weights: Operand, bias: Tensor | None, groups: Groups, problem: Problem) -> Tensor:
    """`Backend.grouped_matmul`, without a look at the offsets on the host."""
    import mxquant.kernels.mxfp4_sm90.grouped_gemm as tiled
    import mxquant.kernels.mxfp4_sm90.persistent_grouped_gemm as specialized

    n, mode = problem.out_features, problem.activation_scale_mode
    places = groups.count(x)
    if places == 0:
        return x.new_empty(0, n)
    weights = aligned(weights)
    x, bias = walkable(x, bias)
    given = (x, weights.qdata, weights.scale, bias, *groups, n, mode, problem.dtype)
    if specialized.takes(places, problem.experts, n, problem.in_features, x.device):
        with torch.cuda.device_of(x):
            return specialized.multiply_many_groups(*given, gate=problem.gate, rotated=_rotated(problem))
    return tiled.multiply_groups(*given, gate=problem.gate, rotated=_rotated(problem))


def _rotated(problem: Problem) -> bool:
    """Whether the input is yet to be rotated: where it is quantized, that kernel does so."""
    return problem.rotation is not None and problem.activation is not None
