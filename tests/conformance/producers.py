"""What each other implementation writes where it does not follow the definition, as rules over the input.

A producer is described by its scale byte, the exponent that it really divides by, its rounding and its treatment of
zeros. `predict` turns an input into the codes and scale bytes that the producer must have written, so that a comparison
has nothing left to excuse: the recorded bytes equal the prediction everywhere, and mxquant's bytes equal both wherever
no rule applies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from formats.reference import (
    SCALE_BIAS,
    Element,
    amax_of,
    decode_codes,
    floor_log2,
    per_element,
    round_to_codes,
    scale_bytes,
    scale_exponent,
)

FP32_EPSILON_EXPONENT = -23


@dataclass(frozen=True)
class Blocks:
    """One input: its float64 values, the type that they came in, and what to quantize to."""

    x: np.ndarray
    dtype: str
    element: Element
    mode: str
    amax: np.ndarray = field(init=False)
    finite: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        amax = amax_of(self.x, 32)
        finite = np.isfinite(amax)
        object.__setattr__(self, "finite", finite)
        # Blocks that hold NaN or Inf are compared apart; here they stand in as blocks of ones.
        object.__setattr__(self, "amax", np.where(finite, amax, 1.0))
        object.__setattr__(self, "x", np.where(self.spread(finite), self.x, 1.0))

    def spread(self, block_values: np.ndarray) -> np.ndarray:
        return per_element(block_values, 32, self.x.shape[-1])

    @property
    def exact(self) -> np.ndarray:
        return scale_bytes(self.amax, self.element, self.mode).astype(np.int64)

    @property
    def top(self) -> np.ndarray:
        """Blocks whose amax rounds up to 2^128, beyond fp32."""
        exponent = scale_exponent(np.where(self.amax > 0, self.amax, 1.0), self.element, self.mode)
        return (self.amax >= 2.0**127) & (exponent + self.element.max_exponent == 128)


@dataclass(frozen=True)
class Scales:
    stored: np.ndarray
    """The byte written."""
    exponent: np.ndarray
    """The elements are divided by 2^exponent; float64, so that it can be infinite."""


def round_to_dtype(values: np.ndarray, dtype: str) -> np.ndarray:
    """Values rounded to nearest even in the given type, back in float64."""
    with np.errstate(over="ignore"):
        if dtype == "f16":
            return values.astype(np.float16).astype(np.float64)
        bits = np.asarray(values.astype(np.float32)).view(np.uint32)
    if dtype == "bf16":
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return bits.view(np.float32).astype(np.float64)


def log2_in(values: np.ndarray, dtype: str) -> np.ndarray:
    """log2 rounded to the given type, where a value just below a power of two becomes one; -inf for 0."""
    with np.errstate(divide="ignore"):
        return round_to_dtype(np.log2(values), dtype)


def from_bytes(stored: np.ndarray) -> Scales:
    return Scales(stored, (stored - SCALE_BIAS).astype(np.float64))


def exact(blocks: Blocks) -> Scales:
    return from_bytes(blocks.exact)


def rceil_by_log2(blocks: Blocks) -> Scales:
    """ceil(log2(amax / max)), both steps rounded to fp32: just above a power of two the excess is lost."""
    quotient = round_to_dtype(blocks.amax / blocks.element.max_value, "f32")
    return from_bytes(np.clip(np.ceil(log2_in(quotient, "f32")) + SCALE_BIAS, 0, 254).astype(np.int64))


def torchao_scales(blocks: Blocks) -> Scales:
    """Byte 0 is written but not used: the elements are divided by 2^-126, or by 1 in mode rceil."""
    scales = rceil_by_log2(blocks) if blocks.mode == "rceil" else exact(blocks)
    used_for_zero = 0.0 if blocks.mode == "rceil" else -126.0
    return Scales(scales.stored, np.where(scales.stored == 0, used_for_zero, scales.exponent))


def quark_scales(blocks: Blocks) -> Scales:
    """Byte 0 is written as 1. Floor and ceil take log2 in the input's type, where a scale of 0 becomes 2^-23."""
    if blocks.mode == "even":
        exponent = np.where(blocks.top, 127.0, blocks.exact - SCALE_BIAS)
    else:
        rounding = {"floor": np.floor, "ceil": np.ceil}[blocks.mode]
        exponent = rounding(log2_in(blocks.amax, blocks.dtype)) - blocks.element.max_exponent
        vanished = round_to_dtype(2.0**exponent, blocks.dtype) == 0
        exponent = np.where(vanished, FP32_EPSILON_EXPONENT, exponent)
    return Scales(np.maximum(exponent, -126).astype(np.int64) + SCALE_BIAS, exponent)


def at_least_one(blocks: Blocks) -> Scales:
    """A block has byte 0 only if amax / max is 0 in fp32."""
    positive = round_to_dtype(blocks.amax / blocks.element.max_value, "f32") > 0
    return from_bytes(np.where(positive, np.maximum(blocks.exact, 1), 0))


