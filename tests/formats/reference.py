"""A slow model of the formats, written from their definitions and sharing nothing with the library.

Everything is float64 arithmetic on numpy arrays, which is exact here: an fp32 value times a power of two, the midpoint
of two neighbouring element values, and the largest element value times a power of two all fit in 53 bits. Scales come
from comparing real numbers (not from bit patterns) and codes from comparing with the midpoints of the value table, so
that an error in the library's integer tricks cannot be repeated here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

SCALE_BIAS = 127
NAN_BYTE = 255
MODES = ("floor", "even", "ceil", "rceil", "even_fp4")


@dataclass(frozen=True)
class Element:
    """An element format by definition: a sign, exponent and mantissa bits, a bias, and the number of finite codes.

    A format of another kind is a subclass with its own `magnitudes`, `negated` and `values`.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    finite_codes: int

    @property
    def sign_code(self) -> int:
        return 1 << (self.exponent_bits + self.mantissa_bits)

    def negated(self, codes: np.ndarray) -> np.ndarray:
        """The code of minus the value of each non-negative code."""
        return codes + self.sign_code

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @cached_property
    def magnitudes(self) -> np.ndarray:
        """The value of every finite non-negative code, in order."""
        code = np.arange(self.finite_codes)
        exponent, mantissa = code >> self.mantissa_bits, code & ((1 << self.mantissa_bits) - 1)
        normal = (1 + mantissa / 2**self.mantissa_bits) * 2.0 ** (exponent - self.bias)
        subnormal = mantissa / 2**self.mantissa_bits * 2.0 ** (1 - self.bias)
        return np.where(exponent == 0, subnormal, normal)

    @cached_property
    def values(self) -> np.ndarray:
        """The value of every code, 0 to 2**bits - 1; NaN of codes that are not finite, but for E5M2's infinity."""
        values = np.full(1 << self.bits, np.nan)
        magnitudes = np.append(self.magnitudes, np.inf) if self.name == "e5m2" else self.magnitudes
        codes = np.arange(len(magnitudes))
        values[self.negated(codes)] = -magnitudes
        values[codes] = magnitudes
        return values

    @property
    def max_value(self) -> float:
        return float(self.magnitudes[-1])

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest power of two that the format holds."""
        return int(np.floor(np.log2(self.max_value)))


ELEMENTS = {
    "e2m1": Element("e2m1", 2, 1, 1, 8),
    "e2m3": Element("e2m3", 2, 3, 1, 32),
    "e3m2": Element("e3m2", 3, 2, 3, 32),
    "e4m3": Element("e4m3", 4, 3, 7, 127),  # code 127 is NaN
    "e5m2": Element("e5m2", 5, 2, 15, 124),  # code 124 is Inf, 125 to 127 are NaN
}
"""The twin of each of `mxquant.formats.ELEMENT_FORMATS`."""
FORMAT_OF_ELEMENT = {
    "e2m1": "mxfp4",
    "e2m3": "mxfp6_e2m3",
    "e3m2": "mxfp6_e3m2",
    "e4m3": "mxfp8_e4m3",
    "e5m2": "mxfp8_e5m2",
}
"""The MX format of each element format."""
ELEMENT_OF_FORMAT = {name: element for element, name in FORMAT_OF_ELEMENT.items()}


def decode_codes(codes: np.ndarray, element: Element) -> np.ndarray:
    """The value of each code; codes beyond the finite ones are Inf or NaN as the format defines."""
    return element.values[codes.astype(np.int64)]


def midpoints(element: Element) -> np.ndarray:
    return (element.magnitudes[:-1] + element.magnitudes[1:]) / 2


def on_tie(y: np.ndarray, element: Element) -> np.ndarray:
    """Where y lies exactly between two neighbouring element values."""
    return np.isin(np.abs(y), midpoints(element))


def round_to_codes(y: np.ndarray, element: Element, ties: str = "even") -> np.ndarray:
    """The nearest code of each y, saturating, the sign kept. ties: "even", "away" from zero or "zero" (towards it)."""
    magnitude, middle = np.abs(y), midpoints(element)
    below = np.searchsorted(middle, magnitude, side="left")  # a tie goes to the lower neighbour
    above = np.searchsorted(middle, magnitude, side="right")  # a tie goes to the upper one
    # A neighbour with an even code is the one whose last mantissa bit is 0.
    nearest = {"even": np.where(below % 2 == 0, below, above), "away": above, "zero": below}[ties]
    return np.where(np.signbit(y), element.negated(nearest), nearest).astype(np.uint8)


def floor_log2(a: np.ndarray) -> np.ndarray:
    """floor(log2(a)) of positive finite a, exactly."""
    return np.frexp(a)[1] - 1


def scale_exponent(amax: np.ndarray, element: Element, mode: str) -> np.ndarray:
    """Exponent of the scale of each amax (positive, finite), not yet clamped to the bytes' range."""
    exponent = floor_log2(amax)
    fraction = amax / 2.0**exponent  # in [1, 2)
    if mode == "floor":
        return exponent - element.max_exponent
    if mode in ("even", "even_fp4"):
        # amax is first rounded, half up, to the mantissa bits of the element (of FP4: even_fp4).
        mantissa_bits = 1 if mode == "even_fp4" else element.mantissa_bits
        return exponent + (fraction >= 2 - 2.0 ** -(mantissa_bits + 1)) - element.max_exponent
    if mode == "ceil":
        return exponent + (fraction > 1) - element.max_exponent
    if mode == "rceil":
        # The smallest power of two that takes amax to at most the largest element value.
        largest_fraction = element.max_value / 2.0**element.max_exponent
        return exponent + (fraction > largest_fraction) - element.max_exponent
    raise ValueError(f"no such scale mode: {mode}")


