"""Element codes and E8M0 bytes, exhaustively: code tables, all 65536 bf16 patterns, all 256 scale bytes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from formats.reference import ELEMENTS, decode_codes, round_to_codes

from conformance.comparison import assert_same, differences
from conformance.producers import by_adding_half, keep, negative_only_by_rounding, never_negative, to_nearest
from conformance.vectors import load
from mxquant.formats.element import decode, encode
from mxquant.formats.pack import pack_codes
from mxquant.formats.scale import e8m0_to_float
from mxquant.formats.spec import ELEMENT_FORMATS

TABLES = [
    "e2m1|ml_dtypes",
    "e2m1|torchao",
    "e2m1|quark",
    "e2m3|ml_dtypes",
    "e2m3|torchao",
    "e2m3|quark",
    "e3m2|ml_dtypes",
]
TABLES += ["e3m2|torchao", "e3m2|quark", "e4m3|ml_dtypes", "e4m3|torch", "e5m2|ml_dtypes", "e5m2|torch"]

# (element, producer): codes that differ from mxquant's over the finite bf16 patterns at scale byte 127.
CAST_DIFFERENCES = {
    ("e2m1", "ml_dtypes"): 0,
    ("e2m1", "torchao"): 0,
    ("e2m1", "quark_kernel"): 16001,  # all that rounds to zero is +0
    ("e2m1", "ct"): 1,  # -0 alone becomes +0
    ("e2m1", "modelopt_nvfp4_cast"): 1,
    ("e2m1", "vllm_cast_to_fp4"): 1,
    ("e2m1", "microxcaling_even"): 1,
    ("e2m1", "microxcaling_nearest"): 9,  # and ties away: four of seven, of both signs
    ("e2m3", "ml_dtypes"): 0,
    ("e2m3", "torchao"): 0,
    ("e2m3", "quark_kernel"): 15745,
    ("e2m3", "ct"): 0,
    ("e2m3", "microxcaling_even"): 1,
    ("e2m3", "microxcaling_nearest"): 33,
    ("e3m2", "ml_dtypes"): 0,
    ("e3m2", "torchao"): 0,
    ("e3m2", "quark_kernel"): 15617,
    ("e3m2", "microxcaling_even"): 1,
    ("e3m2", "microxcaling_nearest"): 33,
    ("e4m3", "ml_dtypes"): 0,
    ("e4m3", "torch"): 0,
    ("e4m3", "microxcaling_even"): 1,
    ("e4m3", "microxcaling_nearest"): 127,
    ("e5m2", "ml_dtypes"): 0,
    ("e5m2", "torch"): 0,
    ("e5m2", "microxcaling_even"): 1,
    ("e5m2", "microxcaling_nearest"): 125,
}
CASTS = [
    (element, tool, scale_byte)
    for element, tool in CAST_DIFFERENCES
    # The others are casts without a scale.
    for scale_byte in ([1, 110, 127, 140, 253] if tool in ("ml_dtypes", "torchao", "torch", "quark_kernel") else [127])
]
# Casts that do not saturate: (the largest magnitude that still rounds to a finite value, the code of what lies beyond).
OVERFLOWS = {
    ("e4m3", "ml_dtypes"): (464.0, 127),  # a tie, which goes to the even neighbour 448; NaN beyond
    ("e5m2", "ml_dtypes"): (np.nextafter(61440.0, 0), 124),  # a tie, which goes to the even neighbour Inf
    ("e5m2", "torch"): (np.nextafter(61440.0, 0), 124),
}


def cast_rules(tool: str, element: str) -> tuple[Callable, Callable]:
    """How a producer rounds, and what it makes of zeros."""
    if tool.startswith("microxcaling"):
        ties = {"nearest": "away", "even": "even"}[tool.removeprefix("microxcaling_")]
        return by_adding_half(ties), negative_only_by_rounding
    if tool == "quark_kernel":
        return to_nearest("even"), never_negative
    if tool in ("modelopt_nvfp4_cast", "vllm_cast_to_fp4") or (tool == "ct" and element == "e2m1"):
        return to_nearest("even"), negative_only_by_rounding
    return to_nearest("even"), keep


@pytest.mark.parametrize("table", TABLES)
def test_value_of_every_code_equals_other_libraries(table: str) -> None:
    element = table.split("|")[0]
    codes = torch.arange(2 ** ELEMENTS[element].bits, dtype=torch.uint8)
    values = decode(codes, ELEMENT_FORMATS[element]).numpy()
    assert_same(values, decode_codes(codes.numpy(), ELEMENTS[element]).astype(np.float32), "values, by definition")
    assert_same(values, load("element_tables")[table], "values")


@pytest.mark.parametrize("element", ["e2m3", "e3m2"])
def test_six_bit_packing_equals_other_libraries(element: str) -> None:
    packed = pack_codes(torch.arange(64, dtype=torch.uint8), 6).numpy()
    assert_same(packed, load("element_tables")[f"{element}|packed_bytes_of_0_63"], "bytes of the codes 0 to 63")


@pytest.mark.parametrize("element, tool, scale_byte", CASTS)
def test_code_of_every_bf16_value_equals_other_libraries(element: str, tool: str, scale_byte: int) -> None:
    fmt = ELEMENTS[element]
    with np.errstate(invalid="ignore", over="ignore"):
        x = (np.arange(65536, dtype=np.uint32) << 16).view(np.float32).astype(np.float64)
        y = (x * 2.0 ** (127 - scale_byte)).astype(np.float32)
    finite = np.isfinite(y)
    y = np.where(finite, y, np.float32(0))
    codes = encode(torch.from_numpy(y), ELEMENT_FORMATS[element]).numpy()
    assert_same(codes, round_to_codes(y.astype(np.float64), fmt), "codes, by definition")

    rounding, zeros = cast_rules(tool, element)
    predicted = zeros(rounding(y.astype(np.float64), fmt, "f32"), y, fmt).astype(np.uint8)
    largest, special = OVERFLOWS.get((element, tool), (np.inf, 0))
    overflowing = np.abs(y) > largest
    predicted = np.where(overflowing, special | (np.signbit(y) * fmt.sign_code), predicted).astype(np.uint8)
    recorded = load("elements_bf16_sweep")[f"{element}|{tool}|{scale_byte}"]
    assert_same(recorded, predicted, "recorded codes, predicted codes", finite)
    if scale_byte == 127:
        count = np.count_nonzero(differences(codes, recorded) & finite & ~overflowing)
        assert count == CAST_DIFFERENCES[element, tool]


INFINITE_BYTE_255 = [
    "ct_decompress_mx_scale_bf16",
    "quark_2pow_float",
    "quark_2pow_bf16",
    "quark_2pow_fp16",
    "modelopt_exp2",
]
INFINITE_BYTE_255 += ["quark_tkref_upcast_f32", "transformers_gptoss_bfloat16", "transformers_gptoss_float32"]
INFINITE_BYTE_255 += ["transformers_gptoss_float16"]
FP16 = ["quark_2pow_fp16", "transformers_gptoss_float16"]


@pytest.mark.parametrize(
    "tool", ["ml_dtypes", "torch_float8_e8m0fnu", "torchao_get_fp_scale", "aiter_e8m0_to_f32", *INFINITE_BYTE_255]
)
def test_value_of_every_scale_byte_equals_other_libraries(tool: str) -> None:
    ours = e8m0_to_float(torch.arange(256, dtype=torch.uint8)).numpy()
    predicted = ours.copy()
    if tool in INFINITE_BYTE_255:
        predicted[255] = np.inf  # only the others know that it is NaN
    if tool == "quark_tkref_upcast_f32":
        predicted[0] = 0.0  # the byte shifted into the exponent field of fp32
    if tool in FP16:
        with np.errstate(over="ignore"):
            predicted = predicted.astype(np.float16).astype(np.float32)
    assert_same(load("e8m0")[f"decode|{tool}"], predicted, "values of the bytes 0 to 255")


def test_torch_float8_e8m0fnu_rounds_to_nearest() -> None:
    """Casting to float8_e8m0fnu is neither floor nor ceil nor even: why no scale is computed that way."""
    x = (np.arange(0x7F80, dtype=np.uint32) << 16).view(np.float32).astype(np.float64)[0x80:]  # normal numbers
    exponent = np.frexp(x)[1] - 1
    nearest = exponent + 127 + (x / 2.0**exponent >= 1.5)
    assert_same(load("e8m0")["encode|torch_from_f32_of_bf16"][0x80:0x7F80], nearest.astype(np.uint8), "bytes")
