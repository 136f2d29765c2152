"""`quantize` and `MXTensor.from_qdata`: what they take, what they give, what they refuse and how they say so."""

import pytest
import torch
from matmul_reference import BLOCK, FORMATS, decode64, same_bytes
from torch import Tensor

from mxquant import EmulatedMXTensor, MXTensor, quantize
from mxquant.formats import get_format
from mxquant.formats.block import quantize_blocks
from mxquant.tensor import Metadata, as_weight

# What quantize gives


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("format", FORMATS)
def test_bytes_are_those_of_formats_quantize_blocks(format: str, dtype: torch.dtype) -> None:
    w = torch.randn(5, 72).to(dtype)
    weight = quantize(w, format)
    codes, scale = quantize_blocks(w.float(), get_format(format))
    assert torch.equal(weight.qdata, codes)
    assert torch.equal(weight.scale, scale)
    assert (weight.qdata.dtype, weight.scale.dtype) == (torch.uint8, torch.uint8)
    assert weight.dtype == dtype
    assert weight.dequantize().dtype == dtype
    assert torch.equal(weight.dequantize(torch.float64), decode64(weight))


@pytest.mark.parametrize("shape", [(40,), (3, 40), (2, 3, 40), (2, 2, 3, 40), (1, 1), (7,)])
@pytest.mark.parametrize("format", FORMATS)
def test_tensors_of_any_rank_along_any_axis(format: str, shape: tuple[int, ...]) -> None:
    """Blocking along an axis is blocking along the last one of the moved tensor; axes are stored as negative."""
    x = torch.randn(shape)
    for axis in range(-len(shape), len(shape)):
        result = quantize(x, format, axis=axis)
        moved = quantize(x.movedim(axis, -1), format)
        assert result.shape == x.shape
        assert result.axis == (axis if axis < 0 else axis - len(shape))
        assert torch.equal(result.qdata, moved.qdata)
        assert torch.equal(result.dequantize(), moved.dequantize().movedim(-1, axis))


@pytest.mark.parametrize("format", FORMATS)
def test_non_contiguous_inputs(format: str) -> None:
    x = torch.randn(72, 12)
    for view in (x.t(), x[:, ::2], x[::3], x.t()[:, 1:], x[:1].expand(4, 12)):
        assert same_bytes(quantize(view, format), quantize(view.contiguous(), format))


def test_aliases_and_defaults() -> None:
    x = torch.randn(2, 64)
    assert quantize(x, "mxfp8").format == "mxfp8_e4m3"
    assert quantize(x, "mxfp6").format == "mxfp6_e2m3"
    result = quantize(x, "mxfp4")
    assert type(result) is MXTensor
    assert (result.axis, result.activation, result.activation_scale, result.backend) == (-1, None, None, "auto")
    assert result.per_tensor_scale is None
    assert result.metadata.version == 1
    assert result.metadata.layout == "canonical"
    assert result.metadata.scheme.rotation is None
    assert not result.requires_grad


def test_default_scale_modes() -> None:
    x = torch.randn(16, 64)
    assert same_bytes(quantize(x, "mxfp4"), quantize(x, "mxfp4", scale_mode="even"))
    assert same_bytes(quantize(x, "mxfp8"), quantize(x, "mxfp8", scale_mode="rceil"))
    assert not same_bytes(quantize(x, "mxfp4"), quantize(x, "mxfp4", scale_mode="floor"))


def test_canonical_zero_writes_no_negative_zero() -> None:
    x = torch.full((1, 32), -0.01)
    x[0, 0] = 1
    assert (quantize(x, "mxfp4").qdata[0, 1:] == 0x88).all()
    assert (quantize(x, "mxfp4", canonical_zero=True).qdata[0, 1:] == 0).all()


def test_metadata_is_hashable_and_frozen() -> None:
    metadata = quantize(torch.randn(2, 64), "nvfp4").metadata
    assert isinstance(metadata, Metadata)
    assert hash(metadata) == hash(quantize(torch.randn(4, 64), "nvfp4").metadata)
    with pytest.raises(AttributeError):
        metadata.scheme.weight = "mxfp4"  # type: ignore[misc]