def scale_bytes(amax: np.ndarray, element: Element, mode: str) -> np.ndarray:
    """The E8M0 byte of each block: 0 for a zero block, 255 for one that holds NaN or Inf."""
    usable = np.isfinite(amax) & (amax > 0)
    exponent = scale_exponent(np.where(usable, amax, 1.0), element, mode)
    byte = np.clip(exponent + SCALE_BIAS, 0, 254)
    return np.where(usable, byte, np.where(np.isfinite(amax), 0, NAN_BYTE)).astype(np.uint8)


def blocks_of(x: np.ndarray, block_size: int) -> np.ndarray:
    """[..., K] as [..., blocks, block_size]; a partial last block is filled with zeros, which change no maximum."""
    missing = -x.shape[-1] % block_size
    padded = np.concatenate([x, np.zeros((*x.shape[:-1], missing), dtype=x.dtype)], axis=-1)
    return padded.reshape(*x.shape[:-1], -1, block_size)


def amax_of(x: np.ndarray, block_size: int) -> np.ndarray:
    """The largest magnitude of each block: NaN where the block holds one."""
    with np.errstate(invalid="ignore"):
        return np.abs(blocks_of(x, block_size)).max(axis=-1)


def per_element(block_values: np.ndarray, block_size: int, length: int) -> np.ndarray:
    """One value a block, repeated for each of its elements."""
    return np.repeat(block_values, block_size, axis=-1)[..., :length]


def scaled(x: np.ndarray, scale: np.ndarray, block_size: int = 32) -> np.ndarray:
    """x over the power of two that each block's scale byte stands for; 0 in blocks whose scale is NaN."""
    byte = per_element(scale, block_size, x.shape[-1]).astype(np.int64)
    return np.where(byte == NAN_BYTE, 0.0, x) * 2.0 ** (SCALE_BIAS - byte)


def quantize_mx(x: np.ndarray, element: Element, mode: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes (one a byte) and scale bytes of float64 x, blocks of 32 along the last axis."""
    scale = scale_bytes(amax_of(x, 32), element, mode)
    return round_to_codes(scaled(x, scale), element), scale


def dequantize_mx(codes: np.ndarray, scale: np.ndarray, element: Element) -> np.ndarray:
    byte = per_element(scale, 32, codes.shape[-1]).astype(np.int64)
    return np.where(byte == NAN_BYTE, np.nan, decode_codes(codes, element) * 2.0 ** (byte - SCALE_BIAS))


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """FP4: two codes a byte, the even one low. FP6: four codes in three bytes, the first lowest. The rest is zeros."""
    if bits == 8:
        return codes
    group = {4: 2, 6: 4}[bits]
    grouped = blocks_of(codes.astype(np.float64), group).astype(np.int64)
    word = (grouped << (bits * np.arange(group))).sum(axis=-1)
    octets = (word[..., None] >> (8 * np.arange(group * bits // 8))) & 255
    return octets.reshape(*codes.shape[:-1], -1).astype(np.uint8)


def unpack(packed: np.ndarray, bits: int, length: int) -> np.ndarray:
    """The first `length` codes, one a byte."""
    if bits == 8:
        return packed[..., :length]
    group = {4: 2, 6: 4}[bits]
    octets = packed.reshape(*packed.shape[:-1], -1, group * bits // 8).astype(np.int64)
    word = (octets << (8 * np.arange(octets.shape[-1]))).sum(axis=-1)
    codes = (word[..., None] >> (bits * np.arange(group))) & ((1 << bits) - 1)
    return codes.reshape(*packed.shape[:-1], -1)[..., :length].astype(np.uint8)


def nvfp4_per_tensor_scale(x: np.ndarray) -> np.float32:
    """amax / 2688 in fp32, 1 for an all-zero tensor."""
    amax = np.abs(x[np.isfinite(x)]).max(initial=0.0).astype(np.float32)
    return np.float32(1) if amax == 0 else max(amax / np.float32(448 * 6), np.float32(2.0**-126))


def quantize_nvfp4(x: np.ndarray, per_tensor_scale: np.float32) -> tuple[np.ndarray, np.ndarray]:
    """Codes and E4M3 scale bytes of fp32 x, blocks of 16: every operation is one fp32 operation, in this order."""
    amax = amax_of(x, 16).astype(np.float32)
    finite = np.isfinite(amax)
    with np.errstate(invalid="ignore"):
        ratio = amax / (np.float32(6) * per_tensor_scale)
    ratio = np.clip(np.where(amax == 0, 1, np.where(finite, ratio, 1)), 2.0**-9, 448)
    scale = round_to_codes(ratio.astype(np.float64), ELEMENTS["e4m3"])
    divisor = decode_codes(scale, ELEMENTS["e4m3"]).astype(np.float32) * per_tensor_scale
    finite_elements = per_element(finite, 16, x.shape[-1])
    y = np.where(finite_elements, x, 0).astype(np.float32) / per_element(divisor, 16, x.shape[-1])
    codes = round_to_codes(y.astype(np.float64), ELEMENTS["e2m1"])
    return codes, np.where(finite, scale, NAN_BYTE).astype(np.uint8)
