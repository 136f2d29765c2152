"""Every spelling of a product: mm, addmm, bmm and matmul with the weight on either side, grouped_mm, embedding."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from matmul_reference import FORMATS, activation64, assert_product, decode64, dense, quantized
from torch import Tensor

from mxquant import MXTensor, quantize

PAIRS = [("mxfp4", None), ("mxfp4", "mxfp4"), ("mxfp6_e3m2", "mxfp6_e3m2"), ("mxfp8_e5m2", "mxfp8_e4m3"),
         ("nvfp4", "nvfp4"), ("nvfp4", "fp8_e5m2")]  # fmt: skip
K, N = 80, 6

Product = Callable[[Tensor, MXTensor], Tensor]

WEIGHT_RIGHT: dict[str, Product] = {
    "x @ w.t()": lambda x, w: x @ w.t(),
    "x @ w.T": lambda x, w: x @ w.T,
    "x @ w.mT": lambda x, w: x @ w.mT,
    "torch.mm": lambda x, w: torch.mm(x, w.t()),
    "torch.matmul": lambda x, w: torch.matmul(x, w.transpose(0, 1)),
    "torch.addmm": lambda x, w: torch.addmm(torch.zeros(N), x, w.t()),
    "F.linear": lambda x, w: F.linear(x, w),
    "batched matmul": lambda x, w: torch.matmul(x[None].expand(2, -1, -1), w.t())[1],
    "permuted twice": lambda x, w: x @ w.permute(1, 0),
}

WEIGHT_LEFT: dict[str, Product] = {
    "w @ x.t()": lambda x, w: (w @ x.t()).t(),
    "torch.mm": lambda x, w: torch.mm(w, x.t()).t(),
    "torch.matmul": lambda x, w: torch.matmul(w, x.t()).t(),
}


@pytest.mark.parametrize("spelling", WEIGHT_RIGHT)
@pytest.mark.parametrize("format, activation", PAIRS)
def test_weight_on_the_right(format: str, activation: str | None, spelling: str) -> None:
    x, weight = torch.randn(5, K), quantized(torch.randn(N, K), format, activation)
    y = WEIGHT_RIGHT[spelling](x, weight)
    assert type(y) is Tensor
    assert_product(y, activation64(x, activation), decode64(weight))


@pytest.mark.parametrize("spelling", WEIGHT_LEFT)
@pytest.mark.parametrize("format, activation", PAIRS)
def test_weight_on_the_left(format: str, activation: str | None, spelling: str) -> None:
    """W X^T contracts along W's blocked axis, so X is quantized along K here too."""
    x, weight = torch.randn(5, K), quantized(torch.randn(N, K), format, activation)
    assert_product(WEIGHT_LEFT[spelling](x, weight), activation64(x, activation), decode64(weight))


@pytest.mark.parametrize("format, activation", PAIRS)
def test_mv_and_dot(format: str, activation: str | None) -> None:
    x, weight = torch.randn(K), quantized(torch.randn(N, K), format, activation)
    expected = activation64(x[None], activation), decode64(weight)
    assert_product((weight @ x)[None], *expected)
    assert_product(torch.mv(weight, x)[None], *expected)
    assert_product((x @ weight.t())[None], *expected)


@pytest.mark.parametrize("format, activation", PAIRS)
def test_a_one_dimensional_weight(format: str, activation: str | None) -> None:
    """F.linear and matmul with a vector of weights give one number a row."""
    x, weight = torch.randn(5, K), quantize(torch.randn(K), format).with_activation(activation)
    x64, w64 = activation64(x, activation), decode64(weight)[None]
    assert_product((x @ weight)[:, None], x64, w64)
    assert_product(torch.mv(x, weight)[:, None], x64, w64)
    assert_product(F.linear(x, weight)[:, None], x64, w64)


@pytest.mark.parametrize("format, activation", PAIRS)
def test_matmul_broadcasts_batches(format: str, activation: str | None) -> None:
    """torch.matmul expands and folds batch axes on either side."""
    w = torch.randn(2, 3, N, K)
    weight = quantized(w, format, activation)
    w64 = decode64(weight)
    for shape in [(2, 3, 5, K), (3, 5, K), (1, 3, 5, K)]:
        x = torch.randn(shape)
        assert_product(x @ weight.mT, activation64(x, activation), w64)
    x = torch.randn(5, K)
    assert_product(x @ weight[0].mT, activation64(x, activation).expand(3, -1, -1), w64[0])
    x = torch.randn(4, 2, 5, K)
    assert_product(x @ weight[1, 2].t(), activation64(x, activation), w64[1, 2])


@pytest.mark.parametrize("format", FORMATS)
def test_weights_without_rows_or_columns(format: str) -> None:
    """Slices without rows or without columns multiply as in torch."""
    weight = quantized(torch.randn(N, K), format)
    assert F.linear(torch.randn(3, K), weight[:0]).shape == (3, 0)
    assert F.linear(torch.randn(3, 0), weight[:, 5:5]).tolist() == torch.zeros(3, N).tolist()
    assert F.linear(torch.randn(3, 0), weight[:, 5:5], torch.ones(N)).tolist() == torch.ones(3, N).tolist()
    assert (torch.randn(3, N) @ weight[:, 5:5]).shape == (3, 0)
    assert (torch.randn(3, 0) @ weight[:0]).tolist() == torch.zeros(3, K).tolist()


