"""Products at the edges: odd sizes, ranks, strides, batches, the ends of a dtype's range."""

import pytest
import torch
import torch.nn.functional as F
from matmul_reference import FORMATS, activation64, assert_product, decode64, operands, quantized
from torch import Tensor

from mxquant import MXTensor, quantize
from mxquant.backends import Groups
from mxquant.formats import get_format
from mxquant.tensor import describe, grouped_product

PAIRS = [("mxfp4", None), ("mxfp4", "mxfp4"), ("mxfp6_e2m3", "mxfp6_e2m3"), ("mxfp8_e4m3", "mxfp8_e4m3"),
         ("nvfp4", "nvfp4"), ("nvfp4", None), ("mxfp4", "fp8_e4m3")]  # fmt: skip


@pytest.mark.parametrize("in_features", [1, 16, 40, 72, 100])
@pytest.mark.parametrize("format, activation", PAIRS)
def test_in_features_that_the_block_does_not_divide(format: str, activation: str | None, in_features: int) -> None:
    x, w = operands("gaussian", 3, in_features, 5)
    weight = quantized(w, format, activation)
    assert_product(F.linear(x, weight), activation64(x, activation), decode64(weight))


@pytest.mark.parametrize("format, activation", PAIRS)
def test_one_output_feature(format: str, activation: str | None) -> None:
    x, w = operands("gaussian", 3, 40, 1)
    weight = quantized(w, format, activation)
    y = F.linear(x, weight, torch.ones(1))
    assert_product(y, activation64(x, activation), decode64(weight), torch.ones(1))


@pytest.mark.parametrize("lead", [(), (3,), (1,), (2, 3), (2, 1, 3), (0,), (2, 0)])
@pytest.mark.parametrize("format, activation", PAIRS)
def test_inputs_of_any_rank_and_empty_batches(format: str, activation: str | None, lead: tuple[int, ...]) -> None:
    x = torch.randn(*lead, 64)
    weight = quantized(torch.randn(6, 64), format, activation)
    y = F.linear(x, weight)
    assert y.shape == (*lead, 6)
    assert_product(y.reshape(-1, 6), activation64(x.reshape(-1, 64), activation), decode64(weight))


NON_CONTIGUOUS = {
    "transposed": lambda: torch.randn(64, 5).t(),
    "every second column": lambda: torch.randn(5, 128)[:, ::2],
    "last token of a batch of 2": lambda: torch.randn(2, 7, 64)[:, -1],
    "expanded": lambda: torch.randn(1, 64).expand(4, 64),
    "permuted": lambda: torch.randn(3, 64, 2).permute(0, 2, 1),
}


@pytest.mark.parametrize("layout", NON_CONTIGUOUS)
@pytest.mark.parametrize("format, activation", PAIRS)
def test_non_contiguous_inputs(format: str, activation: str | None, layout: str) -> None:
    x = NON_CONTIGUOUS[layout]()
    weight = quantized(torch.randn(6, 64), format, activation)
    assert not x.is_contiguous()
    # Not bit for bit: an ordinary matmul, too, sums strided rows in another order.
    rows = x.reshape(-1, 64)
    assert_product(F.linear(x, weight).reshape(-1, 6), activation64(rows, activation), decode64(weight))


