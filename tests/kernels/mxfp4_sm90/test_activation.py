"""The activation prologue: rescaled rows are exact and those of the twin; rows out of range are marked by NaN."""

import pytest
import torch
from torch import Tensor

from kernels.mxfp4_sm90.rescaled_rows import MXFP4, activations, decoded
from mxquant.kernels.mxfp4_sm90.activation import rescale_activation
from mxquant.reference.hadamard import hadamard
from mxquant.reference.rescale import Prologue, rescale_to_fp8, rescale_to_fp16

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

MODES = MXFP4.scale_modes
EVEN, ROTATED, FP16 = Prologue("even"), Prologue("even", rotated=True), Prologue(None)


def rescaled(x: Tensor, prologue: Prologue = EVEN) -> Tensor:
    """Values times row scales, in float64; NaN in rows out of range."""
    values, scales, _ = rescale_activation(x, prologue, permute=False)
    return values.cpu().double() * scales.cpu().double()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("columns, permute", [(384, False), (384, True), (416, True)])
def test_fp8_rows_equal_the_twin(columns: int, mode: str, permute: bool, device: torch.device) -> None:
    x = activations(device, columns)
    values, scales, x_pre_quant = rescale_activation(x, Prologue(mode), permute=permute)
    expected, expected_scales = rescale_to_fp8(x.cpu(), mode, permute=permute)
    in_range = ~expected_scales.isnan().squeeze(1)
    assert in_range.tolist() == [row not in (4, 5, 6) for row in range(9)]
    assert torch.equal(scales.cpu().isnan(), expected_scales.isnan())
    assert torch.equal(values.cpu()[in_range].float(), expected[in_range].float())
    assert torch.equal(scales.cpu()[in_range], expected_scales[in_range])
    assert x_pre_quant is x


@pytest.mark.parametrize("permute", [False, True])
def test_rotated_rows_equal_the_twin(permute: bool, device: torch.device) -> None:
    x = activations(device)
    values, scales, x_pre_quant = rescale_activation(x, ROTATED, permute=permute)
    expected, expected_scales = rescale_to_fp8(x.cpu(), "even", permute=permute, rotated=True)
    in_range = ~expected_scales.isnan().squeeze(1)
    assert in_range.tolist() == [row not in (4, 5, 6) for row in range(9)]
    assert torch.equal(values.cpu()[in_range].float(), expected[in_range].float())
    assert torch.equal(scales.cpu().nan_to_num(), expected_scales.nan_to_num())
    rotated = hadamard(x.cpu(), 32).bfloat16()
    torch.testing.assert_close(x_pre_quant.cpu()[~in_range], rotated[~in_range], rtol=0, atol=0, equal_nan=True)
    # The control: without the rotation.
    plain, _ = rescale_to_fp8(x.cpu(), "even", permute=permute)
    assert not torch.equal(values.cpu()[0].float(), plain[0].float())


def test_rotated_rows_beyond_the_registers_of_a_program(device: torch.device) -> None:
    x = torch.randn(2, 16384 + 256).bfloat16().to(device)
    x[1, :32] *= 2.0**-40
    values, scales, x_pre_quant = rescale_activation(x, ROTATED, permute=True)
    expected, expected_scales = rescale_to_fp8(x.cpu(), "even", permute=True, rotated=True)
    assert torch.equal(values.cpu()[0].float(), expected[0].float())
    assert torch.equal(scales.cpu().nan_to_num(), expected_scales.nan_to_num())
    assert torch.equal(x_pre_quant.cpu()[1], hadamard(x[1].cpu(), 32).bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_unaligned_rows_are_exact(dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(3, 131).to(dtype).to(device)[:, 1:129]
    assert torch.equal(rescaled(x), decoded(x))


def test_rows_beyond_the_registers_of_a_program_are_exact(device: torch.device) -> None:
    x = torch.randn(2, 16384 + 256).bfloat16().to(device)
    x[1, -32:] *= 64
    assert torch.equal(rescaled(x), decoded(x))


@pytest.mark.parametrize("mode", MODES)
def test_fp8_rows_are_exact(mode: str, device: torch.device) -> None:
    x = activations(device)
    values = rescaled(x, Prologue(mode))
    in_range = ~values.isnan().any(1)
    assert in_range.sum() == 6
    assert torch.equal(values[in_range], decoded(x, mode)[in_range])


def test_another_scale_mode_gives_other_values(device: torch.device) -> None:
    x = activations(device)
    assert not torch.equal(rescaled(x, Prologue("floor"))[0], decoded(x, "even")[0])


def rows_for_fp16(device: torch.device, columns: int) -> Tensor:
    """A zero row, the smallest value in range beside the largest, one below it, NaN, Inf, subnormals, the extremes."""
    x = torch.randn(8, columns)
    x[1] = 0
    x[2, :2] = torch.tensor([4.0, 2.0**-29 * (1 + 2**-7)])
    x[3, :2] = torch.tensor([4.0, 2.0**-30 * (1 + 2**-7)])
    x[4, 9], x[5, 3] = torch.nan, torch.inf
    x[6] *= 2.0**-130
    x[7, :2] = torch.tensor([2.0**127, 2.0**-133])
    return x.clamp(-(2.0**127), 2.0**127).where(x.isfinite(), x).bfloat16().to(device)


@pytest.mark.parametrize("columns", [96, 128, 384, 1024, 16384 + 32])
def test_fp16_rows_equal_the_twin(columns: int, device: torch.device) -> None:
    x = rows_for_fp16(device, columns)
    values, scales, x_pre_quant = rescale_activation(x, FP16, permute=True)
    expected, expected_scales = rescale_to_fp16(x.cpu())
    in_range = ~expected_scales.isnan().squeeze(1)
    assert in_range.tolist() == [row not in (3, 4, 5, 7) for row in range(8)]
    assert torch.equal(scales.cpu().isnan(), expected_scales.isnan())
    assert torch.equal(values.cpu()[in_range], expected[in_range])
    assert torch.equal(scales.cpu()[in_range], expected_scales[in_range])
    assert x_pre_quant is x


def test_fp16_rows_are_exact_and_permuted(device: torch.device) -> None:
    x = rows_for_fp16(device, 256)
    values, scales, _ = rescale_activation(x, FP16, permute=True)
    position = torch.arange(256)
    q, o, h, t, e = position % 128 // 32, position // 16 % 2, position // 8 % 2, position // 2 % 4, position % 2
    column = position // 128 * 128 + 32 * t + 8 * q + 4 * o + 2 * e + h
    in_range = ~scales.cpu().isnan().squeeze(1)
    exact = (values.cpu().double() * scales.cpu().double())[in_range]
    assert torch.equal(exact, x.cpu().double()[:, column][in_range])
    assert not torch.equal(column, position)
