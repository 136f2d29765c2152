"""Quantizing the original weights of a checkpoint gives its producer's bytes; decoding those gives its values.

So quantizing online equals quantizing offline. `data/` holds the first layer of each checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from formats.reference import ELEMENT_OF_FORMAT, ELEMENTS, unpack
from safetensors.torch import load_file

from conformance.comparison import assert_same, differences
from conformance.nvfp4_producers import QUANTIZERS, decode_multiplier
from conformance.producers import Blocks, producer
from conformance.vectors import existing
from mxquant.formats import FORMATS, dequantize_blocks, quantize_blocks


@dataclass(frozen=True)
class Checkpoint:
    format: str
    mode: str | None
    codes: str
    scale: str
    """What takes the place of `weight` in a weight's name, for its codes and for its scales."""
    canonical_zero: bool = False
    per_tensor: str | None = None


QUARK = {"codes": "weight", "scale": "weight_scale", "canonical_zero": True}
CT = {"codes": "weight_packed", "scale": "weight_scale"}
MODELOPT = {"codes": "weight", "scale": "weight_scale"}

CHECKPOINTS = {
    "quark_mxfp4_w4a4_llama": Checkpoint("mxfp4", "even", **QUARK),
    "quark_mxfp4_w4a4_mixtral": Checkpoint("mxfp4", "even", **QUARK),
    "quark_mxfp6_e2m3_w6_qwen2": Checkpoint("mxfp6_e2m3", "even", **QUARK),
    "ct_mxfp4a16_llama": Checkpoint("mxfp4", "even", **CT),
    "ct_mxfp6_llama": Checkpoint("mxfp6_e2m3", "even", **CT),
    "ct_mxfp8_qwen2": Checkpoint("mxfp8_e4m3", "even_fp4", codes="weight", scale="weight_scale"),
    "gptoss_mxfp4_tk_roundup": Checkpoint("mxfp4", "rceil", codes="_blocks", scale="_scales"),
    "modelopt_w4a8mxfp4_qwen2": Checkpoint("mxfp4", "rceil", **MODELOPT),
    "modelopt_nvfp4_llama": Checkpoint("nvfp4", None, per_tensor="weight_scale_2", **MODELOPT),
    "ct_nvfp4_llama": Checkpoint("nvfp4", None, per_tensor="weight_global_scale", **CT),
}
MX = [name for name, checkpoint in CHECKPOINTS.items() if checkpoint.format != "nvfp4"]
NVFP4 = [name for name, checkpoint in CHECKPOINTS.items() if checkpoint.format == "nvfp4"]
TENSORS = {"quark_mxfp4_w4a4_mixtral": 32, "gptoss_mxfp4_tk_roundup": 4}  # 14 in the others

# Over a whole checkpoint: scale bytes and codes that differ from mxquant's.
DIFFERENCES = {
    "quark_mxfp4_w4a4_llama": (14, 0),  # a zero block has byte 1
    "quark_mxfp4_w4a4_mixtral": (12, 0),
    "quark_mxfp6_e2m3_w6_qwen2": (14, 0),
    "ct_mxfp4a16_llama": (0, 0),
    "ct_mxfp6_llama": (0, 0),
    "ct_mxfp8_qwen2": (0, 0),
    "gptoss_mxfp4_tk_roundup": (0, 693),  # ties away from zero
    "modelopt_w4a8mxfp4_qwen2": (0, 292 + 448),  # ties toward zero, and every zero negative
    "modelopt_nvfp4_llama": (0, 0),
    "ct_nvfp4_llama": (100, 267),  # amax / 6 in bf16, and 0.125 for a scale of 0
}


@dataclass(frozen=True)
class Weight:
    """One quantized weight: the original with the blocked axis last, and what the producer wrote, as uint8."""

    original: torch.Tensor
    codes: torch.Tensor
    scale: torch.Tensor
    per_tensor: torch.Tensor | None
    dequantized: torch.Tensor | None


