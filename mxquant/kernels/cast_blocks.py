"""Quantize whole blocks that lie one after the other in memory, one in each thread: the quantizer's fast way.

A thread loads its block as 32-bit words and keeps it, so the block's maximum, its rotation and the packing of its codes
need no other thread. bf16 is quantized to four and six bits two elements at a time, in bf16 itself: a product with a
power of two is exact, and one fused multiply-add with a constant rounds once, as fp32 would. FP8 is what the GPU's
conversion gives. Where the instructions for that are missing, and for fp16, fp32 and rotated values, the arithmetic is
fp32's.

Twin: `quantize_blocks` of `mxquant.formats.block`, after `rotate`, equal byte by byte.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxquant.formats.spec import Format
from mxquant.kernels.bf16_pairs import fp8_word, pair
from mxquant.kernels.block_in_thread import choose_bits, fp32_values, load_block, odd_pairs, pack_pairs, store_block
from mxquant.kernels.butterfly import rotate_block
from mxquant.kernels.encode_pairs import encode_pairs, largest_of_pairs
from mxquant.kernels.launch import cached_launch, cdiv
from mxquant.kernels.triton_numerics import (
    DTYPES,
    divide_block,
    e4m3_from_amax,
    e4m3_to_float,
    e8m0_from_amax,
    e8m0_reciprocal,
    element_constants,
    encode,
    saturates,
)

# Blocks of a program, one in each thread; fewer where they would leave cores idle, and more in the interpreter, where
# an operation takes as long for a thousand blocks as for one.
_LARGE, _SMALL, _INTERPRETED = 128, 32, 1024
_PROGRAMS_WANTED = 1024


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    """Of the instructions that a kernel may use: those of the GPU, none of them on ROCm, all in the interpreter."""
    if device.type != "cuda":
        return (9, 0)
    return torch.cuda.get_device_capability(device) if torch.version.hip is None else (0, 0)


def takes(x: Tensor, fmt: Format) -> bool:
    """Whether all blocks of `x` are whole and lie one after the other, at an address that words are loaded from."""
    assert fmt.block_size is not None
    return x.is_contiguous() and x.shape[-1] % fmt.block_size == 0 and x.data_ptr() % 16 == 0


def quantize_whole_blocks(
    x: Tensor,
    qdata: Tensor,
    scale: Tensor,
    fmt: Format,
    mode: str | None,
    per_tensor_scale: Tensor | None,
    canonical_zero: bool,
    rotated: bool,
) -> None:
    """Quantize `x`, that `takes` is true of, into the contiguous `qdata` and `scale`.

    Args:
        per_tensor_scale: NVFP4's, of one element.
        rotated: rotate each block first, in fp32.
    """
    assert fmt.block_size is not None
    bits, blocks, capability = fmt.element.bits, scale.numel(), _capability(x.device)
    size = _LARGE if blocks >= _LARGE * _PROGRAMS_WANTED else _SMALL
    if not x.is_cuda:
        size = _INTERPRETED
    with torch.cuda.device_of(x):
        _quantize_kernel[(cdiv(blocks, size),)](
            x.view(torch.int32),
            qdata.view(torch.int64 if bits == 6 else torch.int32),
            scale,
            per_tensor_scale,
            blocks,
            **element_constants(fmt.element),
            DTYPE=DTYPES[x.dtype],
            MODE=None if fmt.per_tensor else mode,
            SATURATE=saturates(fmt, mode),
            WIDE=rotated or fmt.per_tensor or x.dtype == torch.float32,
            CANONICAL_ZERO=canonical_zero,
            ROTATED=rotated,
            PAIRS=bits <= 6 and not (fmt.per_tensor or canonical_zero) and capability >= (9, 0),
            CONVERT=bits == 8 and not canonical_zero and capability >= (8, 9),
            BLOCK=fmt.block_size,
            BLOCKS=size,
            num_warps=size // 32,
        )


@cached_launch
@triton.jit(do_not_specialize=["blocks"])
def _quantize_kernel(
    words_ptr: tl.tensor,
    qdata_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    per_tensor_ptr: tl.tensor,
    blocks: tl.tensor,
    EXPONENT_BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    MAX_CODE: tl.constexpr,
    DTYPE: tl.constexpr,
    MODE: tl.constexpr,
    SATURATE: tl.constexpr,
    WIDE: tl.constexpr,
    CANONICAL_ZERO: tl.constexpr,
    ROTATED: tl.constexpr,
    PAIRS: tl.constexpr,
    CONVERT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Blocks [BLOCKS], one in each thread. MODE None: NVFP4. PAIRS: in bf16. CONVERT: by the conversion to FP8."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    # Threads beyond the last block load that one again: as quick as a mask, which leaves registers to be zeroed.
    words = load_block(words_ptr, tl.minimum(block, blocks - 1), BLOCK * DTYPE.primitive_bitwidth // 32)
    inside = block < blocks
    if PAIRS:
        if ROTATED or tl.bfloat16 != DTYPE:
            values = fp32_values(words, DTYPE)
            words = odd_pairs(rotate_block(values) if ROTATED else values)
        byte = e8m0_from_amax(largest_of_pairs(words), EXPONENT_BITS, MANTISSA_BITS, MAX_CODE, MODE)
        codes = encode_pairs(words, e8m0_reciprocal(byte), EXPONENT_BITS, MANTISSA_BITS, MAX_CODE, SATURATE)
        packed = pack_pairs(codes, words, 1 + EXPONENT_BITS + MANTISSA_BITS)
    else:
        values = fp32_values(words, DTYPE)
        if ROTATED:
            values = rotate_block(values)
        magnitudes = [tl.abs(value) for value in values]
        if MODE is None:
            per_tensor_scale = tl.load(per_tensor_ptr + tl.arange(0, 1))
            byte = e4m3_from_amax(_largest(values), per_tensor_scale)
            magnitudes = divide_block(magnitudes, e4m3_to_float(byte) * per_tensor_scale, per_tensor_scale)
            factor = 1.0
        else:
            byte = e8m0_from_amax(_largest(values), EXPONENT_BITS, MANTISSA_BITS, MAX_CODE, MODE)
            factor = e8m0_reciprocal(byte)
        if CONVERT:
            packed = _convert(values, factor, EXPONENT_BITS, MANTISSA_BITS)
        else:
            codes = [encode(m, factor, EXPONENT_BITS, MANTISSA_BITS, MAX_CODE, SATURATE, WIDE) for m in magnitudes]
            packed = _pack_values(codes, values, 1 + EXPONENT_BITS + MANTISSA_BITS, CANONICAL_ZERO)
    tl.store(scale_ptr + block, byte.to(tl.uint8), mask=inside)
    store_block(qdata_ptr, [tl.where(byte == 255, 0, word) for word in packed], block, inside)


@triton.jit
def _largest(values: tl.tuple) -> tl.tensor:
    """The fp32 bits of the largest magnitude; of NaN, if there is one."""
    amax = values[0].to(tl.int32, bitcast=True) & 0x7FFFFFFF
    for i in tl.static_range(1, len(values)):
        amax = tl.maximum(amax, values[i].to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    return amax


@triton.jit
def _pack_values(codes: tl.tuple, values: tl.tuple, BITS: tl.constexpr, CANONICAL_ZERO: tl.constexpr) -> tl.tuple:
    """Packed codes, each with the sign of its fp32 value."""
    MASK: tl.constexpr = (1 << (BITS - 1)) - 1
    bits = [value.to(tl.int32, bitcast=True) for value in values]
    pairs: tl.tuple = ()
    signs: tl.tuple = ()
    for i in tl.static_range(0, len(values), 2):
        low, high = bits[i], bits[i + 1]
        if CANONICAL_ZERO:
            low = tl.where((codes[i] & MASK) == 0, 0, low)
            high = tl.where((codes[i + 1] & MASK) == 0, 0, high)
        pairs = pairs + (pair(codes[i], codes[i + 1]),)
        signs = signs + (choose_bits(high, low >> 16, -0x10000),)
    return pack_pairs(pairs, signs, BITS)


@triton.jit
def _convert(values: tl.tuple, factor: tl.tensor, EXPONENT_BITS: tl.constexpr, MANTISSA_BITS: tl.constexpr) -> tl.tuple:
    """FP8 bytes of fp32 values times powers of two, four a word."""
    words: tl.tuple = ()
    for i in tl.static_range(0, len(values), 4):
        a, b, c, d = [value * factor for value in values[i : i + 4]]
        words = words + (fp8_word(a, b, c, d, EXPONENT_BITS, MANTISSA_BITS),)
    return words