@pytest.mark.parametrize("format", FORMATS)
def test_nonfinite_blocks_decode_to_nan(format: str) -> None:
    """By default a block that holds NaN or Inf decodes to NaN as a whole and leaves its neighbours alone."""
    x = torch.randn(2, 3 * BLOCK[format])
    x[0, BLOCK[format] + 1] = float("inf")
    x[1, 0] = float("nan")
    nans = quantize(x, format).dequantize().isnan().view(2, 3, -1)
    assert nans.all(-1).tolist() == nans.any(-1).tolist() == [[False, True, False], [True, False, False]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("format", FORMATS)
def test_nonfinite_raise_names_the_first_block(format: str, bad: float) -> None:
    x = torch.randn(2, 64)
    x[1, 40] = bad
    with pytest.raises(ValueError, match=r"(?i)nan|inf|finite"):
        quantize(x, format, nonfinite="raise")
    quantize(torch.randn(2, 64), format, nonfinite="raise")


def test_the_result_has_no_gradient() -> None:
    w = torch.nn.Parameter(torch.randn(2, 64))
    assert not quantize(w, "mxfp4").requires_grad


# What quantize refuses


@pytest.mark.parametrize(
    "x, error, text",
    [
        (torch.ones(2, 64, dtype=torch.int32), (TypeError, ValueError), "int32"),
        (torch.ones(2, 64, dtype=torch.bool), (TypeError, ValueError), "bool"),
        (torch.ones(2, 64, dtype=torch.complex64), (TypeError, ValueError), "complex64"),
        (torch.ones(2, 64, dtype=torch.float8_e4m3fn), (TypeError, ValueError), "float8_e4m3fn"),
        (torch.ones(2, 64, device="meta"), (TypeError, ValueError, NotImplementedError), "meta"),
        (torch.ones(2, 0), ValueError, "empty|0"),
        (torch.ones(0, 64), ValueError, "empty|0"),
        (torch.tensor(1.0), ValueError, r"shape \(\)"),
        (torch.full((2, 64), 1e300, dtype=torch.float64), ValueError, "1e\\+300|float32|fp32"),
        ([[1.0] * 64], TypeError, "list"),
    ],
    ids=["int32", "bool", "complex", "float8", "meta", "no columns", "no rows", "scalar", "beyond fp32", "list"],
)
def test_inputs_that_cannot_be_quantized_are_refused(x: Tensor, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        quantize(x, "mxfp4")


def test_quantizing_twice_says_so() -> None:
    with pytest.raises(
        (TypeError, ValueError, NotImplementedError), match=r"(?s)already.*dequantize|dequantize.*already"
    ):
        quantize(quantize(torch.randn(2, 64), "mxfp4"), "mxfp4")


@pytest.mark.parametrize(
    "options, text",
    [
        ({"format": "mxfp5"}, "(?s)mxfp5.*mxfp4"),
        ({"format": "fp8_e4m3"}, "(?s)fp8_e4m3"),
        ({"format": "mxfp4", "scale_mode": "nearest"}, "(?s)nearest.*even"),
        ({"format": "nvfp4", "scale_mode": "floor"}, "(?s)floor.*even"),
        ({"format": "mxfp4", "axis": 2}, "2"),
        ({"format": "mxfp4", "axis": -3}, "-3"),
        ({"format": "mxfp4", "nonfinite": "ignore"}, "(?s)ignore.*nan.*raise|ignore.*raise.*nan"),
        ({"format": "mxfp4", "per_tensor_scale": torch.tensor(1.0)}, "(?s)per_tensor_scale.*nvfp4|mxfp4"),
        ({"format": "nvfp4", "per_tensor_scale": torch.tensor(0.0)}, "per_tensor_scale"),
        ({"format": "nvfp4", "per_tensor_scale": torch.tensor(-1.0)}, "per_tensor_scale"),
        ({"format": "nvfp4", "per_tensor_scale": torch.tensor(float("nan"))}, "per_tensor_scale"),
        ({"format": "nvfp4", "per_tensor_scale": torch.ones(3)}, "per_tensor_scale"),
    ],
    ids=lambda value: ", ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_unknown_options_are_refused(options: dict[str, object], text: str) -> None:
    with pytest.raises((ValueError, IndexError), match=text):
        quantize(torch.randn(2, 64), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("activation", ["mxfp5", "int8", ""])
def test_unknown_activation_formats_are_refused(activation: str) -> None:
    with pytest.raises(ValueError, match=r"(?s)fp8_e4m3"):
        quantize(torch.randn(2, 64), "mxfp4").with_activation(activation)


def test_scale_mode_without_activation_is_refused() -> None:
    weight = quantize(torch.randn(2, 64), "mxfp4")
    with pytest.raises(ValueError, match=r"scale.mode"):
        weight.with_activation("fp8_e4m3", scale_mode="even")
    with pytest.raises(ValueError, match=r"scale.mode"):
        weight.with_activation(None, scale_mode="even")


# from_qdata


def parts(format: str, *shape: int) -> dict[str, object]:
    weight = quantize(torch.randn(*shape), format)
    return {"qdata": weight.qdata, "scale": weight.scale, "format": format, "per_tensor_scale": weight.per_tensor_scale}


@pytest.mark.parametrize("shape", [(4, 64), (2, 4, 72), (40,), (3, 41)])
@pytest.mark.parametrize("format", FORMATS)
def test_from_qdata_rebuilds_a_tensor_from_its_parts(format: str, shape: tuple[int, ...]) -> None:
    weight = quantize(torch.randn(shape, dtype=torch.bfloat16), format)
    back = MXTensor.from_qdata(
        weight.qdata, weight.scale, format, shape=shape, dtype=weight.dtype, per_tensor_scale=weight.per_tensor_scale
    )
    assert same_bytes(back, weight)
    # A checkpoint's bytes are taken as they are, not copied.
    assert back.qdata.data_ptr() == weight.qdata.data_ptr()


@pytest.mark.parametrize("format", FORMATS)
def test_from_qdata_infers_the_shape_of_whole_blocks(format: str) -> None:
    result = MXTensor.from_qdata(**parts(format, 4, 96))  # type: ignore[arg-type]
    assert result.shape == (4, 96)
    assert result.dtype == torch.bfloat16


def test_from_qdata_along_a_logical_axis() -> None:
    w = torch.randn(96, 5)
    weight = quantize(w, "mxfp4", axis=0)
    back = MXTensor.from_qdata(weight.qdata, weight.scale, "mxfp4", dtype=torch.float32, axis=0)
    assert back.shape == (96, 5)
    assert torch.equal(back.dequantize(), weight.dequantize())


U8 = torch.uint8


@pytest.mark.parametrize(
    "change, text",
    [
        ({"qdata": torch.zeros(4, 32, dtype=torch.int8)}, "(?s)uint8.*int8"),
        ({"qdata": torch.zeros(4, 32)}, "(?s)uint8.*float32"),
        ({"scale": torch.zeros(4, 2)}, "(?s)uint8.*float32"),
        ({"scale": torch.zeros(4, 3, dtype=U8)}, r"(?s)3"),
        ({"scale": torch.zeros(5, 2, dtype=U8)}, r"(?s)5"),
        ({"scale": torch.zeros(8, dtype=U8)}, r"(?s)8"),
        ({"shape": (4, 63 + 32)}, r"(?s)95"),
        ({"shape": (5, 64)}, r"(?s)5"),
        ({"format": "mxfp5"}, r"(?s)mxfp5.*mxfp4"),
        ({"format": "fp8_e4m3"}, r"(?s)fp8_e4m3"),
        ({"per_tensor_scale": torch.tensor(1.0)}, "per_tensor_scale|per-tensor scale"),
        ({"dtype": torch.int32}, "int32"),
        ({"axis": 5}, "5"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_from_qdata_refuses_what_does_not_fit(change: dict[str, object], text: str) -> None:
    with pytest.raises((ValueError, TypeError, IndexError), match=text):
        MXTensor.from_qdata(**{**parts("mxfp4", 4, 64), **change})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "scale", [None, torch.ones(3), torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(1)],
    ids=["missing", "wrong shape", "bfloat16", "integer"],
)  # fmt: skip
def test_from_qdata_of_nvfp4_needs_its_per_tensor_scale(scale: Tensor | None) -> None:
    with pytest.raises((ValueError, TypeError), match=r"per_tensor_scale|per-tensor scale"):
        MXTensor.from_qdata(**{**parts("nvfp4", 4, 64), "per_tensor_scale": scale})  # type: ignore[arg-type]


# The class that serves it


@pytest.mark.usefixtures("fixed_backends")
def test_as_weight_chooses_emulation_on_a_cpu() -> None:
    weight = quantize(torch.randn(4, 64), "mxfp4")
    served = as_weight(weight)
    assert type(served) is EmulatedMXTensor
    assert isinstance(served, MXTensor)
    assert same_bytes(served, weight)
    assert served.qdata.data_ptr() == weight.qdata.data_ptr()
    assert as_weight(weight, "emulation").backend == "emulation"


@pytest.mark.usefixtures("fixed_backends")
def test_with_activation_keeps_the_class() -> None:
    served = as_weight(quantize(torch.randn(4, 64), "mxfp4"))
    changed = served.with_activation("mxfp8")
    assert type(changed) is EmulatedMXTensor
    assert changed.activation == "mxfp8_e4m3"
    assert torch.equal(changed.qdata, served.qdata)
    assert served.activation is None
