"""What packed codes cannot do says so, names the operation, and names `.dequantize()`."""

import textwrap
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from matmul_reference import FORMATS
from torch import Tensor

from mxquant import MXTensor, quantize

REFUSED: dict[str, Callable[[MXTensor], object]] = {
    "add a number": lambda w: w + 1,
    "multiply by a number": lambda w: w * 2,
    "multiply from the left": lambda w: 2 * w,
    "divide": lambda w: w / 3,
    "negate": lambda w: -w,
    "add a tensor": lambda w: w + torch.ones(4, 64),
    "add to a tensor": lambda w: torch.ones(4, 64) + w,
    "add in place": lambda w: w.add_(1),
    "fill with random numbers": lambda w: w.normal_(),
    "norm": lambda w: w.norm(),
    "sum": lambda w: w.sum(),
    "abs": lambda w: w.abs(),
    "compare": lambda w: w > 0,
    "relu": lambda w: torch.relu(w),
    "softmax": lambda w: w.softmax(-1),
    "convolution": lambda w: F.conv1d(torch.ones(1, 64, 9), w.unsqueeze(-1).expand(4, 64, 1)),
    "step along the blocked axis": lambda w: w[:, ::2],
    "one column": lambda w: w[:, 3],
    "columns by index": lambda w: w[:, torch.tensor([1, 5])],
    "columns by index_select": lambda w: w.index_select(1, torch.tensor([1, 5])),
    "flip along the blocked axis": lambda w: w.flip(1),
    "unbind the blocked axis": lambda w: w.unbind(1),
    "view into parts of blocks": lambda w: w.view(4, 8, 8),
    "flatten a transposed weight": lambda w: w.t().reshape(-1),
    "convert to an integer": lambda w: w.to(torch.int32),
    "item assignment of numbers": lambda w: w.__setitem__(0, 1.0),
    "fill": lambda w: w.fill_(3.0),
    "repeat along the blocked axis": lambda w: w.repeat(1, 2),
    "random numbers alike": lambda w: torch.rand_like(w),
    "isnan": lambda w: w.isnan(),
    "other bits": lambda w: w.view(torch.uint8),
    "item": lambda w: w[0, 0].item(),
}


@pytest.mark.parametrize("operation", REFUSED)
@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
def test_unsupported_operations_name_dequantize(format: str, operation: str) -> None:
    weight = quantize(torch.randn(4, 64), format)
    before = weight.clone()
    with pytest.raises((NotImplementedError, ValueError, TypeError), match=r"dequantize\(\)"):
        REFUSED[operation](weight)
    assert torch.equal(weight, before)


@pytest.mark.parametrize("method", ["tolist", "numpy"])
def test_reading_values_out_of_codes_is_refused(method: str) -> None:
    """torch answers these before a subclass is asked, in its own words; what counts is that no bytes are misread."""
    with pytest.raises((NotImplementedError, ValueError, TypeError, RuntimeError)):
        getattr(quantize(torch.randn(4, 64), "mxfp4"), method)()


@pytest.mark.parametrize("format", FORMATS)
def test_views_that_would_cut_blocks_are_refused(format: str) -> None:
    """K = 40 ends in a partial block: rows cannot be joined, and no other split of 40 falls on borders."""
    weight = quantize(torch.randn(4, 40), format)
    for shape in [(160,), (8, 20), (2, 80), (4, 5, 8), (-1,)]:
        with pytest.raises((NotImplementedError, ValueError), match=r"dequantize\(\)"):
            weight.view(shape)
        with pytest.raises((NotImplementedError, ValueError), match=r"dequantize\(\)"):
            weight.reshape(shape)


@pytest.mark.parametrize("format", FORMATS)
def test_views_along_whole_blocks_are_exact_or_refused(format: str) -> None:
    """Where borders coincide a view is possible; if it is given, it is right."""
    weight = quantize(torch.randn(4, 64), format)
    for shape in [(256,), (8, 32), (2, 128), (4, 2, 32), (2, 2, 2, 32)]:
        try:
            view = weight.view(shape)
        except (NotImplementedError, ValueError) as error:
            assert "dequantize()" in str(error)  # noqa: PT017
        else:
            assert torch.equal(view.dequantize(), weight.dequantize().view(shape))


