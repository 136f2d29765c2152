"""On a GPU, quantizing and decoding give the bytes that they give on a CPU, and kernels those of their torch twins."""

import pytest
import torch
from matmul_reference import FORMATS
from native_cases import needs_gpu
from torch import Tensor

from mxquant import quantize
from mxquant.formats import FORMATS as ALL_FORMATS
from mxquant.formats import get_format
from mxquant.formats.block import quantize_blocks as twin
from mxquant.formats.scale import nvfp4_per_tensor_scale
from mxquant.kernels import has_triton

pytestmark = needs_gpu

SUITES = {
    "gaussian": lambda: torch.randn(67, 200),
    "wide": lambda: torch.randn(67, 200) * torch.exp2(torch.randint(-120, 120, (67, 1)).float()),
    "spread": lambda: torch.randn(67, 200) * torch.exp2(torch.randint(-125, 126, (67, 200)).float()),
    "subnormal": lambda: torch.randn(67, 200) * 2.0**-130,
    "ties": lambda: torch.randint(-14, 15, (67, 200)).float() / 4,
    "nonfinite": lambda: torch.randn(67, 200).masked_fill(torch.rand(67, 200) < 0.01, torch.inf),
}
FORMATS_AND_MODES = [(name, mode) for name in FORMATS for mode in ALL_FORMATS[name].scale_modes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", FORMATS)
def test_bytes_are_those_of_a_cpu(format: str, dtype: torch.dtype, device: torch.device) -> None:
    """All modes in bf16; in fp32, whose kernels differ in nothing that the mode has to do with, the default."""
    for mode in ALL_FORMATS[format].scale_modes if dtype == torch.bfloat16 else [None]:
        for suite, make in SUITES.items():
            x = make().to(dtype)
            for axis in (-1, 0):
                here, there = (quantize(t, format, scale_mode=mode, axis=axis) for t in (x, x.to(device)))
                assert torch.equal(there.qdata.cpu(), here.qdata), suite
                assert torch.equal(there.scale.cpu(), here.scale), suite
                assert torch.equal(there.dequantize().cpu().nan_to_num(7), here.dequantize().nan_to_num(7)), suite


@pytest.mark.parametrize("format, mode", FORMATS_AND_MODES)
def test_the_twins_on_a_gpu_are_those_of_a_cpu(format: str, mode: str, device: torch.device) -> None:
    """They judge the whole layers below."""
    for make in SUITES.values():
        x = make()
        for here, there in zip(twin(x, get_format(format), mode), twin(x.to(device), get_format(format), mode)):
            assert torch.equal(there.cpu(), here)


def whole_layer(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Blocks of every scale, then every bit pattern of bf16 over and over, NaN and Inf among them; zero blocks."""
    x = torch.randn(rows, columns, device=device)
    x *= torch.exp2(torch.randint(-20, 20, (rows, columns // 32 + 1), device=device).float()).repeat_interleave(32, 1)[
        :, :columns
    ]
    x = x.to(dtype)
    half = rows // 2
    patterns = torch.arange(half * columns, device=device) * 40503 % 65536  # odd, so that all occur, in another order
    x[half : 2 * half] = patterns.to(torch.int32).to(torch.int16).view(torch.bfloat16).view(half, columns)
    x[:half, 64:128] = 0.0
    x[0, :64] = -0.0
    return x


def check(x: Tensor, format: str, mode: str | None) -> None:
    """Every axis of `x`: the kernel writes the bytes of its twin."""
    from mxquant.kernels.quantize.strided import quantize_blocks

    fmt = get_format(format)
    options = {"per_tensor_scale": nvfp4_per_tensor_scale(x)} if fmt.per_tensor else {}
    for axis in range(x.dim()):
        physical = x.movedim(axis, -1)
        qdata, scale = quantize_blocks(physical, fmt, mode, **options)
        expected_qdata, expected_scale = twin(physical, fmt, mode, **options)
        assert torch.equal(scale, expected_scale)
        assert torch.equal(qdata, expected_qdata)


@pytest.mark.skipif(not has_triton(), reason="needs triton")
@pytest.mark.parametrize("format, mode", FORMATS_AND_MODES)
def test_a_whole_layer(format: str, mode: str, device: torch.device) -> None:
    check(whole_layer(2880, 5120, torch.bfloat16, device), format, mode)


@pytest.mark.skipif(not has_triton(), reason="needs triton")
@pytest.mark.parametrize("format", FORMATS)
def test_whole_layers_of_other_dtypes_lengths_and_ranks(format: str, device: torch.device) -> None:
    """Rows that end inside a block, and a stack of matrices."""
    for dtype in (torch.float32, torch.float16):
        x = whole_layer(1408, 2890, torch.float32, device)
        check(x.to(dtype), format, None)
    check(whole_layer(4 * 704, 1416, torch.bfloat16, device).view(4, 704, 1416), format, None)


@pytest.mark.skipif(not has_triton(), reason="needs triton")
@pytest.mark.parametrize("format", FORMATS)
def test_one_wrong_byte_of_a_layer_is_noticed(format: str, device: torch.device) -> None:
    """The control: another mode, or one element moved by one step of bf16."""
    from mxquant.kernels.quantize.strided import quantize_blocks

    x, fmt = whole_layer(256, 320, torch.bfloat16, device), get_format(format)
    options = {"per_tensor_scale": torch.ones((), device=device)} if fmt.per_tensor else {}
    moved = x.clone()
    moved[3, 5] = 2 * x[3, 0:32].abs().max()
    ours, theirs = quantize_blocks(x, fmt, **options), twin(moved, fmt, **options)
    assert not all(torch.equal(a, b) for a, b in zip(ours, theirs))
