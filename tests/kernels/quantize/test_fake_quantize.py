"""The kernel that quantizes and dequantizes gives the values of `mxquant.reference.fake_quantize`."""

import pytest
import torch
from torch import Tensor

from kernels.bits import bits
from mxquant.formats import FORMATS, get_format, resolve_scale_mode
from mxquant.kernels.quantize.fake_quantize import FORMATS as KERNEL_FORMATS
from mxquant.kernels.quantize.fake_quantize import fake_quantize
from mxquant.reference.fake_quantize import fake_quantize as twin

# Overflow and NaN are wanted here; NumPy, which Triton's interpreter computes with, warns of them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

INPUT_DTYPES = [torch.bfloat16, torch.float16, torch.float32]
DTYPES = [torch.bfloat16, torch.float32]
MX_FORMATS = [name for name in KERNEL_FORMATS if FORMATS[name].scale_format == "e8m0"]
ROW_SCALED = [name for name in KERNEL_FORMATS if name not in MX_FORMATS]


def check(x: Tensor, name: str, mode: str | None, dtype: torch.dtype, static_scale: Tensor | None = None) -> None:
    fmt = get_format(name, activation=True)
    mode = resolve_scale_mode(fmt, mode)
    values, outer = fake_quantize(x, fmt, mode, static_scale, dtype)
    on_cpu = None if static_scale is None else static_scale.cpu()
    expected, expected_outer = twin(x.cpu(), fmt, mode, on_cpu, dtype)
    assert values.dtype == dtype
    assert torch.equal(bits(values), bits(expected))
    assert (outer is None) == (expected_outer is None)
    if outer is not None and expected_outer is not None:
        assert outer.shape == expected_outer.shape
        assert torch.equal(bits(outer), bits(expected_outer))


def wide(rows: int, length: int) -> Tensor:
    """Rows over the whole range; zeros, a subnormal row, and rows with NaN and Inf."""
    x = torch.randn(rows, length) * torch.exp2(torch.randint(-9, 2, (rows, length)))
    x *= torch.exp2(torch.linspace(-130, 122, rows).round())[:, None]
    x[1] = 0.0
    x[2] = torch.randn(length) * 2.0**-140
    x[3, -1], x[4, 0] = torch.nan, -torch.inf
    x[5, 0] = torch.finfo(torch.float32).max
    return x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("input_dtype", INPUT_DTYPES)
@pytest.mark.parametrize("name", KERNEL_FORMATS)
def test_equal_to_the_twin(name: str, input_dtype: torch.dtype, dtype: torch.dtype, device: torch.device) -> None:
    for length in (1, 33, 100):
        check(wide(33, length).to(input_dtype).to(device), name, None, dtype)


@pytest.mark.parametrize("mode", ["floor", "even", "ceil", "rceil", "even_fp4"])
@pytest.mark.parametrize("name", MX_FORMATS)
def test_every_scale_mode(name: str, mode: str, device: torch.device) -> None:
    check(wide(64, 64).to(device), name, mode, torch.float32)
    ties = torch.randint(-31, 32, (32, 64)).float() / 4
    check(ties.bfloat16().to(device), name, mode, torch.bfloat16)


@pytest.mark.parametrize("name", ROW_SCALED)
def test_static_scales(name: str, device: torch.device) -> None:
    x = wide(33, 40)
    for scale in (torch.tensor(0.3), torch.tensor([1e-3]), torch.rand(33, 1) + 0.5):
        check(x.to(device), name, None, torch.float32, scale.to(device))
    check(torch.randn(2, 2100).to(device), name, None, torch.bfloat16, torch.tensor(0.01, device=device))


@pytest.mark.parametrize("name", ROW_SCALED)
def test_a_row_too_long_for_one_launch(name: str, device: torch.device) -> None:
    x = torch.randn(2, 17000).bfloat16()
    x[1, 16999] = 900.0
    check(x.to(device), name, None, torch.bfloat16)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "fp8_e4m3"])
def test_any_strides_and_no_rows(name: str, device: torch.device) -> None:
    x = torch.randn(40, 50, device=device)
    for view in (x.t(), x[:, 3:37], x[::3], x[:1].expand(4, -1), x[:0]):
        check(view, name, None, torch.float32)


def test_rows_of_several_tiles(device: torch.device) -> None:
    check(torch.randn(3, 2100).bfloat16().to(device), "mxfp4", None, torch.bfloat16)
    check(torch.randn(3, 2100).to(device), "nvfp4", None, torch.float32)


@pytest.mark.parametrize("name", MX_FORMATS)
def test_another_mode_is_noticed(name: str, device: torch.device) -> None:
    x = torch.randn(16, 32).to(device)
    fmt = FORMATS[name]
    ours, _ = fake_quantize(x, fmt, "floor", None, torch.float32)
    other, _ = twin(x.cpu(), fmt, "ceil", None, torch.float32)
    assert not torch.equal(ours.cpu(), other)