def test_copy_between_dense_and_quantized_is_refused() -> None:
    """Nothing requantizes or dequantizes by itself."""
    weight = quantize(torch.randn(4, 64), "mxfp4")
    before = weight.clone()
    with pytest.raises((TypeError, ValueError, NotImplementedError), match="quantize"):
        weight.copy_(torch.randn(4, 64))
    assert torch.equal(weight, before)
    plain = torch.zeros(4, 64)
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=r"dequantize\(\)"):
        plain.copy_(weight)
    assert plain.tolist() == torch.zeros(4, 64).tolist()


def test_copy_between_quantized_tensors_of_different_kinds_is_refused() -> None:
    weight = quantize(torch.randn(4, 64), "mxfp4")
    others = {
        "format": quantize(torch.randn(4, 64), "nvfp4"),
        "shape": quantize(torch.randn(4, 32), "mxfp4"),
        "axis": quantize(torch.randn(4, 64), "mxfp4", axis=0),
    }
    for name, other in others.items():
        before = weight.clone()
        with pytest.raises((TypeError, ValueError, NotImplementedError, RuntimeError)):
            weight.copy_(other)
        assert torch.equal(weight, before), name


def message(operation: Callable[[], object]) -> str:
    with pytest.raises((NotImplementedError, ValueError, TypeError)) as caught:
        operation()
    return textwrap.fill(f"{caught.type.__name__}: {caught.value}", 100)


def test_texts_of_the_most_common_errors() -> None:
    """Printed as a user sees them: what was given, what is accepted, the remedy."""
    w: Tensor = torch.zeros(4, 64)
    weight = quantize(w, "mxfp4")
    texts = [
        message(lambda: weight + 1),
        message(lambda: weight[:, ::2]),
        message(lambda: weight.view(4, 8, 8)),
        message(lambda: weight.copy_(w)),
        message(lambda: w.copy_(weight)),
        message(lambda: F.linear(torch.zeros(2, 40), weight.with_activation("mxfp4")[:, 7:47])),
        message(lambda: quantize(weight, "mxfp4")),
        message(lambda: quantize(w, "mxfp5")),
        message(lambda: MXTensor.from_qdata(weight.qdata, weight.scale[:, :1], "mxfp4")),
        message(lambda: MXTensor.from_qdata(weight.qdata, weight.scale, "nvfp4")),
    ]
    assert_expected_inline(
        "\n\n".join(texts),
        """\
NotImplementedError: aten.add.Tensor is not implemented on the packed codes of a quantized tensor;
call .dequantize() first for an ordinary tensor, or mxquant.dequantize_(model)

NotImplementedError: a slice with step 2 along the blocked axis of MXTensor(mxfp4, W4A16, shape=(4,
64), dtype=float32, device=cpu) cannot be done on packed codes (blocked axis -1); call .dequantize()
first for an ordinary tensor

NotImplementedError: a view as (4, 8, 8), which splits or merges the blocked axis, of
MXTensor(mxfp4, W4A16, shape=(4, 64), dtype=float32, device=cpu) cannot be done on packed codes
(blocked axis -1); call .dequantize() first for an ordinary tensor

TypeError: cannot copy an ordinary torch.float32 tensor into MXTensor(mxfp4, W4A16, shape=(4, 64),
dtype=float32, device=cpu): that would quantize it silently. Load the weights before quantize_, or
copy mxquant.quantize(source, "mxfp4", axis=-1)

TypeError: cannot copy MXTensor(mxfp4, W4A16, shape=(4, 64), dtype=float32, device=cpu) into an
ordinary torch.float32 tensor: that would dequantize it silently. Copy source.dequantize(), or
quantize the destination first

ValueError: MXTensor(mxfp4, W4A4, shape=(4, 40), dtype=float32, device=cpu) starts 7 elements inside
a block, where quantized activations would have other blocks than the weight; slice at multiples of
32, or use it weight-only: .with_activation(None)

NotImplementedError: MXTensor(mxfp4, W4A16, shape=(4, 64), dtype=float32, device=cpu) is quantized
already; call .dequantize() first to quantize it anew

ValueError: format 'mxfp5' is unknown; use one of mxfp4, mxfp6_e2m3, mxfp6_e3m2, mxfp8_e4m3,
mxfp8_e5m2, nvfp4 (mxfp6 stands for mxfp6_e2m3, mxfp8 for mxfp8_e4m3)

ValueError: scale of shape (4, 1) does not fit a mxfp4 tensor of shape (4, 64) blocked along axis
-1: its shape must be (4, 2)

ValueError: scale of shape (4, 2) does not fit a nvfp4 tensor of shape (4, 64) blocked along axis
-1: its shape must be (4, 4)""",
    )
