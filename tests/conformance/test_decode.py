"""Decoding, exhaustively: every code under every scale byte, against float64 arithmetic and against other decoders."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from formats.reference import ELEMENT_OF_FORMAT, ELEMENTS, NAN_BYTE, SCALE_BIAS, decode_codes, pack

from conformance.comparison import assert_same
from conformance.producers import round_to_dtype
from conformance.vectors import keys, load
from mxquant.formats import FORMATS, dequantize_blocks

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64}
SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}

BYTES = np.arange(256)[:, None]
SCALES = np.where(BYTES == NAN_BYTE, np.nan, 2.0 ** (BYTES - float(SCALE_BIAS)))
E2M1_VALUES = decode_codes(np.arange(16), ELEMENTS["e2m1"])[None, :]


def decoded_grid(name: str, dtype: torch.dtype) -> np.ndarray:
    """[256 scale bytes, every code] as mxquant decodes it."""
    element = ELEMENTS[ELEMENT_OF_FORMAT[name]]
    codes = np.tile(np.arange(2**element.bits, dtype=np.uint8), (256, 1))
    blocks = -(-codes.shape[1] // 32)
    scale = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, blocks).contiguous()
    values = dequantize_blocks(
        torch.from_numpy(pack(codes, element.bits)), scale, FORMATS[name], codes.shape[1], dtype=dtype
    )
    assert values.dtype == dtype
    return values.double().numpy()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ELEMENT_OF_FORMAT)
def test_decoding_every_code_under_every_scale_byte(name: str, dtype: str) -> None:
    """code * 2^(byte - 127), rounded once to the output's type: byte 0 is 2^-127, byte 255 is NaN, nothing else is."""
    element = ELEMENTS[ELEMENT_OF_FORMAT[name]]
    exact = decode_codes(np.arange(2**element.bits), element)[None, :] * SCALES
    if dtype != "f64":
        exact = round_to_dtype(exact, dtype)
    values = decoded_grid(name, DTYPES[dtype])
    assert_same(values, exact, "values")
    assert np.isnan(values[NAN_BYTE]).all()
    finite_codes = np.isfinite(decode_codes(np.arange(2**element.bits), element))
    assert not np.isnan(values[:NAN_BYTE, finite_codes]).any()


def in_type_of_output(scales: np.ndarray, dtype: str) -> np.ndarray:
    """The scale rounded to the output's type before the product, which fp16 cannot hold beyond 2^-24 and 2^15."""
    return round_to_dtype(round_to_dtype(scales, dtype) * E2M1_VALUES, dtype)


def predicted_grid(tool: str, dtype: str) -> np.ndarray:
    infinite = np.where(BYTES == NAN_BYTE, np.inf, SCALES)  # 2^(byte - 127) computed for 255 too
    match tool:
        case "torchao_to_dtype":
            return in_type_of_output(SCALES, dtype)
        case "quark_dequantize" | "ct_decompress" | "modelopt_dequantize":
            return in_type_of_output(infinite, dtype)
        case "tkref_upcast":  # the byte shifted into the exponent field of fp32
            return round_to_dtype(np.where(BYTES == 0, 0.0, infinite) * E2M1_VALUES, dtype)
        case "transformers_convert_moe_packed":  # ldexp: byte 255 is 2^128, which a code of 0.5 brings back into range
            return round_to_dtype(np.where(BYTES == NAN_BYTE, 2.0**128, SCALES) * E2M1_VALUES, dtype)
    raise ValueError(f"no rules for {tool}")


@pytest.mark.parametrize("key", keys("dequant_mxfp4_grid"))
def test_other_mxfp4_decoders_differ_as_predicted(key: str) -> None:
    tool, dtype = key.split("|")
    with np.errstate(invalid="ignore", over="ignore"):
        predicted = predicted_grid(tool, SHORT[dtype])
    recorded = load("dequant_mxfp4_grid")[key].astype(np.float64)
    assert_same(recorded, predicted, "recorded values, predicted values")
    ours = decoded_grid("mxfp4", DTYPES[SHORT[dtype]])
    rows = np.ones((256, 16), dtype=bool)
    rows[NAN_BYTE] = tool == "torchao_to_dtype"  # byte 255 is NaN to torchao and to us
    if tool == "tkref_upcast" and dtype != "float16":
        rows[0] = False
    if dtype == "float16" and tool in ("torchao_to_dtype", "quark_dequantize"):
        rows[:103] = False  # 2^-25 and less is 0 in fp16
        rows[143:NAN_BYTE] = False  # 2^16 and more is infinite
    assert_same(ours, recorded, "values", rows)


@pytest.mark.parametrize("key", [key for key in keys("dequant_nvfp4_grid") if key.count("|") == 2])
def test_all_nvfp4_decoders_agree(key: str) -> None:
    """All finite E4M3 scales, all codes, six per-tensor scales: equal values, in fp32 and bf16."""
    tool, dtype, index = key.split("|")
    arrays = load("dequant_nvfp4_grid")
    codes = np.tile(np.arange(16, dtype=np.uint8), (127, 1))
    values = dequantize_blocks(
        torch.from_numpy(pack(codes, 4)),
        torch.arange(127, dtype=torch.uint8)[:, None],
        FORMATS["nvfp4"],
        16,
        per_tensor_scale=torch.tensor(arrays["g_decode"][int(index)]),
        dtype=DTYPES[SHORT[dtype]],
    )
    # ModelOpt's table has +0 for the code of -0.
    compared = (codes != 8) | (tool != "modelopt")
    assert_same(values.float().numpy(), arrays[key], "values", compared)
    assert (arrays[key][~compared] == 0).all()
