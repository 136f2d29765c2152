"""The layout that the Hopper backends share, and what they all ask of a problem."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from mxquant.backends.base import Layout, Problem
from mxquant.formats.spec import Format, get_format
from mxquant.kernels import has_triton
from mxquant.kernels.tiles import BLOCK, LEAST_COLUMNS, ROWS, pack_tiles, unpack_tiles


class Tiles(Layout):
    """`mxquant.kernels.tiles`, for MXFP4."""

    name: ClassVar[str] = "mxfp4_tiles"

    def pack(self, qdata: Tensor, scale: Tensor, fmt: Format) -> tuple[Tensor, Tensor] | None:
        return pack_tiles(qdata, scale)

    def unpack(self, qdata: Tensor, scale: Tensor, fmt: Format, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        return unpack_tiles(qdata, scale, *shape[-2:])


def reject_search(problem: Problem) -> str | None:
    """None unless activations are quantized by scales that are searched for, which no kernel does."""
    mode = problem.activation_scale_mode
    if problem.activation is None or mode not in get_format(problem.activation, activation=True).searched_scale_modes:
        return None
    return f"has no kernel for activations in scale mode {mode}, whose scales are searched for"


def reject_device(problem: Problem) -> str | None:
    """None where wgmma takes its first operand from registers and Triton is there."""
    if problem.capability is None:
        return f"needs an NVIDIA GPU, this is {problem.device.type}"
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
