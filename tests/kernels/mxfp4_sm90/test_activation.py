"""Folded activations are exact, and marked where they would not be."""

import pytest
import torch
from torch import Tensor

from kernels.mxfp4_sm90.rescaled_rows import MXFP4, activations, decoded
from mxquant.kernels.mxfp4_sm90.activation_fp8 import (
    fold_activation,
    fold_activation_torch,
    fold_bfloat16,
    fold_bfloat16_torch,
    fold_input,
)
from mxquant.reference.hadamard import hadamard

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

MODES = MXFP4.scale_modes


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("columns, permute", [(384, False), (384, True), (416, True)])
def test_folded_rows_are_those_of_the_twin(columns: int, mode: str, permute: bool, device: torch.device) -> None:
    x = activations(device, columns)
    values, scales = fold_activation(x, mode, permute=permute)
    expected, expected_scales = fold_activation_torch(x.cpu(), mode, permute=permute)
    fit = ~expected_scales.isnan().squeeze(1)
    assert fit.tolist() == [row not in (4, 5, 6) for row in range(9)]
    assert torch.equal(scales.cpu().isnan(), expected_scales.isnan())
    assert torch.equal(values.cpu()[fit].float(), expected[fit].float())
    assert torch.equal(scales.cpu()[fit], expected_scales[fit])


@pytest.mark.parametrize("permute", [False, True])
def test_rotated_rows_are_those_of_the_twin(permute: bool, device: torch.device) -> None:
    x = activations(device)
    values, scales, into = fold_input(x, "even", permute=permute, rotated=True)
    expected, expected_scales = fold_activation_torch(x.cpu(), "even", permute=permute, rotated=True)
    fit = ~expected_scales.isnan().squeeze(1)
    assert fit.tolist() == [row not in (4, 5, 6) for row in range(9)]
    assert torch.equal(values.cpu()[fit].float(), expected[fit].float())
    assert torch.equal(scales.cpu().nan_to_num(), expected_scales.nan_to_num())
    torch.testing.assert_close(into.cpu()[~fit], hadamard(x.cpu(), 32).bfloat16()[~fit], rtol=0, atol=0, equal_nan=True)
    # The control: without the rotation.
    plain, _ = fold_activation_torch(x.cpu(), "even", permute=permute)
    assert not torch.equal(values.cpu()[0].float(), plain[0].float())


def test_rotated_rows_longer_than_a_program_holds(device: torch.device) -> None:
    x = torch.randn(2, 16384 + 256).bfloat16().to(device)
    x[1, :32] *= 2.0**-40
    values, scales, into = fold_input(x, "even", permute=True, rotated=True)
    expected, expected_scales = fold_activation_torch(x.cpu(), "even", permute=True, rotated=True)
    assert torch.equal(values.cpu()[0].float(), expected[0].float())
    assert torch.equal(scales.cpu().nan_to_num(), expected_scales.nan_to_num())
    assert torch.equal(into.cpu()[1], hadamard(x[1].cpu(), 32).bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_that_words_cannot_be_loaded_from(dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(3, 131).to(dtype).to(device)[:, 1:129]
    values, scales = fold_activation(x, "even", permute=False)
    assert torch.equal(values.cpu().double() * scales.cpu().double(), decoded(x))


def test_rows_longer_than_a_program_holds(device: torch.device) -> None:
    x = torch.randn(2, 16384 + 256).bfloat16().to(device)
    x[1, -32:] *= 64
    values, scales = fold_activation(x, "even", permute=False)
    assert torch.equal(values.cpu().double() * scales.cpu().double(), decoded(x))


@pytest.mark.parametrize("mode", MODES)
def test_folded_rows_are_exact(mode: str, device: torch.device) -> None:
    x = activations(device)
    values, scales = fold_activation(x, mode, permute=False)
    fit = ~scales.cpu().isnan().squeeze(1)
    assert torch.equal((values.cpu().double() * scales.cpu().double())[fit], decoded(x, mode)[fit])


def test_another_scale_mode_gives_other_values(device: torch.device) -> None:
    x = activations(device)
    values, scales = fold_activation(x, "floor", permute=False)
    assert not torch.equal((values.cpu().double() * scales.cpu().double())[0], decoded(x, "even")[0])


def rows_for_fp16(device: torch.device, columns: int) -> Tensor:
    """A zero row, the smallest value that fits beside the largest, one below it, NaN, Inf, subnormals, the extremes."""
    x = torch.randn(8, columns)
    x[1] = 0
    x[2, :2] = torch.tensor([4.0, 2.0**-29 * (1 + 2**-7)])
    x[3, :2] = torch.tensor([4.0, 2.0**-30 * (1 + 2**-7)])
    x[4, 9], x[5, 3] = torch.nan, torch.inf
    x[6] *= 2.0**-130
    x[7, :2] = torch.tensor([2.0**127, 2.0**-133])
    return x.clamp(-(2.0**127), 2.0**127).where(x.isfinite(), x).bfloat16().to(device)


@pytest.mark.parametrize("columns", [96, 128, 384, 1024, 16384 + 32])
def test_rows_folded_into_fp16_are_those_of_the_twin(columns: int, device: torch.device) -> None:
    x = rows_for_fp16(device, columns)
    values, scales = fold_bfloat16(x)
    expected, expected_scales = fold_bfloat16_torch(x.cpu())
    fit = ~expected_scales.isnan().squeeze(1)
    assert fit.tolist() == [row not in (3, 4, 5, 7) for row in range(8)]
    assert torch.equal(scales.cpu().isnan(), expected_scales.isnan())
    assert torch.equal(values.cpu()[fit], expected[fit])
    assert torch.equal(scales.cpu()[fit], expected_scales[fit])


def test_rows_folded_into_fp16_are_exact_and_permuted(device: torch.device) -> None:
    x = rows_for_fp16(device, 256)
    values, scales = fold_bfloat16(x)
    position = torch.arange(256)
    q, o, h, t, e = position % 128 // 32, position // 16 % 2, position // 8 % 2, position // 2 % 4, position % 2
    column = position // 128 * 128 + 32 * t + 8 * q + 4 * o + 2 * e + h
    fit = ~scales.cpu().isnan().squeeze(1)
    assert torch.equal((values.cpu().double() * scales.cpu().double())[fit], x.cpu().double()[:, column][fit])
    assert not torch.equal(column, position)


@pytest.mark.parametrize("mode, rotated", [(None, False), ("even", False), ("even", True)])
def test_the_fold_that_a_product_asks_for(mode: str | None, rotated: bool, device: torch.device) -> None:
    x = activations(device, 256).bfloat16()
    values, scales, before = fold_input(x, mode, permute=True, rotated=rotated)
    if rotated:
        expected = fold_activation_torch(x.cpu(), "even", permute=True, rotated=True)
    else:
        expected = fold_bfloat16(x) if mode is None else fold_activation(x, mode, permute=True)
    fit = ~scales.isnan().squeeze(1)
    assert torch.equal(values[fit], expected[0][fit])
    assert torch.equal(scales[fit], expected[1][fit])
    assert (before is x) is not rotated
