"""Where the recorded outputs lie, and how to read them.

MXQUANT_CONFORMANCE names a folder with `vectors/` and `checkpoints/`; without it, `data/` beside this file has the same
structure with fewer tensors.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from formats.reference import ELEMENTS, FORMAT_OF_ELEMENT, unpack

from mxquant.formats import get_format, quantize_blocks

ROOT = Path(os.environ.get("MXQUANT_CONFORMANCE") or Path(__file__).parent / "data")


def existing(relative: str) -> Path:
    """The path of a recorded file; skips the test that asks for one which is not there."""
    path = ROOT / relative
    if not path.exists():
        pytest.skip(f"{relative} is not in {ROOT}; set MXQUANT_CONFORMANCE to the full set of recorded outputs")
    return path


@functools.cache
def load(name: str) -> dict[str, np.ndarray]:
    """Every array of vectors/<name>.npz."""
    with np.load(existing(f"vectors/{name}.npz")) as archive:
        return dict(archive)


def keys(name: str) -> list[str]:
    """The names of its arrays, none if there is no such file: for parametrization, which cannot skip."""
    path = ROOT / f"vectors/{name}.npz"
    if not path.exists():
        return []
    with np.load(path) as archive:
        return archive.files


def array(name: str, key: str) -> np.ndarray:
    """One array; skips where only the full set has it."""
    arrays = load(name)
    if key not in arrays:
        pytest.skip(f"{key} of {name}.npz is only in the full set of recorded outputs; set MXQUANT_CONFORMANCE to it")
    return arrays[key]


@functools.cache
def edge_names() -> list[str]:
    """The name of each block of the inputs called edges."""
    return json.loads(existing("vectors/edge_names.json").read_text())["names"]


def torch_from_bits(bits: np.ndarray, dtype: str) -> torch.Tensor:
    if dtype == "f32":
        return torch.from_numpy(bits.view(np.int32).copy()).view(torch.float32)
    return torch.from_numpy(bits.view(np.int16).copy()).view({"bf16": torch.bfloat16, "f16": torch.float16}[dtype])


def input_tensor(name: str) -> torch.Tensor:
    """An input by name, such as "normal_s1.bf16", in its own type."""
    return torch_from_bits(load("inputs")[name], name.rpartition(".")[2])


def input_values(name: str) -> np.ndarray:
    return input_tensor(name).double().numpy()


def recorded_codes(tool: str, key: str, element: str, length: int) -> np.ndarray | None:
    """The codes that `tool` recorded, one a byte; None where it recorded dequantized values only."""
    arrays = load(f"mx_{tool}")
    bits = ELEMENTS[element].bits
    if f"{key}|qp" in arrays:
        return unpack(arrays[f"{key}|qp"], bits, length)
    if f"{key}|q" not in arrays:
        return None
    # Six-bit codes of tools that do not pack them are one a byte already.
    return unpack(arrays[f"{key}|q"], 8 if bits == 6 else bits, length)


def mxquant_bytes(x: torch.Tensor, element: str, mode: str, **options: bool) -> tuple[np.ndarray, np.ndarray]:
    """What mxquant writes: codes, one a byte, and scale bytes."""
    fmt = get_format(FORMAT_OF_ELEMENT[element])
    qdata, scale = quantize_blocks(x, fmt, mode, **options)
    return unpack(qdata.numpy(), ELEMENTS[element].bits, x.shape[-1]), scale.numpy()
