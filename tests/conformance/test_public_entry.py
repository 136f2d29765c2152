"""mxquant.quantize writes the bytes that the rest of this folder compares."""

from __future__ import annotations

import pytest
import torch

import mxquant
from conformance.vectors import input_tensor
from mxquant.formats import FORMATS, quantize_blocks

FORMATS_AND_MODES = [(name, mode) for name, fmt in FORMATS.items() if fmt.block_size for mode in fmt.scale_modes]


@pytest.mark.parametrize("suite", ["edges.f32", "edges.bf16", "edges.f16", "student_t1p5.bf16"])
@pytest.mark.parametrize("name, mode", FORMATS_AND_MODES)
def test_quantize_gives_the_same_bytes_as_quantize_blocks(name: str, mode: str, suite: str) -> None:
    x = input_tensor(suite)
    for canonical_zero in (False, True):
        qdata, scale = quantize_blocks(x, FORMATS[name], mode, canonical_zero=canonical_zero)
        mx = mxquant.quantize(x, name, scale_mode=mode, canonical_zero=canonical_zero)
        assert torch.equal(mx.qdata, qdata)
        assert torch.equal(mx.scale, scale)
