"""Tiled weights expanded to a workspace, and the rows of activations that are recomputed from them."""

import pytest
import torch

from kernels.mxfp4_sm90.rescaled_rows import MXFP4, activations, decoded
from mxquant.formats import dequantize_blocks, quantize_blocks
from mxquant.kernels.mxfp4_sm90.activation_fp8 import fold_activation
from mxquant.kernels.mxfp4_sm90.dequantize import expand_bfloat16, expand_e4m3, repair
from mxquant.kernels.mxfp4_sm90.layout import pack_tiles

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def weights() -> torch.Tensor:
    w = torch.randn(128, 512) * torch.exp2(torch.randint(-7, 7, (128, 16)).float()).repeat_interleave(32, 1)
    w[:5, 32:64] = 0
    w[9] = 0
    w[70] *= 2.0**-110
    return w


@pytest.mark.parametrize("columns", [416, 512])
def test_repaired_rows_are_exact_and_others_untouched(columns: int, device: torch.device) -> None:
    """Rows that do not fit are recomputed; the others of their tile are not."""
    w, bias = weights()[:, :columns], torch.randn(128)
    packed = pack_tiles(*quantize_blocks(w, MXFP4))
    assert packed is not None
    x = torch.cat([activations(device, columns), torch.randn(40, columns).bfloat16().to(device)])
    _, scales = fold_activation(x, "even", permute=False)
    y = torch.full((49, 128), 7.0, device=device)
    repair(y, x, *(t.to(device) for t in packed), bias.to(device), scales, "even")
    expected = decoded(x) @ decoded(w).mT + bias
    magnitude = decoded(x).abs() @ decoded(w).abs().mT + bias.abs()
    # 16 exact block sums, each scaled and added in fp32, and the bias.
    bound = 24 * 2.0**-24 * magnitude + 1e-30
    close = (y.cpu().double() - expected).abs() <= bound
    assert close[4].all()
    assert y[5:7].isnan().all()
    assert (y[:4] == 7).all()
    assert (y[7:] == 7).all()


@pytest.mark.parametrize("columns", [256, 288, 384, 480, 512])
def test_expanded_weights_are_exact(columns: int, device: torch.device) -> None:
    w = weights()[:, :columns]
    codes = quantize_blocks(w, MXFP4)
    packed = pack_tiles(*codes)
    assert packed is not None
    tiles = [tensor.to(device) for tensor in packed]
    values, scales = expand_e4m3(*tiles, columns)
    assert torch.equal(values.cpu().double() * scales.cpu().double(), decoded(w))
    expected = dequantize_blocks(*codes, MXFP4, columns, dtype=torch.bfloat16)
    assert torch.equal(expand_bfloat16(*tiles, columns).cpu(), expected)
