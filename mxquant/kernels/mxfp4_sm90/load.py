"""What the kernels that read tiled weights (`tiles`) have in common: where they lie, and the exact way out.

Shape suffixes: M input rows, N weight rows, K columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mxquant.kernels.mxfp4_sm90.activation_fp8 import quantize_mxfp4
from mxquant.kernels.primitives.numerics import INTERPRETED, e8m0_to_float, fp32_bits, power_of_two


@triton.jit
def word_address(n: tl.tensor, block: tl.tensor, K: tl.tensor) -> tl.tensor:
    """Where the first of the four 32-bit words of weight row `n` and block `block` lies in the tiles of codes."""
    row = n % 64
    chunk = block // 4
    blocks = tl.where(chunk == K // 128, K // 32 % 4, 4)  # of the chunk
    thread = (row // 16 * 8 + row % 8) * blocks + block % 4
    return n // 64 * (K * 8) + chunk * 1024 + row // 8 % 2 * (128 * blocks) + thread * 4


@triton.jit
def scale_address(n: tl.tensor, block: tl.tensor, K: tl.tensor) -> tl.tensor:
    """Where the byte of weight row `n` and block `block` lies in the tiles of scales."""
    row = n % 64
    chunk = block // 4
    half = row // 8 % 2
    blocks = tl.where(chunk == K // 128, K // 32 % 4, 4)
    thread = (row // 16 * 8 + row % 8) * blocks + block % 4
    paired = thread * 4 + chunk % 2 * 2 + half
    within = tl.where(chunk < K // 256 * 2, paired, chunk % 2 * 256 + thread * 2 + half)
    return n // 64 * (K * 2) + chunk // 2 * 512 + within


@triton.jit
def highest_exponent(scale_bytes: tl.tensor, n: tl.tensor, K: tl.tensor) -> tl.tensor:
    """The largest block exponent of weight rows `n`, from the upper bits of their first three blocks."""
    part0 = tl.load(scale_bytes + scale_address(n, 0, K)).to(tl.int32) >> 5
    part1 = tl.load(scale_bytes + scale_address(n, 1, K)).to(tl.int32) >> 5
    part2 = tl.load(scale_bytes + scale_address(n, 2, K)).to(tl.int32) >> 5
    return part0 | (part1 << 3) | (part2 << 6)


@triton.jit
def code_values(word: tl.tensor, i: tl.tensor) -> tl.tensor:
    """fp32 E2M1 values of the codes `i` of tiled 32-bit words."""
    magnitude = (((word >> (4 * i)) & 7) << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37  # x 2^126
    negative = ((word >> (8 * (i % 4) + 3 + 4 * (i // 4))) & 1) != 0
    return tl.where(negative, -magnitude, magnitude)


@triton.jit
def chunk_codes(
    words: tl.tensor, scale_bytes: tl.tensor, n: tl.tensor, chunk: tl.tensor, K: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """fp32 E2M1 values [64, 16, 8] of 128 columns of weight rows `n` [64], eight of each of 16 words, and the exponents
    [64, 16] of their blocks relative to the row's largest; zeros beyond K.
    """
    word = tl.arange(0, 16)
    block = chunk * 4 + word // 4
    inside = (block < K // 32)[None, :]
    words32 = words.to(tl.pointer_type(tl.int32))
    at = word_address(n[:, None], block[None, :], K) + (word % 4)[None, :]
    packed = tl.load(words32 + at, mask=inside, other=0)
    byte = tl.load(scale_bytes + scale_address(n[:, None], block[None, :], K), mask=inside, other=0)
    codes = code_values(packed[:, :, None], tl.arange(0, 8)[None, None, :])
    return codes, (byte.to(tl.int32) & 0x1F) - 27


@triton.jit
def exact_tile(
    x: tl.tensor,
    words: tl.tensor,
    scale_bytes: tl.tensor,
    n: tl.tensor,
    m: tl.tensor,
    inside: tl.tensor,
    first_block: tl.tensor,
    end_block: tl.tensor,
    K: tl.tensor,
    x_stride: tl.tensor,
    MODE: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
) -> tl.tensor:
    """The product [BN, BM] over some blocks from the activations as they came: for rows that do not fold.

    Args:
        MODE: scale mode of MXFP4 to quantize bf16 activations with; None: they are not quantized.
    """
    code = tl.arange(0, 32)
    words32 = words.to(tl.pointer_type(tl.int32))
    highest = highest_exponent(scale_bytes, n, K)
    total = tl.zeros((BN, BM), tl.float32)
    for block in range(first_block, end_block):
        x_at = m[:, None].to(tl.int64) * x_stride + block * 32 + code[None, :]
        x_block = tl.load(x + x_at, mask=inside[:, None], other=0.0)
        word = tl.load(words32 + word_address(n, block, K)[:, None] + (code // 8)[None, :])
        w_codes = code_values(word, (code % 8)[None, :])
        relative = tl.load(scale_bytes + scale_address(n, block, K)).to(tl.int32) & 0x1F
        w_exponent = tl.maximum(relative - 27 + highest, 0)
        value = fp32_bits(x_block).to(tl.float32, bitcast=True)
        if MODE is None:
            w = w_codes * e8m0_to_float(w_exponent)[:, None]
            # Both are exact in bf16, which the interpreter does not multiply.
            w, value = (w, value) if INTERPRETED else (w.to(tl.bfloat16), x_block)
            total += tl.dot(w, tl.trans(value))
        else:
            x_exponent, x_codes = quantize_mxfp4(value, MODE)
            # The sum over a block is exact. Its factor may not exist in fp32 where their product with the sum does.
            products = tl.dot(w_codes.to(tl.float16), tl.trans(x_codes.to(tl.float16)))
            exponent = x_exponent[None, :] + w_exponent[:, None] - 254
            half = tl.maximum(exponent >> 1, -126)
            products = products * power_of_two(half) * power_of_two(tl.maximum(exponent - half, -126))
            total += tl.where(x_exponent[None, :] == 255, float("nan"), products)
    return total


@triton.jit
def store_tile(
    y: tl.tensor, total: tl.tensor, bias: tl.tensor, rows: tl.tensor, part: tl.tensor, HAS_BIAS: tl.constexpr
) -> None:
    """Store some of the input's rows [BM] of a product [BN, BM] at `y`, with the bias at `bias` [BN] in its part 0.

    A tile with rows that do not fold is stored twice, first the others: so that no sum waits for the exact one.
    """
    if HAS_BIAS and part == 0:
        total += tl.load(bias).to(tl.float32)[:, None]
    tl.store(y, total.to(y.dtype.element_ty), mask=rows[None, :])