@pytest.mark.parametrize("format, activation", PAIRS)
def test_addmm_scales_its_terms(format: str, activation: str | None) -> None:
    x, weight, bias = torch.randn(5, K), quantized(torch.randn(N, K), format, activation), torch.randn(5, N)
    y = torch.addmm(bias, x, weight.t(), beta=0.5, alpha=2.0)
    assert_product(y, 2 * activation64(x, activation), decode64(weight), 0.5 * bias)


@pytest.mark.parametrize("format, activation", PAIRS)
def test_einsum(format: str, activation: str | None) -> None:
    """torch spells it as a bmm of permuted operands."""
    x, w_ENK = torch.randn(5, K), torch.randn(3, N, K)
    weight = quantized(w_ENK, format, activation)
    x64, w64 = activation64(x, activation), decode64(weight)
    assert_product(torch.einsum("tk,nk->tn", x, weight[1]), x64, w64[1])
    assert_product(torch.einsum("etk,enk->etn", x.expand(3, -1, -1), weight), x64.expand(3, -1, -1), w64)


@pytest.mark.parametrize("format, activation", PAIRS)
def test_addmm_across_the_blocked_axis(format: str, activation: str | None) -> None:
    x, weight, bias = torch.randn(5, N), quantized(torch.randn(N, K), format, activation), torch.randn(K)
    assert_product(torch.addmm(bias, x, weight), x.double(), decode64(weight).mT, bias)