@pytest.mark.parametrize("activation", ["mxfp4", "mxfp8_e4m3", "nvfp4", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("loudness", [2**-40, 2**20])
def test_a_row_does_not_depend_on_the_other_rows_of_its_batch(activation: str, loudness: float) -> None:
    """Its quantized operand is its own; only the order of summation may differ between a batch of 1 and of 4.

    Each of two such fp32 sums is within K x 2^-24 of (|x| |w|^T), which `assert_product` allows against float64. A
    scale shared with rows 2^20 times louder or softer would wipe the row out or saturate it.
    """
    x, w = operands("gaussian", 4, 96, 10)
    alone = x[:1].clone()
    x[1:] *= loudness
    weight = quantized(w, "mxfp4", activation)
    expected = activation64(alone, activation)
    assert_product(F.linear(alone, weight), expected, decode64(weight))
    assert_product(F.linear(x, weight)[:1], expected, decode64(weight))


def weight_of_scale(byte: int, dtype: torch.dtype, in_features: int, signs: Tensor) -> MXTensor:
    """An MXFP4 weight of one row whose every element is +-0.5 x 2^(byte - 127)."""
    codes = torch.where(signs > 0, 1, 9).to(torch.uint8)
    qdata = (codes[0::2] | codes[1::2] << 4)[None]
    scale = torch.full((1, in_features // 32), byte, dtype=torch.uint8)
    return MXTensor.from_qdata(qdata, scale, "mxfp4", dtype=dtype)


@pytest.mark.parametrize("activation", [None, "mxfp4", "mxfp8_e4m3", "nvfp4", "fp8_e4m3"])
def test_fp16_is_finite_where_the_result_fits(activation: str | None) -> None:
    """Weights of 2^17 are beyond fp16, their products with tiny activations are not: only the last step is fp16."""
    k = 4096
    weight = weight_of_scale(145, torch.float16, k, torch.ones(k)).with_activation(activation)
    y = F.linear(torch.full((2, k), 2.0**-18, dtype=torch.float16), weight)
    assert y.tolist() == [[2048.0], [2048.0]]


@pytest.mark.parametrize("activation", [None, "mxfp4", "mxfp8_e5m2"])
def test_fp16_sums_that_cancel_are_finite(activation: str | None) -> None:
    """Every partial sum is a multiple of 2^17, exact in fp32 and beyond fp16; the result is 0."""
    k = 4096
    signs = torch.ones(k)
    signs[k // 2 :] = -1
    weight = weight_of_scale(145, torch.float16, k, signs).with_activation(activation)
    assert F.linear(torch.ones(3, k, dtype=torch.float16), weight).tolist() == [[0.0]] * 3


@pytest.mark.parametrize("activation", [None, "mxfp4", "nvfp4"])
def test_fp16_overflow_is_infinite_and_never_nan(activation: str | None) -> None:
    k = 4096
    weight = weight_of_scale(145, torch.float16, k, torch.ones(k)).with_activation(activation)
    y = F.linear(torch.ones(1, k, dtype=torch.float16), weight)
    assert y.tolist() == [[float("inf")]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_largest_and_smallest_scales_are_exact(dtype: torch.dtype) -> None:
    """Scale byte 0 is 2^-127, a subnormal of both dtypes; byte 252 is the last whose every code is finite."""
    for byte in (0, 1, 252):
        weight = weight_of_scale(byte, dtype, 64, torch.ones(64))
        x = torch.zeros(1, 64, dtype=dtype)
        x[0, 5] = 2.0 ** (120 if byte < 2 else -120)
        assert F.linear(x, weight).item() == 2.0 ** (byte - 128) * x[0, 5].item()


def test_a_nan_block_of_the_weight_makes_its_own_output_nan_only() -> None:
    w = torch.randn(4, 64)
    w[2, 40] = float("nan")
    y = F.linear(torch.randn(3, 64), quantized(w, "mxfp4"))
    assert y.isnan().tolist() == [[False, False, True, False]] * 3


@pytest.mark.parametrize("activation", ["mxfp4", "nvfp4", "fp8_e4m3"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_nan_activation_makes_its_own_row_nan_only(activation: str, bad: float) -> None:
    x = torch.randn(4, 64)
    x[1, 3] = bad
    y = F.linear(x, quantized(torch.randn(5, 64), "mxfp4", activation))
    assert y.isfinite().all(dim=1).tolist() == [True, False, True, True]


@pytest.mark.parametrize("activation", ["mxfp4", "mxfp8_e4m3", "nvfp4", "fp8_e4m3", "fp8_e5m2"])
def test_an_all_zero_row_gives_zero(activation: str) -> None:
    x = torch.randn(3, 64)
    x[1] = 0
    y = F.linear(x, quantized(torch.randn(5, 64), "mxfp4", activation))
    assert y[1].tolist() == [0.0] * 5


@pytest.mark.parametrize("format", FORMATS)
def test_padding_of_the_packed_codes_changes_nothing(format: str) -> None:
    """Whatever stands in the bits behind the last code, the product is the same."""
    w, x = torch.randn(4, 45), torch.randn(3, 45)
    weight = quantized(w, format)
    used = 45 * get_format(format).element.bits
    poisoned = weight.qdata.clone()
    poisoned[:, -(-used // 8) :] = 0xFF
    if used % 8:
        poisoned[:, used // 8] |= 0xFF << used % 8 & 0xFF
    other = MXTensor.from_qdata(
        poisoned, weight.scale, format, shape=(4, 45), dtype=weight.dtype, per_tensor_scale=weight.per_tensor_scale
    )
    assert torch.equal(F.linear(x, other), F.linear(x, weight))


# Contractions that do not run along the blocked axis


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("activation", ["mxfp4", "nvfp4", "fp8_e4m3"])
def test_activations_are_not_quantized_across_the_blocked_axis(format: str, activation: str) -> None:
    weight = quantized(torch.randn(12, 64), format, activation)
    x = torch.randn(3, 12)
    assert_product(x @ weight, x.double(), decode64(weight).mT)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("axis", [0, -2])
def test_a_weight_blocked_along_its_output_axis(format: str, axis: int) -> None:
    """F.linear with axis=-2 contracts across the blocks: exact in the activations."""
    w, x = torch.randn(40, 12), torch.randn(3, 12)
    weight = quantized(w, format, format, axis=axis)
    assert_product(F.linear(x, weight), x.double(), decode64(weight.t()).mT)


# Host time of an eager call


def test_eager_products_read_the_weight_without_its_torch_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attribute that is read on the weight would otherwise be a call of its own."""
    x, weight = torch.randn(3, 64), quantized(torch.randn(6, 64), "mxfp4", "mxfp4")
    stack = quantized(torch.randn(1, 6, 64), "mxfp4", "mxfp4")
    calls: list[object] = []
    original = MXTensor.__torch_function__.__func__  # type: ignore[attr-defined]

    def counting(cls: type, func: object, *rest: object) -> object:
        calls.append(func)
        return original(cls, func, *rest)

    monkeypatch.setattr(MXTensor, "__torch_function__", classmethod(counting))
    F.linear(x, weight)
    assert calls == [F.linear]
    grouped_product(x, stack, -1, Groups(torch.tensor([3], dtype=torch.int32)))
    assert calls == [F.linear]


def test_describing_a_weight_twice_gives_one_object() -> None:
    one, other = (quantized(torch.randn(6, 64), "mxfp4", "mxfp4") for _ in range(2))
    assert describe(one) is describe(other)
    assert describe(one, torch.float16) is not describe(one)
    assert describe(one.with_activation("nvfp4", scale=torch.ones(()))) != describe(one.with_activation("nvfp4"))


@pytest.mark.parametrize("shape", [(33,), (31,), (1,), (1, 32), ()], ids=str)
def test_a_bias_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    weight = quantize(torch.randn(32, 64), "mxfp4")
    with pytest.raises(ValueError, match=r"bias of shape .* does not fit .*: its shape must be \(32,\)"):
        F.linear(torch.randn(3, 64), weight, torch.randn(shape))
