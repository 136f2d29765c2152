"""The block Hadamard rotation in one launch, for values that are not quantized by the same kernel.

Twin: `mxquant.reference.hadamard`, rounded to the wanted dtype, equal bit by bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxquant.kernels import reject_unlisted
from mxquant.kernels.primitives.hadamard import hadamard_block
from mxquant.kernels.primitives.numerics import DTYPES, from_fp32
from mxquant.kernels.primitives.thread_block import fp32_values, joined_words, load_block
from mxquant.kernels.runtime.launch import cached_launch, cdiv

# Blocks of a program, one in each thread; more in the interpreter, where the number of operations counts.
_BLOCKS, _INTERPRETED = 128, 1024

SIZES = (16, 32)


def reject(size: int, given: torch.dtype, wanted: torch.dtype) -> str | None:
    """None if the kernel rotates blocks of `size` from one dtype to the other, else the reason why not."""
    return (
        reject_unlisted("a rotation of size", size, SIZES)
        or reject_unlisted("dtype", given, DTYPES)
        or reject_unlisted("dtype", wanted, DTYPES)
    )


def hadamard(x: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """`x` [..., K], bf16, fp16 or fp32, rotated in blocks of 16 or 32 in fp32 and rounded once, to one of those."""
    x = x.contiguous()
    if x.data_ptr() % 16:
        x = x.clone()
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    blocks = x.numel() // size
    if blocks:
        program = _BLOCKS if x.is_cuda else _INTERPRETED
        with torch.cuda.device_of(x):
            mxquant_hadamard[(cdiv(blocks, program),)](
                x.view(torch.int32), y, blocks, DTYPE=DTYPES[x.dtype], SIZE=size, BLOCKS=program,
                num_warps=program // 32,
            )  # fmt: skip
    return y


@cached_launch
@triton.jit(do_not_specialize=["blocks"])
def mxquant_hadamard(
    words_ptr: tl.tensor,
    y_ptr: tl.tensor,
    blocks: tl.tensor,
    DTYPE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    words = load_block(words_ptr, tl.minimum(block, blocks - 1), SIZE * DTYPE.primitive_bitwidth // 32)
    rotated = from_fp32(joined_words(hadamard_block(fp32_values(words, DTYPE))), y_ptr.dtype.element_ty)
    tl.store(y_ptr + block[:, None] * SIZE + tl.arange(0, SIZE)[None, :], rotated, mask=(block < blocks)[:, None])