def test_addmm_without_its_first_term_ignores_what_it_holds() -> None:
    """beta=0 means that NaN in the added matrix is not read, as in torch."""
    weight = quantized(torch.randn(N, K), "mxfp4")
    x, nan = torch.randn(5, K), torch.full((5, N), torch.nan)
    assert_product(torch.addmm(nan, x, weight.t(), beta=0), x.double(), decode64(weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_bias_of_another_dtype(dtype: torch.dtype) -> None:
    """The sum is made before the output is rounded."""
    x, weight, bias = torch.randn(5, K).to(dtype), quantized(torch.randn(N, K), "mxfp4"), torch.randn(N)
    y = F.linear(x, weight, bias)
    assert y.dtype == dtype
    assert_product(y, x.double(), decode64(weight), bias)


# Stacked weights


@pytest.mark.parametrize("format, activation", PAIRS)
def test_bmm_on_either_side(format: str, activation: str | None) -> None:
    x_ETK, w_ENK = torch.randn(3, 5, K), torch.randn(3, N, K)
    weight = quantized(w_ENK, format, activation)
    expected = activation64(x_ETK, activation), decode64(weight)
    assert_product(torch.bmm(x_ETK, weight.transpose(1, 2)), *expected)
    assert_product(torch.bmm(weight, x_ETK.transpose(1, 2)).transpose(1, 2), *expected)
    assert_product(x_ETK @ weight.mT, *expected)


@pytest.mark.parametrize("format, activation", PAIRS)
def test_bmm_across_the_blocked_axis_does_not_quantize_activations(format: str, activation: str | None) -> None:
    x_ETN, w_ENK = torch.randn(3, 5, N), torch.randn(3, N, K)
    weight = quantized(w_ENK, format, activation)
    assert_product(torch.bmm(x_ETN, weight), x_ETN.double(), decode64(weight).mT)


@pytest.mark.parametrize("format, activation", PAIRS)
@pytest.mark.parametrize("grouped_mm", ["torch._grouped_mm", "F.grouped_mm"])
def test_grouped_mm(format: str, activation: str | None, grouped_mm: str) -> None:
    """Tokens sorted by expert, one expert without any; each expert's rows against a float64 product of their own."""
    function = torch._grouped_mm if grouped_mm == "torch._grouped_mm" else F.grouped_mm
    x_TK, w_ENK = torch.randn(9, K, dtype=torch.bfloat16), torch.randn(3, 16, K, dtype=torch.bfloat16)
    weight = quantized(w_ENK, format, activation)
    offs = torch.tensor([4, 4, 9], dtype=torch.int32)
    y = function(x_TK, weight.transpose(-2, -1), offs=offs)
    assert y.dtype == torch.bfloat16
    x64, w64 = activation64(x_TK, activation), decode64(weight)
    assert_product(y[:4], x64[:4], w64[0])
    assert_product(y[4:], x64[4:], w64[2])
    with pytest.raises(AssertionError):
        assert_product(y[4:], x64[4:], w64[1])


@pytest.mark.parametrize("format, activation", PAIRS)
def test_experts_stored_with_k_before_n(format: str, activation: str | None) -> None:
    """A logical (E, K, N) weight, as gpt-oss has it, is blocked along axis -2 and multiplies without a transpose."""
    x_ETK, w_EKN = torch.randn(3, 5, K), torch.randn(3, K, N)
    weight = quantized(w_EKN, format, activation, axis=-2)
    assert weight.shape == (3, K, N)
    assert weight.axis == -2
    expected = activation64(x_ETK, activation), decode64(weight.transpose(1, 2))
    assert_product(torch.bmm(x_ETK, weight), *expected)
    assert_product(x_ETK @ weight, *expected)
    assert_product(x_ETK[2] @ weight[2], expected[0][2], expected[1][2])


@pytest.mark.parametrize("format, activation", PAIRS)
def test_grouped_mm_with_k_before_n(format: str, activation: str | None) -> None:
    x_TK, w_EKN = torch.randn(6, K, dtype=torch.bfloat16), torch.randn(2, K, 16, dtype=torch.bfloat16)
    weight = quantized(w_EKN, format, activation, axis=-2)
    y = torch._grouped_mm(x_TK, weight, offs=torch.tensor([2, 6], dtype=torch.int32))
    x64, w64 = activation64(x_TK, activation), decode64(weight.transpose(1, 2))
    assert_product(y[:2], x64[:2], w64[0])
    assert_product(y[2:], x64[2:], w64[1])


@pytest.mark.parametrize("format, activation", PAIRS)
def test_one_expert_and_several(format: str, activation: str | None) -> None:
    x, w_ENK = torch.randn(5, K), torch.randn(4, N, K)
    weight = quantized(w_ENK, format, activation)
    x64, w64 = activation64(x, activation), decode64(weight)
    assert_product(F.linear(x, weight[2]), x64, w64[2])
    assert_product(F.linear(x, weight[-1]), x64, w64[3])
    ids = torch.tensor([3, 0, 3])
    picked = weight[ids]
    assert picked.shape == (3, N, K)
    assert_product(torch.bmm(x.expand(3, -1, -1), picked.mT), x64.expand(3, -1, -1), w64[ids])


@pytest.mark.parametrize("activation", [None, "nvfp4"])
def test_a_per_tensor_scale_for_each_expert(activation: str | None) -> None:
    """Each expert of a checkpoint brings its own NVFP4 scale; it stays with its expert."""
    x_ETK, w_ENK = torch.randn(3, 5, K), torch.randn(3, N, K) * torch.tensor([1.0, 1e3, 1e-3])[:, None, None]
    scales = w_ENK.abs().amax((1, 2), keepdim=True) / 2688
    weight = quantized(w_ENK, "nvfp4", activation, per_tensor_scale=scales)
    x64, w64 = activation64(x_ETK, activation), decode64(weight)
    assert ((w64 - w_ENK).norm(dim=(1, 2)) < 0.15 * w_ENK.norm(dim=(1, 2))).all()
    assert_product(torch.bmm(x_ETK, weight.mT), x64, w64)
    for expert in range(3):
        alone = weight[expert]
        assert torch.equal(alone.dequantize(), weight.dequantize()[expert])
        assert_product(F.linear(x_ETK[expert], alone), x64[expert], w64[expert])
    picked = weight[torch.tensor([2, 1])]
    assert torch.equal(picked.dequantize(), weight.dequantize()[[2, 1]])
    assert torch.equal(torch.cat([weight[:1], weight[1:]]).dequantize(), weight.dequantize())
    assert torch.equal(torch.stack(weight.unbind()).dequantize(), weight.dequantize())
    assert torch.equal(weight.permute(2, 0, 1).dequantize(), weight.dequantize().permute(2, 0, 1))
    like = torch.empty_like(weight)
    like.copy_(weight)
    assert torch.equal(like.dequantize(), weight.dequantize())


# Look-ups


@pytest.mark.parametrize("format", FORMATS)
def test_embedding(format: str) -> None:
    """An embedding reads rows, whatever activation rule the weight carries, and gives them in the weight's dtype."""
    table = quantized(torch.randn(10, 40, dtype=torch.bfloat16), format, format)
    ids = torch.tensor([[1, 9], [0, 1]])
    rows = F.embedding(ids, table)
    assert type(rows) is Tensor
    assert rows.dtype == torch.bfloat16
    assert torch.equal(rows, dense(table)[ids])
    assert torch.equal(F.embedding(ids, table, padding_idx=1), rows)
    assert F.embedding(ids[:0], table).shape == (0, 2, 40)


# What a product refuses


def test_a_wrong_width_names_both_widths() -> None:
    weight = quantized(torch.randn(N, 64), "mxfp4", "mxfp4")
    with pytest.raises((ValueError, RuntimeError), match=r"(?s)60.*64|64.*60"):
        F.linear(torch.randn(2, 60), weight)


def test_two_quantized_operands_are_refused_with_the_remedy() -> None:
    weight = quantize(torch.randn(8, 64), "mxfp4")
    with pytest.raises((NotImplementedError, TypeError), match="dequantize"):
        weight @ weight.t()


def test_integer_activations_are_refused() -> None:
    weight = quantize(torch.randn(8, 64), "mxfp4")
    with pytest.raises((TypeError, ValueError), match="int64"):
        F.linear(torch.ones(2, 64, dtype=torch.int64), weight)
