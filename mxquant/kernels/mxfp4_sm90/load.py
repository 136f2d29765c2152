"""Addresses and loads of the packed weight (`layout`)."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from mxquant.kernels.primitives.numerics import power_of_two


class PackedWeight(NamedTuple):
    """uint8 pointers to the packed layout, and how many columns it has."""

    w_packed: tl.tensor
    w_scale: tl.tensor
    K: tl.tensor


@triton.jit
def packed_offset(n: tl.tensor, block: tl.tensor, K: tl.tensor) -> tl.tensor:
    """Where in `w_packed` the first of the four 32-bit words of weight row `n` and block `block` lies, in words."""
    row = n % 64
    chunk = block // 4
    blocks = tl.where(chunk == K // 128, K // 32 % 4, 4)  # of the chunk
    thread = (row // 16 * 8 + row % 8) * blocks + block % 4
    return n // 64 * (K * 8) + chunk * 1024 + row // 8 % 2 * (128 * blocks) + thread * 4


@triton.jit
def scale_offset(n: tl.tensor, block: tl.tensor, K: tl.tensor) -> tl.tensor:
    """Where in `w_scale` the byte of weight row `n` and block `block` lies."""
    row = n % 64
    chunk = block // 4
    half = row // 8 % 2
    blocks = tl.where(chunk == K // 128, K // 32 % 4, 4)
    thread = (row // 16 * 8 + row % 8) * blocks + block % 4
    paired = thread * 4 + chunk % 2 * 2 + half
    within = tl.where(chunk < K // 256 * 2, paired, chunk % 2 * 256 + thread * 2 + half)
    return n // 64 * (K * 2) + chunk // 2 * 512 + within


@triton.jit
def load_max_exponent(w_scale: tl.tensor, n: tl.tensor, K: tl.tensor) -> tl.tensor:
    """The largest block exponent of weight rows `n`, from the upper bits of their first three blocks."""
    bits0 = tl.load(w_scale + scale_offset(n, 0, K)).to(tl.int32) >> 5
    bits1 = tl.load(w_scale + scale_offset(n, 1, K)).to(tl.int32) >> 5
    bits2 = tl.load(w_scale + scale_offset(n, 2, K)).to(tl.int32) >> 5
    return bits0 | (bits1 << 3) | (bits2 << 6)


@triton.jit
def row_scale_of(max_exponent: tl.tensor, TOP: tl.constexpr) -> tl.tensor:
    """2^(max_exponent - TOP - 127), the scale of a row whose largest block exponent was brought to TOP.

    NOTE: a product of two factors, as the scale is subnormal where `max_exponent` is small.
    """
    exponent = max_exponent - TOP - 127
    return power_of_two(tl.maximum(exponent, -126)) * power_of_two(tl.minimum(exponent + 126, 0))


@triton.jit
def e2m1_values(word: tl.tensor, i: tl.tensor) -> tl.tensor:
    """fp32 E2M1 values of the codes `i` of packed 32-bit words."""
    magnitude = (((word >> (4 * i)) & 7) << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37  # x 2^126
    negative = ((word >> (8 * (i % 4) + 3 + 4 * (i // 4))) & 1) != 0
    return tl.where(negative, -magnitude, magnitude)


@triton.jit
def load_chunk(weight: PackedWeight, n: tl.tensor, chunk: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """128 columns of weight rows `n` [64]; zeros beyond K.

    Returns:
        fp32 E2M1 values [64, 16, 8], eight of each of 16 words; int32 exponents [64, 16] of the words' blocks, relative
        to the row's largest.
    """
    K = weight.K
    word = tl.arange(0, 16)
    block = chunk * 4 + word // 4
    inside = (block < K // 32)[None, :]
    words32 = weight.w_packed.to(tl.pointer_type(tl.int32))
    at = packed_offset(n[:, None], block[None, :], K) + (word % 4)[None, :]
    packed = tl.load(words32 + at, mask=inside, other=0)
    byte = tl.load(weight.w_scale + scale_offset(n[:, None], block[None, :], K), mask=inside, other=0)
    codes = e2m1_values(packed[:, :, None], tl.arange(0, 8)[None, None, :])
    return codes, (byte.to(tl.int32) & 0x1F) - 27
