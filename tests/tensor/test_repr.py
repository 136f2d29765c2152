"""One short line that says what a tensor is, without reading its data."""

import torch
from expecttest import assert_expected_inline
from matmul_reference import FORMATS, quantized
from torch import nn

from mxquant import quantize


def test_repr_of_each_kind() -> None:
    w = torch.zeros(64, 128, dtype=torch.bfloat16)
    lines = [repr(quantize(w, "mxfp4")), repr(quantized(w, "mxfp4", "mxfp4"))]
    lines += [repr(quantize(w, format).with_activation(format)) for format in FORMATS]
    lines += [repr(quantize(w, "mxfp4").with_activation(a)) for a in ("mxfp8", "mxfp6_e3m2", "fp8_e5m2", "nvfp4")]
    lines += [repr(quantize(w.float(), "nvfp4", axis=0)), repr(quantize(w, "mxfp4").t()), repr(quantize(w[0], "mxfp4"))]
    assert_expected_inline(
        "\n".join(lines),
        """\
MXTensor(mxfp4, W4A16, shape=(64, 128), dtype=bfloat16, device=cpu)
EmulatedMXTensor(mxfp4, W4A4, shape=(64, 128), dtype=bfloat16, device=cpu)
MXTensor(mxfp4, W4A4, shape=(64, 128), dtype=bfloat16, device=cpu)
MXTensor(mxfp6_e2m3, W6A6, shape=(64, 128), dtype=bfloat16, device=cpu)
MXTensor(mxfp6_e3m2, W6A6, shape=(64, 128), dtype=bfloat16, device=cpu)
MXTensor(mxfp8_e4m3, W8A8, shape=(64, 128), dtype=bfloat16, device=cpu)
MXTensor(mxfp8_e5m2, W8A8, shape=(64, 128), dtype=bfloat16, device=cpu)
MXTensor(nvfp4, W4A4, shape=(64, 128), dtype=bfloat16, device=cpu)
MXTensor(mxfp4, W4A8, shape=(64, 128), dtype=bfloat16, device=cpu)
MXTensor(mxfp4, W4A6, shape=(64, 128), dtype=bfloat16, device=cpu)
MXTensor(mxfp4, W4A8, shape=(64, 128), dtype=bfloat16, device=cpu)
MXTensor(mxfp4, W4A4, shape=(64, 128), dtype=bfloat16, device=cpu)
MXTensor(nvfp4, W4A16, shape=(64, 128), dtype=float32, device=cpu)
MXTensor(mxfp4, W4A16, shape=(128, 64), dtype=bfloat16, device=cpu)
MXTensor(mxfp4, W4A16, shape=(128,), dtype=bfloat16, device=cpu)""",
    )


def test_repr_of_a_parameter_and_of_a_module() -> None:
    linear = nn.Linear(64, 8)
    linear.weight = nn.Parameter(quantized(linear.weight.detach(), "mxfp4", "mxfp4"), requires_grad=False)
    assert "W4A4" in repr(linear.weight)
    assert "\n" not in repr(linear.weight)
    assert "Linear(in_features=64, out_features=8" in repr(nn.Sequential(linear))


def test_repr_and_str_read_no_data() -> None:
    """A tensor on the meta device has no data to read."""
    meta = quantize(torch.randn(4, 64), "nvfp4").to("meta")
    assert "meta" in repr(meta)
    assert str(meta) == f"{meta}" == repr(meta)


def test_repr_under_fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    weight = quantize(torch.randn(4, 64), "mxfp4")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert "mxfp4" in repr(mode.from_tensor(weight))
