"""The numerics of `mxquant.formats` as device functions: bits, block scales, codes and values.

A minifloat is three compile-time numbers: its exponent bits, its mantissa bits and the code of its largest value.
Divisions are IEEE; no exp2 and no log2 is used. Products with powers of two may have subnormal operands and results;
Triton flushes those on no device.

Twins: `mxquant.formats.element` and `mxquant.formats.scale`, equal bit by bit.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

from mxquant.formats.spec import ElementFormat, Format

# NOTE: Triton's interpreter rounds to bf16 without carries and without subnormals.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
"""The floating types that kernels read and write."""


def element_constants(element: ElementFormat) -> dict[str, int]:
    """The compile-time arguments of a minifloat."""
    return {
        "EXPONENT_BITS": element.exponent_bits,
        "MANTISSA_BITS": element.mantissa_bits,
        "MAX_CODE": element.max_code,
    }


def saturates(fmt: Format, scale_mode: str | None) -> bool:
    """Whether a scaled element can round to more than the largest value.

    `ceil`, `rceil` and `even_fp4` scale the block's maximum to the largest value at most. `even` scales it below the
    point where rounding leaves the format, if every bit pattern is a finite code.
    """
    if scale_mode in ("ceil", "rceil", "even_fp4"):
        return False
    has_every_code = fmt.element.max_code == fmt.element.sign_code - 1
    return fmt.scale_format == "e4m3" or scale_mode != "even" or not has_every_code


@triton.jit
def fp32_bits(x: tl.tensor) -> tl.tensor:
    """The fp32 bits of bf16, fp16 or fp32 `x`, as int32."""
    if x.dtype == tl.bfloat16:
        return x.to(tl.int16, bitcast=True).to(tl.int32) << 16
    return x.to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def power_of_two(exponent: tl.tensor) -> tl.tensor:
    """2^exponent for -126..127, from its bits."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def from_fp32(values: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """fp32 `values` rounded to nearest even to `DTYPE`."""
    if INTERPRETED and tl.bfloat16 == DTYPE:
        bits = values.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)
        return rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return values.to(DTYPE)


@triton.jit
def e8m0_from_amax(
    amax_bits: tl.tensor,
    EXPONENT_BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    MAX_CODE: tl.constexpr,
    MODE: tl.constexpr,
) -> tl.tensor:
    """The E8M0 byte, int32, of blocks whose largest magnitude has the fp32 bits `amax_bits`; 255 for Inf and NaN."""
    MAX_EXPONENT: tl.constexpr = (MAX_CODE >> MANTISSA_BITS) - ((1 << (EXPONENT_BITS - 1)) - 1)
    if MODE == "even":
        exponent = (amax_bits + (1 << (22 - MANTISSA_BITS))) >> 23
    elif MODE == "even_fp4":
        exponent = (amax_bits + (1 << 21)) >> 23
    elif MODE == "ceil":
        exponent = (amax_bits + 0x7FFFFF) >> 23
    elif MODE == "rceil":
        # One more where the mantissa is above that of the largest value.
        MAX_MANTISSA: tl.constexpr = (MAX_CODE & ((1 << MANTISSA_BITS) - 1)) << (23 - MANTISSA_BITS)
        exponent = (amax_bits + (0x7FFFFF - MAX_MANTISSA)) >> 23
    else:
        tl.static_assert(MODE == "floor")
        exponent = amax_bits >> 23
    byte = tl.maximum(exponent - MAX_EXPONENT, 0)
    return tl.where(amax_bits >= 0x7F800000, 255, byte)


@triton.jit
def e8m0_reciprocal(byte: tl.tensor) -> tl.tensor:
    """fp32 2^(127-b) of int32 bytes 0 to 253; -Inf for 255."""
    return ((254 - byte) << 23).to(tl.float32, bitcast=True)


@triton.jit
def e8m0_to_float(byte: tl.tensor) -> tl.tensor:
    """fp32 2^(b-127) of int32 bytes; NaN for 255."""
    bits = tl.where(byte == 0, 1 << 22, byte << 23)
    return tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def encode(
    magnitude: tl.tensor,
    factor: tl.tensor,
    EXPONENT_BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    MAX_CODE: tl.constexpr,
    SATURATE: tl.constexpr,
    WIDE: tl.constexpr,
) -> tl.tensor:
    """Codes of fp32 magnitudes times a power of two, rounded to nearest even, in the low bits of an int32.

    The code's sign bit and the bits above are undefined; with two exponent bits, those in the lowest byte are 0. NaN
    gives an undefined code.

    Args:
        SATURATE: some magnitudes may round to more than the largest value.
        WIDE: some have more than 12 significant bits.
    """
    if EXPONENT_BITS == 2:
        code = _encode_three_binades(magnitude, factor, MANTISSA_BITS, MAX_CODE, SATURATE)
    else:
        code = _encode_by_underflow(magnitude * factor, EXPONENT_BITS, MANTISSA_BITS, WIDE)
        if SATURATE:
            code = tl.minimum(code, MAX_CODE)
    return code


@triton.jit
def _encode_three_binades(
    magnitude: tl.tensor,
    factor: tl.tensor,
    MANTISSA_BITS: tl.constexpr,
    MAX_CODE: tl.constexpr,
    SATURATE: tl.constexpr,
) -> tl.tensor:
    """The code as the least of three straight lines, each half as steep as the one before.

    Adding a power of two whose last bit is the smallest step rounds each line once to nearest even: products with
    powers of two are exact, fused or not. All are positive, so they compare as integers, three at a time.
    """
    ANCHOR: tl.constexpr = 2.0 ** (23 - MANTISSA_BITS)
    steep = (magnitude * factor + ANCHOR).to(tl.int32, bitcast=True)
    middle = (magnitude * (factor * 0.5) + (ANCHOR + 1)).to(tl.int32, bitcast=True)
    flat = (magnitude * (factor * 0.25) + (ANCHOR + 2)).to(tl.int32, bitcast=True)
    if SATURATE:
        # The code above the bits of ANCHOR, which are its exponent.
        flat = tl.minimum(flat, ((127 + 23 - MANTISSA_BITS) << 23) + MAX_CODE)
    return tl.minimum(tl.minimum(steep, middle), flat)


@triton.jit
def _encode_by_underflow(
    magnitude: tl.tensor, EXPONENT_BITS: tl.constexpr, MANTISSA_BITS: tl.constexpr, WIDE: tl.constexpr
) -> tl.tensor:
    """Scaled so that the format's subnormals become fp32's, a value has the code in its top bits; the rest is rounded.

    fp32 keeps 23 bits below its smallest normal number, so 12 significant bits stay exact where they matter.
    """
    BIAS: tl.constexpr = (1 << (EXPONENT_BITS - 1)) - 1
    DROPPED: tl.constexpr = 23 - MANTISSA_BITS
    if WIDE:
        # Round to odd at 12 bits, which the next rounding does not show.
        bits = magnitude.to(tl.int32, bitcast=True)
        magnitude = ((bits | ((bits & 0xFFF) + 0xFFF)) & ~0xFFF).to(tl.float32, bitcast=True)
    bits = (magnitude * 2.0 ** (BIAS - 127)).to(tl.int32, bitcast=True)
    return (bits + ((1 << (DROPPED - 1)) - 1) + ((bits >> DROPPED) & 1)) >> DROPPED


@triton.jit
def decode(
    code: tl.tensor, EXPONENT_BITS: tl.constexpr, MANTISSA_BITS: tl.constexpr, MAX_CODE: tl.constexpr
) -> tl.tensor:
    """fp32 values of int32 codes; bits above the code are ignored."""
    SIGN: tl.constexpr = EXPONENT_BITS + MANTISSA_BITS
    BIAS: tl.constexpr = (1 << (EXPONENT_BITS - 1)) - 1
    magnitude = code & ((1 << SIGN) - 1)
    # A subnormal code becomes a subnormal fp32 number, so one product gives both kinds their value.
    bits = (code << (31 - SIGN)) & -0x80000000 | magnitude << (23 - MANTISSA_BITS)
    value = bits.to(tl.float32, bitcast=True) * 2.0 ** (127 - BIAS)
    if MAX_CODE != (1 << SIGN) - 1:
        special = (bits | 0x7F800000).to(tl.float32, bitcast=True)
        # E5M2's Inf has no mantissa bit; every other such code is NaN.
        value = tl.where(magnitude > MAX_CODE, special, value)
    return value


@triton.jit
def e4m3_from_amax(amax_bits: tl.tensor, per_tensor_scale: tl.tensor) -> tl.tensor:
    """NVFP4's block scale byte, int32: amax / (6 * per_tensor_scale) in E4M3, 1 for a zero block, 255 for Inf, NaN."""
    amax = amax_bits.to(tl.float32, bitcast=True)
    ratio = tl.div_rn(amax, per_tensor_scale * 6.0)
    ratio = tl.where(amax_bits == 0, 1.0, ratio)
    ratio = tl.minimum(tl.maximum(ratio, 0.001953125), 448.0)
    byte = encode(ratio, 1.0, 4, 3, 0x7E, False, True)
    return tl.where(amax_bits >= 0x7F800000, 255, byte)