def top_byte_254(blocks: Blocks) -> Scales:
    """An amax that rounds up to infinity is clamped to the largest byte."""
    return from_bytes(np.where(blocks.top, 254, blocks.exact))


def top_byte_254_and_inexact_exp2(blocks: Blocks) -> Scales:
    """As above; for byte 0 the factor is numpy's exp2(127), one fp32 step above 2^127, and ties go up."""
    scales = top_byte_254(blocks)
    return Scales(scales.stored, scales.exponent - np.where(scales.stored == 0, np.log2(1 + 2.0**-23), 0.0))


def top_byte_nan(blocks: Blocks) -> Scales:
    """An amax that rounds up to infinity becomes the NaN byte, and so does every element."""
    stored = np.where(blocks.top, 255, blocks.exact)
    return Scales(stored, np.where(blocks.top, np.nan, stored - SCALE_BIAS))


def compressed_tensors_scales(blocks: Blocks) -> Scales:
    """amax is rounded to a power of two on its own bit pattern, and the scale is kept in the input's type.

    A scale that came from infinity is stored as 1, the elements being divided by infinity. In fp16 a subnormal amax has
    no exponent to read (rounding can only carry it into the first normal binade), and a scale that is 0 becomes 1.
    """
    if blocks.dtype != "f16":
        stored = np.where(blocks.top, SCALE_BIAS, blocks.exact)
        return Scales(stored, np.where(blocks.top, np.inf, stored - SCALE_BIAS))
    mantissa_bits = {"even": blocks.element.mantissa_bits, "even_fp4": 1}[blocks.mode]
    bits = blocks.amax.astype(np.float16).view(np.uint16).astype(np.int64)
    exponent_field = (bits + (1 << (9 - mantissa_bits))) >> 10
    exponent = exponent_field - 15 - blocks.element.max_exponent
    lost = (exponent_field == 0) | (exponent_field == 31)
    used = np.where(lost, 0, exponent)
    return Scales(used + SCALE_BIAS, np.where(exponent_field == 31, np.inf, used))


def floor_by_log2(blocks: Blocks) -> Scales:
    """floor(log2(amax)) in the input's own type."""
    exponent = np.floor(log2_in(blocks.amax, blocks.dtype)) - blocks.element.max_exponent
    return from_bytes(np.clip(exponent, -127, 127).astype(np.int64) + SCALE_BIAS)


def exponent_field_of_quotient(blocks: Blocks) -> Scales:
    """The exponent field of amax / max in fp32: not the floor mode of the definition. Byte 0 counts as a scale of 0."""
    quotient = round_to_dtype(blocks.amax / blocks.element.max_value, "f32").astype(np.float32)
    stored = (quotient.view(np.uint32) >> 23).astype(np.int64)
    return Scales(stored, np.where(stored == 0, np.inf, stored - SCALE_BIAS))


def by_adding_half(ties: str) -> Callable[[np.ndarray, Element, str], np.ndarray]:
    """Rounding as floor(|y| + 0.5) in the input's type, in units of the last mantissa bit.

    The sum itself is rounded, so that the value just below a tie goes up with the tie; so is the logarithm that finds
    the unit. ties "even" takes exact ties back down to the even neighbour; "truncate" drops the fraction.
    """

    def codes(y: np.ndarray, element: Element, dtype: str) -> np.ndarray:
        magnitude = np.abs(y)
        exponent = np.maximum(np.floor(log2_in(magnitude, dtype)), 1 - element.bias)
        unit = 2.0 ** (exponent - element.mantissa_bits)
        steps = magnitude / unit
        if ties == "truncate":
            rounded = np.floor(steps)
        else:
            rounded = np.floor(round_to_dtype(steps + 0.5, dtype))
            if ties == "even":
                rounded = rounded - ((steps - 0.5) % 2 == 0)
        return round_to_codes(np.copysign(rounded * unit, y), element)

    return codes


def to_nearest_even(y: np.ndarray, element: Element, dtype: str) -> np.ndarray:
    return round_to_codes(y, element)


def to_nearest(ties: str) -> Callable[[np.ndarray, Element, str], np.ndarray]:
    return lambda y, element, dtype: round_to_codes(y, element, ties)


def keep(codes: np.ndarray, y: np.ndarray, element: Element) -> np.ndarray:
    return codes


def never_negative(codes: np.ndarray, y: np.ndarray, element: Element) -> np.ndarray:
    """Whatever rounds to zero is +0."""
    return np.where(codes == element.sign_code, 0, codes)


def negative_only_by_rounding(codes: np.ndarray, y: np.ndarray, element: Element) -> np.ndarray:
    """-0 becomes +0; a negative number that rounds to zero stays -0."""
    return np.where(y == 0, 0, codes)


