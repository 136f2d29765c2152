"""Quantize contiguous whole blocks, one block in each thread: the quantizer's fast path.

A thread loads its block as 32-bit words and keeps it in registers: amax, rotation and packing need no other thread.

- MXFP4 uses bf16x2 arithmetic (`primitives.e2m1x2`). fp16, fp32 and rotated values are rounded to odd first.
- Formats of six and eight bits use the GPU's conversion to FP8.
- NVFP4 divides in fp32. GPUs without these instructions compute everything in fp32.

Twin: `quantize_blocks` of `mxquant.formats.block`, after `mxquant.reference.hadamard`, equal byte by byte.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxquant.formats.spec import Format
from mxquant.kernels.primitives.bf16x2 import four_high_bytes, fp8_word, odd_pair, pair, top_pair
from mxquant.kernels.primitives.e2m1x2 import ABOVE, amax_of_pairs, encode_pairs
from mxquant.kernels.primitives.hadamard import hadamard_block, hadamard_block_and_amax
from mxquant.kernels.primitives.numerics import (
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
from mxquant.kernels.primitives.pack import (
    bit_select,
    four_apart,
    in_order_of_sixes,
    pack_nibbles,
    pack_nibbles_apart,
    pack_sixes,
)
from mxquant.kernels.primitives.thread_block import fp32_values, join_pairs, load_block, store_block
from mxquant.kernels.runtime.launch import cached_launch, cdiv

# Blocks of a program, one in each thread: fewer where large programs would leave multiprocessors idle; more in the
# interpreter, where an operation takes as long for a thousand blocks as for one.
_LARGE, _SMALL, _INTERPRETED = 128, 32, 1024
_PROGRAMS_WANTED = 1024


@functools.cache
def _instruction_set(device: torch.device) -> tuple[int, int]:
    """The compute capability whose instructions a kernel may use: none on ROCm, all in the interpreter."""
    if device.type != "cuda":
        return (9, 0)
    return torch.cuda.get_device_capability(device) if torch.version.hip is None else (0, 0)


def has_contiguous_blocks(x: Tensor, fmt: Format) -> bool:
    """Whether all blocks of `x` are whole and contiguous, at an address aligned for vector loads."""
    assert fmt.block_size is not None
    return x.is_contiguous() and x.shape[-1] % fmt.block_size == 0 and x.data_ptr() % 16 == 0


def quantize_contiguous(
    x: Tensor,
    qdata: Tensor,
    scale: Tensor,
    fmt: Format,
    mode: str | None,
    per_tensor_scale: Tensor | None,
    canonical_zero: bool,
    rotated: bool,
) -> None:
    """Quantize `x`, for which `has_contiguous_blocks` holds, into `qdata` and `scale`; one per-tensor scale at most."""
    assert fmt.block_size is not None
    bits, blocks, capability = fmt.element.bits, scale.numel(), _instruction_set(x.device)
    size = _LARGE if blocks >= _LARGE * _PROGRAMS_WANTED else _SMALL
    size = size if x.is_cuda else _INTERPRETED
    with torch.cuda.device_of(x):
        mxquant_quantize_contiguous[(cdiv(blocks, size),)](
            x.view(torch.int32),
            qdata.view(torch.int64 if bits == 6 else torch.int32),
            scale,
            per_tensor_scale,
            blocks,
            **element_constants(fmt.element),
            DTYPE=DTYPES[x.dtype],
            MODE=None if fmt.scale_format == "e4m3" else mode,
            SATURATE=saturates(fmt, mode),
            WIDE=rotated or fmt.scale_format == "e4m3" or x.dtype == torch.float32,
            CANONICAL_ZERO=canonical_zero,
            ROTATED=rotated,
            PAIRS=bits == 4 and fmt.scale_format == "e8m0" and not canonical_zero and capability >= (9, 0),
            CONVERT=bits > 4 and not canonical_zero and capability >= (8, 9),
            PAIRWISE_MAXIMUM=x.dtype == torch.bfloat16 and capability >= (9, 0),
            BLOCK=fmt.block_size,
            BLOCKS=size,
            num_warps=size // 32,
        )


@cached_launch
@triton.jit(do_not_specialize=["blocks"])
def mxquant_quantize_contiguous(
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
    PAIRWISE_MAXIMUM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Blocks [BLOCKS], one in each thread.

    Args:
        MODE: the scale mode of MX formats; None: E4M3 scales (NVFP4).
        PAIRS: quantize by bf16x2 arithmetic.
        CONVERT: encode by the conversion to FP8.
        PAIRWISE_MAXIMUM: find amax by bf16x2 arithmetic, where blocks are not rotated.
    """
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    # Threads beyond the last block load it again: as fast as a mask, and no registers have to be zeroed.
    words = load_block(words_ptr, tl.minimum(block, blocks - 1), BLOCK * DTYPE.primitive_bitwidth // 32)
    inside = block < blocks
    if PAIRS:
        byte, packed = _quantize_in_pairs(words, DTYPE, MODE, SATURATE, ROTATED)
    else:
        values = fp32_values(words, DTYPE)
        if ROTATED:
            values, largest = hadamard_block_and_amax(values)
        elif PAIRWISE_MAXIMUM:
            largest = amax_of_pairs(words)
        else:
            largest = _largest(values)
        factor = 1.0
        if MODE is None:
            per_tensor_scale = tl.load(per_tensor_ptr + tl.arange(0, 1))
            byte = e4m3_from_amax(largest, per_tensor_scale)
            magnitudes = [tl.abs(value) for value in values]
            magnitudes = divide_block(magnitudes, e4m3_to_float(byte) * per_tensor_scale, per_tensor_scale)
        else:
            byte = e8m0_from_amax(largest, EXPONENT_BITS, MANTISSA_BITS, MAX_CODE, MODE)
            magnitudes = [tl.abs(value) for value in values]
            factor = e8m0_reciprocal(byte)
        if CONVERT:
            packed = _convert(values, factor, EXPONENT_BITS, MANTISSA_BITS, SATURATE)
        else:
            codes = [encode(m, factor, EXPONENT_BITS, MANTISSA_BITS, MAX_CODE, SATURATE, WIDE) for m in magnitudes]
            packed = _pack_values(codes, values, 1 + EXPONENT_BITS + MANTISSA_BITS, CANONICAL_ZERO)
    tl.store(scale_ptr + block, byte.to(tl.uint8), mask=inside)
    store_block(qdata_ptr, [tl.where(byte == 255, 0, word) for word in packed], block, inside)


@triton.jit
def _quantize_in_pairs(
    words: tl.tuple, DTYPE: tl.constexpr, MODE: tl.constexpr, SATURATE: tl.constexpr, ROTATED: tl.constexpr
) -> tuple[tl.tensor, tl.tuple]:
    """Scale bytes and packed codes of MXFP4, by bf16x2 arithmetic."""
    signs = words
    APART: tl.constexpr = ROTATED or tl.bfloat16 != DTYPE
    if APART:
        values = fp32_values(words, DTYPE)
        low, high = four_apart(hadamard_block(values) if ROTATED else values)
        words, signs = join_pairs(odd_pair, low, high), join_pairs(top_pair, low, high)
    byte = e8m0_from_amax(amax_of_pairs(words), 2, 1, 7, MODE)
    codes = encode_pairs(words, e8m0_reciprocal(byte), SATURATE)
    return byte, pack_nibbles_apart(codes, signs, ABOVE) if APART else pack_nibbles(codes, signs)


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
    signs = [value.to(tl.int32, bitcast=True) for value in values]
    if CANONICAL_ZERO:
        kept: tl.tuple = ()
        for i in tl.static_range(len(codes)):
            kept = kept + (tl.where((codes[i] & MASK) == 0, 0, signs[i]),)
        signs = kept
    if BITS == 4:
        low, high = four_apart(codes)
        pairs: tl.tuple = ()
        for i in tl.static_range(len(low)):
            pairs = pairs + (pair(low[i], high[i]),)
        low, high = four_apart(signs)
        packed = pack_nibbles_apart(pairs, join_pairs(top_pair, low, high), 0)
    else:
        if BITS == 6:
            codes, signs = in_order_of_sixes(codes), in_order_of_sixes(signs)
        words: tl.tuple = ()
        for i in tl.static_range(0, len(codes), 4):
            word = codes[i] & MASK | (codes[i + 1] & MASK) << 8 | (codes[i + 2] & MASK) << 16 | codes[i + 3] << 24
            tops = four_high_bytes(top_pair(signs[i], signs[i + 1]), top_pair(signs[i + 2], signs[i + 3]))
            words = words + (bit_select(tops, word, -0x7F7F7F80),)
        packed = pack_sixes(words) if BITS == 6 else words
    return packed


@triton.jit
def _convert(
    values: tl.tuple,
    factor: tl.tensor,
    EXPONENT_BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    SATURATE: tl.constexpr,
) -> tl.tuple:
    """Packed codes of fp32 values times powers of two, by the conversion to FP8.

    A six-bit format is the lowest binades of the eight-bit format with as many mantissa bits, scaled so that their
    subnormals coincide. Its codes are the lower bits, and the conversion rounds once.
    """
    BITS: tl.constexpr = 1 + EXPONENT_BITS + MANTISSA_BITS
    BIAS: tl.constexpr = (1 << (EXPONENT_BITS - 1)) - 1
    SHIFT: tl.constexpr = BIAS - ((1 << (6 - MANTISSA_BITS)) - 1)
    LARGEST: tl.constexpr = (2.0 - 2.0**-MANTISSA_BITS) * 2.0 ** ((1 << EXPONENT_BITS) - 1 - BIAS + SHIFT)
    factor *= 2.0**SHIFT
    scaled = [value * factor for value in values]
    if BITS == 6:
        scaled = in_order_of_sixes(scaled)
        if SATURATE:
            scaled = [tl.minimum(tl.maximum(value, -LARGEST), LARGEST) for value in scaled]
    words: tl.tuple = ()
    for i in tl.static_range(0, len(scaled), 4):
        a, b, c, d = scaled[i : i + 4]
        words = words + (fp8_word(a, b, c, d, 7 - MANTISSA_BITS, MANTISSA_BITS),)
    return pack_sixes(words) if BITS == 6 else words
