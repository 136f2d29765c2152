"""What the Hopper backends share: the packed layout, what they ask of a problem, and their kernel choices but one."""

from __future__ import annotations

import functools
from typing import ClassVar

import torch
from torch import Tensor

from mxquant.backends.base import Groups, Layout, Operand, Problem, no_device
from mxquant.backends.kernel_choice import KernelChoice, Multiply
from mxquant.formats.spec import Format, get_format
from mxquant.kernels import has_triton
from mxquant.kernels.mxfp4_sm90.layout import BLOCK, MIN_K, TILE_N, pack_weight, unpack_weight
from mxquant.reference.rescale import Prologue


class PackedLayout(Layout):
    """`mxquant.kernels.mxfp4_sm90.layout`, for MXFP4."""

    name: ClassVar[str] = "mxfp4_tiles"

    def pack(self, qdata: Tensor, scale: Tensor, fmt: Format) -> tuple[Tensor, Tensor] | None:
        if qdata.dim() == 2:
            return pack_weight(qdata, scale)
        # NOTE: one matrix of a stack at a time, as packing takes several times the memory of a matrix.
        *lead, n, _ = qdata.shape
        w_packed = qdata.new_empty(*lead, n // TILE_N, qdata.shape[-1] * TILE_N)
        w_scale = scale.new_empty(*lead, n // TILE_N, scale.shape[-1] * TILE_N)
        for index in range(lead[0]):
            packed = self.pack(qdata[index], scale[index], fmt)
            if packed is None:
                return None
            w_packed[index], w_scale[index] = packed
        return w_packed, w_scale

    def unpack(self, qdata: Tensor, scale: Tensor, fmt: Format, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        if len(shape) == 2:
            return unpack_weight(qdata, scale, *shape)
        codes = qdata.new_empty(*shape[:-1], fmt.packed_size(shape[-1]))
        scales = scale.new_empty(*shape[:-1], fmt.num_blocks(shape[-1]))
        for index in range(shape[0]):
            codes[index], scales[index] = self.unpack(qdata[index], scale[index], fmt, shape[1:])
        return codes, scales


def reject_problem(problem: Problem, takes_formats: bool, formats: str) -> str | None:
    """None on a GPU whose wgmma takes its first operand from registers, where Triton is installed, for bf16 and a
    weight of whole tiles in the formats that a backend takes. `formats` is its reason against others.
    """
    if problem.capability is None:
        return no_device(problem, "an NVIDIA GPU")
    # NOTE: ROCm reports its architectures as capabilities, too: gfx90a is its 9.0.
    if torch.version.hip is not None:
        return "needs an NVIDIA GPU, this is one of AMD's"
    if problem.capability != (9, 0):
        return "needs compute capability 9.0 (Hopper), this is {}.{}".format(*problem.capability)
    if not has_triton():
        return "needs the package triton, which is not installed"
    mode, activation = problem.activation_scale_mode, problem.activation
    if activation is not None and mode in get_format(activation, activation=True).searched_scale_modes:
        return f"has no kernel for activations in scale mode {mode}, whose scales are searched for"
    if not takes_formats:
        return f"{formats}; this is {problem.weight} weights by {activation or 'unquantized'} activations"
    if problem.dtype != torch.bfloat16:
        return f"gives bfloat16 only, not the accuracy of {str(problem.dtype).removeprefix('torch.')}"
    n, k = problem.out_features, problem.in_features
    if n % TILE_N or k % BLOCK or k < MIN_K or problem.block_offset:
        return f"needs out_features a multiple of {TILE_N}, in_features of {BLOCK} from {MIN_K} on, whole blocks"
    return None


def ensure_aligned(weight: Operand) -> Operand:
    """The weight at addresses that kernels load vectors from: a copy if it is a view that begins elsewhere.

    NOTE: for other addresses the compiler would split the vectors, which the decoder takes whole.
    """
    if (weight.qdata.data_ptr() | weight.scale.data_ptr()) % 16 == 0:
        return weight
    return weight.map(torch.clone)


def ensure_contiguous(x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Both with a contiguous last axis. Rows of x may lie any distance apart."""
    return x if x.stride(-1) == 1 else x.contiguous(), None if bias is None else bias.contiguous()


def kernel_ready(multiply: Multiply) -> Multiply:
    """Decorates the function of a `KernelChoice`: it runs on the device of its operands, contiguous and aligned."""

    @functools.wraps(multiply)
    def run(x: Tensor, weight: Operand, bias: Tensor | None, problem: Problem) -> Tensor:
        with torch.cuda.device_of(x):
            x, bias = ensure_contiguous(x, bias)
            return multiply(x, ensure_aligned(weight), bias, problem)

    return run


# NOTE: to make a named tuple takes three times as long as to look it up.
_prologue = functools.lru_cache(maxsize=256)(Prologue)


def prologue_of(problem: Problem) -> Prologue:
    """What kernels do to the activations of a problem. A rotation is theirs only where the input is quantized."""
    rotated = problem.rotation is not None and problem.activation is not None
    return _prologue(problem.activation_scale_mode, rotated, problem.gate)


def multiply_split_k(x: Tensor, weight: Operand, bias: Tensor | None, problem: Problem) -> Tensor:
    """`Backend.matmul` by a kernel that splits K among programs, for few rows."""
    # NOTE: imported here, as below, since it imports triton, which is not everywhere. `from` would take several times
    # as long.
    import mxquant.kernels.mxfp4_sm90.split_k_gemm as gemm

    weight = ensure_aligned(weight)
    x, bias = ensure_contiguous(x, bias)
    n, prologue = problem.out_features, prologue_of(problem)
    return gemm.split_k_gemm(x, weight.qdata, weight.scale, bias, n, prologue, problem.dtype)


@kernel_ready
def multiply_warp_specialized(x: Tensor, weight: Operand, bias: Tensor | None, problem: Problem) -> Tensor:
    """`Backend.matmul` by a kernel whose warps decode and multiply at the same time."""
    import mxquant.kernels.mxfp4_sm90.persistent_gemm as gemm

    n, prologue = problem.out_features, prologue_of(problem)
    return gemm.persistent_gemm(x, weight.qdata, weight.scale, bias, n, prologue, problem.dtype)


_SPLIT_K = KernelChoice("split_k", multiply_split_k)
_WARP_SPECIALIZED = KernelChoice("warp_specialized", multiply_warp_specialized)


def order_choices(
    problem: Problem, rows: int, warp_specialized: range, split_k: int, dequantize: KernelChoice
) -> tuple[KernelChoice, ...]:
    """`TunableBackend.kernel_choices`, by what was measured on an H200.

    Args:
        warp_specialized: numbers of rows for which that kernel is the default, if there is work for the whole device.
        split_k: most rows for which, elsewhere, that kernel is the default; it decodes once for every 128 rows.
        dequantize: the default for more rows.
    """
    import mxquant.kernels.mxfp4_sm90.persistent_gemm as gemm

    n, k = problem.out_features, problem.in_features
    if rows in warp_specialized and gemm.fills_device(rows, n, k, problem.device):
        default = _WARP_SPECIALIZED
    else:
        default = _SPLIT_K if rows <= split_k else dequantize
    choices = (_SPLIT_K, _WARP_SPECIALIZED, dequantize) if gemm.supports_k(k) else (_SPLIT_K, dequantize)
    return default, *(choice for choice in choices if choice is not default)


def multiply_groups(x: Tensor, weights: Operand, bias: Tensor | None, groups: Groups, problem: Problem) -> Tensor:
    """`Backend.grouped_matmul`, which does not read the offsets on the host."""
    import mxquant.kernels.mxfp4_sm90.grouped_gemm as split_k
    import mxquant.kernels.mxfp4_sm90.persistent_grouped_gemm as persistent

    n, k = problem.out_features, problem.in_features
    sorted_rows = groups.count(x)
    if sorted_rows == 0:
        return x.new_empty(0, n)
    weights = ensure_aligned(weights)
    x, bias = ensure_contiguous(x, bias)
    arguments = (x, weights.qdata, weights.scale, bias, *groups, n, prologue_of(problem), problem.dtype)
    if persistent.is_faster(sorted_rows, problem.experts, n, k, x.device):
        with torch.cuda.device_of(x):
            return persistent.persistent_grouped_gemm(*arguments)
    return split_k.grouped_gemm(*arguments)