def always_negative(codes: np.ndarray, y: np.ndarray, element: Element) -> np.ndarray:
    """An element that is zero, of either sign, becomes -0."""
    return np.where(y == 0, element.sign_code, codes)


def as_given(x: np.ndarray, dtype: str) -> np.ndarray:
    return x


def widened_by_interpreter(x: np.ndarray, dtype: str) -> np.ndarray:
    """Triton's interpreter widens a bf16 subnormal 2^k (1 + f) to 2^-126 f in fp32: it loses the leading bit."""
    if dtype != "bf16":
        return x
    magnitude = np.abs(x)
    leading = 2.0 ** floor_log2(np.where(magnitude > 0, magnitude, 1.0))
    fraction = np.where(magnitude > 0, magnitude / leading - 1, 0.0)
    return np.copysign(np.where(magnitude < 2.0**-126, fraction * 2.0**-126, magnitude), x)


NAN_CODE = 3  # what an E2M1 code becomes when its element is NaN, whatever the sign


@dataclass(frozen=True)
class Producer:
    scales: Callable[[Blocks], Scales] = exact
    rounding: Callable[[np.ndarray, Element, str], np.ndarray] = to_nearest_even
    zeros: Callable[[np.ndarray, np.ndarray, Element], np.ndarray] = keep
    widening: Callable[[np.ndarray, str], np.ndarray] = as_given
    decodes_with: str = "stored"
    """The scale of its own dequantized values: of the "stored" byte, as it "divided", or with byte 0 as "zero"."""

    def predict(self, blocks: Blocks) -> tuple[np.ndarray, np.ndarray]:
        """The codes and the scale bytes."""
        scales = self.scales(blocks)
        y = self.widening(blocks.x, blocks.dtype) * 2.0 ** -blocks.spread(scales.exponent)
        codes = self.zeros(self.rounding(np.nan_to_num(y, nan=0.0), blocks.element, blocks.dtype), y, blocks.element)
        return np.where(np.isnan(y), NAN_CODE, codes).astype(np.uint8), scales.stored.astype(np.uint8)

    def predict_dequantized(self, blocks: Blocks) -> np.ndarray:
        """The fp32 values that the producer makes of its own codes."""
        scales = self.scales(blocks)
        codes, stored = self.predict(blocks)
        exponent = {"divided": scales.exponent}.get(self.decodes_with, stored.astype(np.float64) - SCALE_BIAS)
        scale = np.where(stored == 255, np.nan, 2.0**exponent)
        if self.decodes_with == "zero":
            scale = np.where(stored == 0, 0.0, scale)
        with np.errstate(over="ignore"):
            values = (decode_codes(codes, blocks.element) * blocks.spread(scale)).astype(np.float32)
        # A fake quantizer's values come back in the input's type, where the largest of fp16 may round to infinity.
        return round_to_dtype(values, blocks.dtype).astype(np.float32) if self.decodes_with == "divided" else values


def producer(tool: str, element: str, mode: str) -> tuple[str, Producer]:
    """mxquant's name of the scale mode that `tool` calls `mode`, and the tool's rules for it."""
    fp4 = element == "e2m1"
    match tool:
        case "torchao":
            return mode, Producer(torchao_scales)
        case "quark" if element in ("e4m3", "e5m2"):  # no codes, only dequantized values
            return mode, Producer(quark_scales, decodes_with="divided")
        case "quark":
            return mode, Producer(quark_scales, zeros=never_negative)
        case "aiter_testref":
            return mode, Producer(top_byte_254)
        case "vllm_triton":
            return mode, Producer(top_byte_254, widening=widened_by_interpreter)
        case "aiter_triton":
            return mode, Producer(top_byte_254_and_inexact_exp2, widening=widened_by_interpreter)
        case "aiter_per1x32":
            rules = {"floor": exact, "even": top_byte_nan, "ceil": at_least_one, "rceil": at_least_one}
            return mode, Producer(rules[mode])
        case "modelopt" if fp4:
            return "rceil", Producer(rceil_by_log2, to_nearest("zero"), zeros=always_negative)
        case "modelopt" | "vllm_mxfp8ref":
            return "rceil", Producer(rceil_by_log2)
        case "ct":
            zeros = keep if element == "e2m3" else negative_only_by_rounding
            return "even_fp4" if element == "e4m3" else "even", Producer(compressed_tensors_scales, zeros=zeros)
        case "microxcaling":
            ties = {"nearest": "away", "even": "even", "floor": "truncate"}[mode.removeprefix("floor/")]
            return "floor", Producer(floor_by_log2, by_adding_half(ties), zeros=negative_only_by_rounding)
        case "quark_tkref":
            ours, scales = {
                "round_up": ("rceil", at_least_one),
                "round_down": ("floor", exponent_field_of_quotient),
                "even": ("even", top_byte_254),
            }[mode]
            return ours, Producer(scales, to_nearest("away" if fp4 else "even"), decodes_with="zero")
    raise ValueError(f"no rules for {tool} {element} {mode}")
