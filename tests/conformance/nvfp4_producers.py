"""What each NVFP4 implementation computes, operation by operation in fp32: they divide in different orders.

All get the per-tensor scale that the tool stored: a multiplier for decoding (ModelOpt, torchao) or its inverse
(compressed-tensors, vLLM).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from formats.reference import ELEMENTS, amax_of, decode_codes, per_element, round_to_codes

from conformance.producers import round_to_dtype

ONE, SIX = np.float32(1), np.float32(6)
CT_SMALLEST_SCALE = 0x20  # 0.125

Quantizer = Callable[[np.ndarray, str, np.float32], tuple[np.ndarray, np.ndarray]]


def to_e4m3(ratio: np.ndarray, smallest: float = 0.0) -> np.ndarray:
    return round_to_codes(np.clip(ratio, smallest, 448).astype(np.float64), ELEMENTS["e4m3"])


def scale_values(scale: np.ndarray) -> np.ndarray:
    return decode_codes(scale, ELEMENTS["e4m3"]).astype(np.float32)


def to_e2m1(y: np.ndarray) -> np.ndarray:
    return round_to_codes(y.astype(np.float64), ELEMENTS["e2m1"])


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    return round_to_dtype(values.astype(np.float64), dtype).astype(np.float32)


def modelopt(x: np.ndarray, dtype: str, g: np.float32) -> tuple[np.ndarray, np.ndarray]:
    amax = amax_of(x, 16)
    scale = to_e4m3(np.where(amax == 0, ONE, amax / (SIX * g)), 2.0**-9)
    y = x / per_element(scale_values(scale) * g, 16, x.shape[-1])
    return np.where(y == 0, 0, to_e2m1(y)), scale  # -0 becomes +0


def torchao_two_level(x: np.ndarray, dtype: str, g: np.float32) -> tuple[np.ndarray, np.ndarray]:
    """The scale never gets below the smallest normal E4M3 value; the elements are multiplied by (1 / g) / scale."""
    scale = to_e4m3((amax_of(x, 16) / SIX) / g, 2.0**-6)
    return to_e2m1(x * per_element((ONE / g) / scale_values(scale), 16, x.shape[-1])), scale


def torchao_single_level(x: np.ndarray, dtype: str, g: np.float32) -> tuple[np.ndarray, np.ndarray]:
    """The same without a per-tensor scale."""
    return torchao_two_level(x, dtype, ONE)


def compressed_tensors(x: np.ndarray, dtype: str, inverse: np.float32) -> tuple[np.ndarray, np.ndarray]:
    """amax / 6 is rounded to the input's type, and a scale of 0 becomes 0.125."""
    scale = to_e4m3(inverse * rounded(amax_of(x, 16) / SIX, dtype))
    scale = np.where(scale == 0, CT_SMALLEST_SCALE, scale).astype(np.uint8)
    y = x / per_element(scale_values(scale) / inverse, 16, x.shape[-1])
    return np.where(y == 0, 0, to_e2m1(y)), scale  # -0 becomes +0


def vllm(x: np.ndarray, dtype: str, inverse: np.float32) -> tuple[np.ndarray, np.ndarray]:
    """Multiplies by reciprocals. A block whose scale is 0 keeps only the signs of its elements that are not zero."""
    scale = to_e4m3(inverse * (amax_of(x, 16) * (ONE / SIX)))
    with np.errstate(divide="ignore"):
        reciprocal = ONE / (scale_values(scale) * (ONE / inverse))
    vanished = per_element(scale == 0, 16, x.shape[-1])
    y = x * np.where(vanished, 0, per_element(reciprocal, 16, x.shape[-1]))
    codes = np.where(vanished, np.where(x < 0, ELEMENTS["e2m1"].sign_code, 0), to_e2m1(y))
    return np.where(x == 0, 0, codes), scale  # -0 becomes +0


QUANTIZERS: dict[str, Quantizer] = {
    "modelopt": modelopt,
    "torchao2": torchao_two_level,
    "torchao1": torchao_single_level,
    "ct": compressed_tensors,
    "vllm": vllm,
}


def stored_per_tensor_scale(tool: str, x: np.ndarray, dtype: str) -> np.float32:
    """The per-tensor scale that the tool stores for a tensor that is not all zero."""
    amax = np.abs(x).max()
    if tool == "torchao1":
        return ONE
    if tool == "vllm":
        return np.float32(2688) / amax
    if tool == "ct":  # every step in the input's type
        return rounded(np.float32(2688) * rounded(ONE / amax, dtype), dtype)
    return amax / np.float32(2688)


def decode_multiplier(tool: str, stored: np.float32) -> np.float32:
    """The fp32 number that mxquant would keep for a stored per-tensor scale."""
    return ONE / stored if tool in ("ct", "vllm") else stored
