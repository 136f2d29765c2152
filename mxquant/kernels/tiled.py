"""What the kernels that read tiled weights (`tiles`) have in common: addresses, decoding, and the exact way out.

A byte permute turns four codes into four FP8 bytes: the table of a block is its exponent. FP16 values of E5M2 are that
byte and a zero byte.

Shape suffixes: M input rows, N weight rows, K columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mxquant.kernels.fold import quantize_mxfp4
from mxquant.kernels.triton_numerics import e8m0_to_float, fp32_bits


def _look_up(first: str, last: str, word: str, low: str, high: str) -> str:
    """PTX: FP8 bytes of a word's codes 0-3 and 4-7; `low` and `high` hold those of the magnitudes 0-3 and 4-7."""
    return f"""
        .reg .b32 index, upper, sign;
        and.b32 index, {word}, 0x77777777;
        prmt.b32 {first}, {low}, {high}, index;
        shr.u32 upper, index, 16;
        prmt.b32 {last}, {low}, {high}, upper;
        shl.b32 sign, {word}, 4;
        lop3.b32 {first}, sign, 0x80808080, {first}, 0xEA;
        lop3.b32 {last}, {word}, 0x80808080, {last}, 0xEA;
    """


# A word comes as four bytes or as two halves, and its tables once for each of them.
_BYTES_PTX = tl.constexpr("{" + _look_up("$0", "$1", "$2", "$3", "$7") + "}")
# Bytes 0 and 2, and 1 and 3, each widened to two FP16. Multiplications, as the logic unit is what the kernel waits for.
_HALVES_PTX = tl.constexpr(
    "{ .reg .b32 first, last, even0, even1;"
    + _look_up("first", "last", "$4", "$5", "$7")
    + """
        and.b32 even0, first, 0x00FF00FF;
        and.b32 even1, last, 0x00FF00FF;
        mul.lo.u32 $0, even0, 256;
        mad.lo.s32 $1, even0, -1, first;
        mul.lo.u32 $2, even1, 256;
        mad.lo.s32 $3, even1, -1, last;
    }"""
)


@triton.jit
def decode_bytes(word: tl.tensor, low: tl.tensor, high: tl.tensor) -> tuple[tl.tensor, ...]:
    """Four bytes of a word to 2 x 4 FP8 bytes."""
    return tl.inline_asm_elementwise(
        _BYTES_PTX, "=&r,=&r,r,r,r,r,r,r,r,r,r", [word, low, high], dtype=(tl.uint8, tl.uint8), is_pure=True, pack=4
    )


@triton.jit
def decode_halves(word: tl.tensor, low: tl.tensor, high: tl.tensor) -> tuple[tl.tensor, ...]:
    """Two 16-bit halves of a word to 4 x 2 FP16: codes 0 and 2, 1 and 3, 4 and 6, 5 and 7."""
    return tl.inline_asm_elementwise(
        _HALVES_PTX, "=&r,=&r,=&r,=&r,r,r,r,r,r", [word, low, high],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
    )  # fmt: skip


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
def exact_tile(
    x: tl.tensor,
    words32: tl.tensor,
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
    highest = highest_exponent(scale_bytes, n, K)
    total = tl.zeros((BN, BM), tl.float32)
    for block in range(first_block, end_block):
        x_at = m[:, None].to(tl.int64) * x_stride + block * 32 + code[None, :]
        x_block = tl.load(x + x_at, mask=inside[:, None], other=0.0)
        word = tl.load(words32 + word_address(n, block, K)[:, None] + (code // 8)[None, :])
        w_codes = code_values(word, (code % 8)[None, :])
        relative = tl.load(scale_bytes + scale_address(n, block, K)).to(tl.int32) & 0x1F
        w_exponent = tl.maximum(relative - 27 + highest, 0)
        if MODE is None:
            w = (w_codes * e8m0_to_float(w_exponent)[:, None]).to(tl.bfloat16)
            total += tl.dot(w, tl.trans(x_block))
        else:
            value = fp32_bits(x_block).to(tl.float32, bitcast=True)
            x_exponent, x_codes = quantize_mxfp4(value, MODE)
            # The sum over a block is exact; its factors are applied one by one: their product may not exist in fp32.
            products = tl.dot(w_codes.to(tl.float16), tl.trans(x_codes.to(tl.float16)))
            total += products * e8m0_to_float(x_exponent)[None, :] * e8m0_to_float(w_exponent)[:, None]
    return total