@triton.jit
def e4m3_to_float(byte: tl.tensor) -> tl.tensor:
    """fp32 values of int32 E4M3 bytes; NaN for 255 and 127."""
    return decode(byte, 4, 3, 0x7E)


@triton.jit
def divide_blocks(magnitude: tl.tensor, divisor: tl.tensor, per_tensor_scale: tl.tensor) -> tl.tensor:
    """Quotients of fp32 magnitudes [rows, blocks, n] by NVFP4's divisors [rows, blocks], IEEE as far as E2M1 shows."""
    if _needs_division(per_tensor_scale):
        quotient = tl.div_rn(magnitude, divisor[:, :, None])
    else:
        reciprocal = tl.div_rn(1.0, divisor)
        quotient = _corrected_quotient(magnitude, divisor[:, :, None], reciprocal[:, :, None])
    return quotient


@triton.jit
def divide_block(magnitudes: tl.tuple, divisor: tl.tensor, per_tensor_scale: tl.tensor) -> tl.tuple:
    """As `divide_blocks`, for blocks that are a tuple of their elements."""
    if _needs_division(per_tensor_scale):
        quotients = [tl.div_rn(magnitude, divisor) for magnitude in magnitudes]
    else:
        reciprocal = tl.div_rn(1.0, divisor)
        quotients = [_corrected_quotient(magnitude, divisor, reciprocal) for magnitude in magnitudes]
    return quotients


