"""MXFP4 folded into FP8 is exact: activations, expanded weights, and what is recomputed where FP8 cannot hold a row."""

import pytest
import torch
from torch import Tensor

from mxquant.formats import FORMATS, dequantize_blocks, quantize_blocks
from mxquant.kernels.fold import SPAN, fold_activation, fold_activation_torch
from mxquant.kernels.tiles import pack_tiles
from mxquant.kernels.w4a4 import expand, repair

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

MXFP4 = FORMATS["mxfp4"]
MODES = MXFP4.scale_modes


def decoded(x: Tensor, mode: str | None = None) -> Tensor:
    """MXFP4 of `x`, in float64."""
    return dequantize_blocks(*quantize_blocks(x.cpu(), MXFP4, mode), MXFP4, x.shape[1], dtype=torch.float64)


def activations(device: torch.device, columns: int = 384) -> Tensor:
    """Rows with zero blocks, a zero row, one of the widest span that fits and one beyond, NaN, Inf and subnormals."""
    x = torch.randn(9, columns) * torch.exp2(torch.randint(-5, 6, (9, columns // 32)).float()).repeat_interleave(32, 1)
    x[1, :64] = 0
    x[2] = 0
    x[3] = torch.where(torch.arange(columns) < 32, 2.0**-SPAN, 1.0)
    x[4] = torch.where(torch.arange(columns) < 32, 2.0 ** -(SPAN + 1), 1.0)
    x[5, 40], x[6, 3] = torch.nan, torch.inf
    x[7] *= 2.0**-124
    return x.bfloat16().to(device)


def weights() -> Tensor:
    w = torch.randn(128, 512) * torch.exp2(torch.randint(-7, 7, (128, 16)).float()).repeat_interleave(32, 1)
    w[:5, 32:64] = 0
    w[9] = 0
    w[70] *= 2.0**-110
    return w


@pytest.mark.parametrize("permute", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_folded_rows_are_those_of_the_twin(mode: str, permute: bool, device: torch.device) -> None:
    x = activations(device)
    values, scales, unfit = fold_activation(x, mode, permute=permute)
    expected, expected_scales, expected_unfit = fold_activation_torch(x.cpu(), mode, permute=permute)
    assert unfit.tolist() == expected_unfit.tolist() == [0, 0, 0, 0, 1, 1, 1, 0, 0]
    fit = expected_unfit == 0
    assert torch.equal(values.cpu()[fit].float(), expected[fit].float())
    assert torch.equal(scales.cpu()[fit], expected_scales[fit])


def test_rows_longer_than_a_program_holds(device: torch.device) -> None:
    x = torch.randn(2, 16384 + 256).bfloat16().to(device)
    x[1, -32:] *= 64
    values, scales, _ = fold_activation(x, "even", permute=False)
    assert torch.equal(values.cpu().double() * scales.cpu().double(), decoded(x))


@pytest.mark.parametrize("mode", MODES)
def test_folded_rows_are_exact(mode: str, device: torch.device) -> None:
    x = activations(device)
    values, scales, unfit = fold_activation(x, mode, permute=False)
    fit = unfit.cpu() == 0
    assert torch.equal((values.cpu().double() * scales.cpu().double())[fit], decoded(x, mode)[fit])


def test_another_scale_mode_gives_other_values(device: torch.device) -> None:
    x = activations(device)
    values, scales, _ = fold_activation(x, "floor", permute=False)
    assert not torch.equal((values.cpu().double() * scales.cpu().double())[0], decoded(x, "even")[0])


def test_repaired_rows_are_exact_and_others_untouched(device: torch.device) -> None:
    """All rows of a tile of 32 that holds an unfit row are recomputed; another tile keeps what it has."""
    w, bias = weights(), torch.randn(128)
    packed = pack_tiles(*quantize_blocks(w, MXFP4))
    assert packed is not None
    x = torch.cat([activations(device, 512), torch.randn(40, 512).bfloat16().to(device)])
    unfit = fold_activation(x, "even", permute=False)[2]
    y = torch.full((49, 128), 7.0, device=device)
    repair(y, x, *(t.to(device) for t in packed), bias.to(device), unfit, "even")
    expected = decoded(x) @ decoded(w).mT + bias
    magnitude = decoded(x).abs() @ decoded(w).abs().mT + bias.abs()
    # 16 exact block sums, each scaled and added in fp32, and the bias.
    bound = 24 * 2.0**-24 * magnitude + 1e-30
    finite = torch.ones(49, dtype=torch.bool).index_fill(0, torch.tensor([5, 6]), False)
    close = (y.cpu().double() - expected).abs() <= bound
    assert close[:32][finite[:32]].all()
    assert y[5:7].isnan().all()
    assert (y[32:] == 7).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="inline PTX needs a GPU")
def test_expanded_weights_are_exact(device: torch.device) -> None:
    w = weights()
    packed = pack_tiles(*quantize_blocks(w, MXFP4))
    assert packed is not None
    values, scales = expand(*(t.to(device) for t in packed), 128, 512)
    assert torch.equal(values.cpu().double() * scales.cpu().double(), decoded(w))
