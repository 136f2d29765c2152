"""The packed weight dequantized to a workspace."""

import pytest
import torch

from kernels.mxfp4_sm90.packed_weights import packed_weight
from mxquant.kernels.mxfp4_sm90.dequantize import dequantize_to_bf16, dequantize_to_e4m3

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("columns", [256, 288, 384, 480, 512])
def test_dequantized_weights_are_exact(columns: int, device: torch.device) -> None:
    w = torch.randn(128, columns)
    w *= torch.exp2(torch.randint(-7, 7, (128, columns // 32)).float()).repeat_interleave(32, 1)
    w[:5, 32:64] = 0
    w[9] = 0
    w[70] *= 2.0**-110
    packed, w64 = packed_weight(w)
    on_device = [tensor.to(device) for tensor in packed]
    values, scales = dequantize_to_e4m3(*on_device, columns)
    assert torch.equal(values.cpu().double() * scales.cpu().double(), w64)
    assert torch.equal(dequantize_to_bf16(*on_device, columns).cpu(), w64.bfloat16())
