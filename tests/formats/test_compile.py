"""torch.compile of the quantizer gives the bytes of eager mode."""

from __future__ import annotations

import pytest
import torch

from formats.reference import ELEMENTS
from formats.samples import everything
from mxquant.formats import FORMATS, dequantize_blocks, quantize_blocks

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name, mode", [("mxfp4", "even"), ("nvfp4", "even")])
def test_compiled_bytes_and_values_are_eager_ones(name: str, mode: str) -> None:
    fmt = FORMATS[name]
    x = torch.from_numpy(everything(ELEMENTS[fmt.element.name]))
    x = torch.cat([x, torch.full((1, 32), float("nan")), torch.full((1, 32), -0.0)])
    g = torch.tensor(0.37) if fmt.per_tensor else None

    def round_trip(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        qdata, scale = quantize_blocks(x, fmt, mode, per_tensor_scale=g)
        return qdata, scale, dequantize_blocks(qdata, scale, fmt, x.shape[-1], per_tensor_scale=g)

    torch._dynamo.reset()
    compiled = torch.compile(round_trip, fullgraph=True)(x)
    for actual, expected in zip(compiled, round_trip(x)):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