@triton.jit
def _needs_division(per_tensor_scale: tl.tensor) -> tl.tensor:
    """Whether quotients must be true divisions: under extreme scales, where `_corrected_quotient` would underflow, and
    in the interpreter, some versions of which round an fma twice.
    """
    distance = tl.abs((per_tensor_scale.to(tl.int32, bitcast=True) >> 23) - 127)
    return INTERPRETED or tl.max(distance) > 90


@triton.jit
def _corrected_quotient(x: tl.tensor, divisor: tl.tensor, reciprocal: tl.tensor) -> tl.tensor:
    """The product with the rounded reciprocal, corrected once: the quotient as IEEE rounds it; NaN where it overflows.

    A division costs ten times all other work on an element, so there is one a block. Verified next to every tie of E2M1
    for every mantissa of the divisor (2^25 cases, six numbers on both sides); elsewhere a last bit does not show. The
    remainder of a dividend that does not become 0 is not subnormal here.
    """
    quotient = x * reciprocal
    return tl.fma(tl.fma(quotient, -divisor, x), reciprocal, quotient)


@triton.jit
def round_to_element(
    values: tl.tensor, EXPONENT_BITS: tl.constexpr, MANTISSA_BITS: tl.constexpr, MAX_CODE: tl.constexpr
) -> tl.tensor:
    """As `mxquant.formats.element.round_to_element`; -0 becomes 0."""
    BIAS: tl.constexpr = (1 << (EXPONENT_BITS - 1)) - 1
    MAX_EXPONENT: tl.constexpr = (MAX_CODE >> MANTISSA_BITS) - BIAS
    MAX_MANTISSA: tl.constexpr = MAX_CODE & ((1 << MANTISSA_BITS) - 1)
    MAX_VALUE: tl.constexpr = (1.0 + MAX_MANTISSA / (1 << MANTISSA_BITS)) * 2.0**MAX_EXPONENT
    exponent = values.to(tl.int32, bitcast=True) & 0x7F800000
    exponent = tl.minimum(tl.maximum(exponent, (128 - BIAS) << 23), (MAX_EXPONENT + 127) << 23)
    anchor = (exponent + (((23 - MANTISSA_BITS) << 23) | (1 << 22))).to(tl.float32, bitcast=True)
    rounded = (values + anchor) - anchor
    rounded = tl.minimum(rounded, MAX_VALUE, propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(rounded, -MAX_VALUE, propagate_nan=tl.PropagateNan.ALL)
