"""The checkpoints that other projects' tools wrote, each with what the tool makes of it.

`MXQUANT_CONFORMANCE` names the full set; without it there are the first layers alone, without their configs.
"""

from __future__ import annotations

from pathlib import Path

from conformance.vectors import existing
from safetensors.torch import load_file
from torch import Tensor

# What `load_state` has to find: format, activation format, its scale mode, whether its scale is static.
SCHEMES = {
    "ct_mxfp4a16_llama": ("mxfp4", None, None, False),
    "ct_mxfp6_llama": ("mxfp6_e2m3", None, None, False),
    "ct_mxfp8_qwen2": ("mxfp8_e4m3", None, None, False),
    "ct_nvfp4_llama": ("nvfp4", "nvfp4", "even", True),
    "gptoss_mxfp4_tk_roundup": ("mxfp4", None, None, False),
    "modelopt_nvfp4_llama": ("nvfp4", "nvfp4", "even", True),
    "modelopt_w4a8mxfp4_qwen2": ("mxfp4", "fp8_e4m3", None, False),
    "quark_mxfp4_w4a4_llama": ("mxfp4", "mxfp4", "even", False),
    "quark_mxfp4_w4a4_mixtral": ("mxfp4", "mxfp4", "even", False),
    "quark_mxfp6_e2m3_w6_qwen2": ("mxfp6_e2m3", None, None, False),
}
NAMES = sorted(SCHEMES)
PRODUCERS = {"ct": "compressed-tensors", "gptoss": "gpt-oss", "modelopt": "modelopt", "quark": "quark"}


def producer_of(name: str) -> str:
    return PRODUCERS[name.partition("_")[0]]


def folder(name: str) -> Path:
    """The folder of a whole checkpoint; skips the test where only an excerpt is there."""
    return existing(f"checkpoints/{name}/config.json").parent


def tensors(name: str, file: str = "model") -> dict[str, Tensor]:
    return load_file(folder(name) / f"{file}.safetensors")