def weights(name: str) -> dict[str, Weight]:
    checkpoint, folder = CHECKPOINTS[name], f"checkpoints/{name}"
    original = load_file(existing(f"{folder}/original_bf16.safetensors"))
    written = load_file(existing(f"{folder}/model.safetensors"))
    path = existing(folder) / "reference_dequant.safetensors"
    dequantized = load_file(path) if path.exists() else {}
    transposed = name.startswith("gptoss")  # [experts, K, N] there

    def of(key: str, part: str) -> torch.Tensor:
        tensor = written[key.removesuffix("weight") + part]
        return tensor if tensor.dtype == torch.float32 else tensor.view(torch.uint8)

    def blocked_last(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return tensor.mT.contiguous() if transposed and tensor is not None else tensor

    return {
        key: Weight(
            blocked_last(tensor),
            # gpt-oss keeps the blocks apart: [experts, N, blocks, 16].
            of(key, checkpoint.codes).flatten(2) if transposed else of(key, checkpoint.codes),
            of(key, checkpoint.scale),
            of(key, checkpoint.per_tensor).reshape(()) if checkpoint.per_tensor else None,
            blocked_last(dequantized.get(key)),
        )
        for key, tensor in original.items()
    }


def assert_count(name: str, scales: int, codes: int, tensors: int) -> None:
    if tensors == TENSORS.get(name, 14):
        assert (scales, codes) == DIFFERENCES[name]


def is_zero_block(x: np.ndarray) -> np.ndarray:
    return (x.reshape(*x.shape[:-1], -1, 32) == 0).all(axis=-1)


@pytest.mark.parametrize("name", MX)
def test_quantizing_the_original_gives_the_checkpoints_bytes(name: str) -> None:
    checkpoint, scales, codes = CHECKPOINTS[name], 0, 0
    fmt = FORMATS[checkpoint.format]
    tensors = weights(name)
    for key, weight in tensors.items():
        qdata, scale = quantize_blocks(weight.original, fmt, checkpoint.mode, canonical_zero=checkpoint.canonical_zero)
        ours, theirs = (unpack(q.numpy(), fmt.element.bits, weight.original.shape[-1]) for q in (qdata, weight.codes))
        predicted_codes, predicted_scale = predicted_bytes(name, weight.original, ours, scale.numpy())
        assert_same(weight.scale.numpy(), predicted_scale, f"{key}: scales")
        assert_same(theirs, predicted_codes, f"{key}: codes")
        if name in ("ct_mxfp4a16_llama", "ct_mxfp6_llama", "ct_mxfp8_qwen2") or name.startswith("quark"):
            assert torch.equal(qdata, weight.codes)
        scales += np.count_nonzero(differences(scale.numpy(), weight.scale.numpy()))
        codes += np.count_nonzero(differences(ours, theirs))
    assert_count(name, scales, codes, len(tensors))


def predicted_bytes(
    name: str, original: torch.Tensor, codes: np.ndarray, scale: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """mxquant's bytes, changed as the producer's rules say."""
    x = original.double().numpy()
    element = ELEMENT_OF_FORMAT[CHECKPOINTS[name].format]
    if name.startswith("quark"):
        return codes, np.where(is_zero_block(x), 1, scale).astype(np.uint8)
    if name.startswith("ct"):
        return codes, scale
    tool, mode = ("quark_tkref", "round_up") if name.startswith("gptoss") else ("modelopt", "default")
    our_mode, rules = producer(tool, element, mode)
    assert our_mode == CHECKPOINTS[name].mode
    return rules.predict(Blocks(x, "bf16", ELEMENTS[element], our_mode))


@pytest.mark.parametrize("name", NVFP4)
def test_quantizing_the_original_gives_the_nvfp4_checkpoints_bytes(name: str) -> None:
    """With the per-tensor scale of the checkpoint, which q, k and v share, and gate and up."""
    scales = codes = 0
    tensors = weights(name)
    for key, weight in tensors.items():
        stored = np.float32(weight.per_tensor.item())
        tool = name.partition("_")[0]
        g = decode_multiplier(tool, stored)
        qdata, scale = quantize_blocks(weight.original, FORMATS["nvfp4"], per_tensor_scale=torch.tensor(g))
        ours, theirs = (unpack(q.numpy(), 4, weight.original.shape[-1]) for q in (qdata, weight.codes))
        x = weight.original.float().numpy()
        predicted_codes, predicted_scale = QUANTIZERS[tool](x, "bf16", stored)
        assert_same(weight.scale.numpy(), predicted_scale, f"{key}: scales")
        assert_same(theirs, predicted_codes.astype(np.uint8), f"{key}: codes")
        if tool == "modelopt":
            assert_same(scale.numpy(), weight.scale.numpy(), f"{key}: our scales")
            assert_same(ours, theirs, f"{key}: our codes", (x != 0) | ~np.signbit(x))
        scales += np.count_nonzero(differences(scale.numpy(), weight.scale.numpy()))
        codes += np.count_nonzero(differences(ours, theirs))
    assert_count(name, scales, codes, len(tensors))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_decoding_the_checkpoints_bytes_gives_its_values(name: str) -> None:
    checkpoint = CHECKPOINTS[name]
    for key, weight in weights(name).items():
        if weight.dequantized is None:
            pytest.skip(
                f"the values of {name} are only in the full set of recorded outputs; set MXQUANT_CONFORMANCE to it"
            )
        g = None
        if weight.per_tensor is not None:
            g = torch.tensor(decode_multiplier(name.partition("_")[0], np.float32(weight.per_tensor.item())))
        fmt = FORMATS[checkpoint.format]
        length = weight.original.shape[-1]
        values = dequantize_blocks(weight.codes, weight.scale, fmt, length, per_tensor_scale=g, dtype=torch.bfloat16)
        assert weight.dequantized.dtype == torch.bfloat16
        # Which zero a code of -0 becomes is the tool's own.
        assert_same(values.float().numpy() + 0.0, weight.dequantized.float().numpy() + 0.0, f"{key}: values")
