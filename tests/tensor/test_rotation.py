"""Rotated weights: what they stand for, what they multiply, what is saved and what is refused.

The reference rotates by a matrix in float64 and decodes by `mxquant.formats`; each check has a control in which a
rotation is left out.
"""

import copy
import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from matmul_reference import BLOCK, FORMATS, activation64, assert_product, decode64, quantized, same_bytes
from torch import Tensor, nn

from mxquant import MXTensor, dequantize_, flatten_state_dict, quantize, quantize_, summary, unflatten_state_dict
from mxquant.backends import Groups
from mxquant.reference.hadamard import hadamard
from mxquant.tensor import grouped_product

M, N, K = 7, 10, 96


def rotate64(x: Tensor, format: str) -> Tensor:
    return hadamard(x.double(), BLOCK[format])


def rotated(w: Tensor, format: str, activation: str | None = None) -> MXTensor:
    return quantized(w, format, activation, rotation=BLOCK[format])


@pytest.mark.parametrize("format", FORMATS)
def test_codes_are_those_of_the_rotated_values(format: str) -> None:
    w = torch.randn(N, K)
    weight = rotated(w, format)
    expected = quantize(hadamard(w, BLOCK[format]), format)
    assert torch.equal(weight.qdata, expected.qdata)
    assert torch.equal(weight.scale, expected.scale)
    assert not torch.equal(weight.qdata, quantize(w, format).qdata)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bytes_do_not_depend_on_the_dtype(dtype: torch.dtype) -> None:
    w = torch.randn(N, K).to(dtype)
    a, b = quantize(w, "mxfp4", rotation=32), quantize(w.float(), "mxfp4", rotation=32)
    assert torch.equal(a.qdata, b.qdata)
    assert torch.equal(a.scale, b.scale)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("axis", [-1, -2])
def test_dequantize_rotates_back(format: str, axis: int) -> None:
    w = torch.randn(64, 64)
    weight = quantize(w, format, axis=axis, rotation=BLOCK[format])
    codes = decode64(weight if axis == -1 else weight.t())
    expected = rotate64(codes, format)
    expected = expected if axis == -1 else expected.t()
    torch.testing.assert_close(weight.dequantize(torch.float64), expected)
    assert (weight.dequantize() - w).norm() < 0.15 * w.norm()  # E2M1 alone: 0.11
    assert not torch.allclose(weight.dequantize(torch.float64), codes if axis == -1 else codes.t(), atol=0.1)
    assert weight.dequantize(torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("activation", [None, "mxfp4", "nvfp4", "mxfp8_e4m3", "fp8_e4m3"])
@pytest.mark.parametrize("format", FORMATS)
def test_a_linear_rotates_its_input(format: str, activation: str | None) -> None:
    x, w, bias = torch.randn(M, K), torch.randn(N, K), torch.randn(N)
    weight = rotated(w, format, activation)
    x_rotated = hadamard(x, BLOCK[format])
    y = F.linear(x, weight, bias)
    assert_product(y, activation64(x_rotated, activation), decode64(weight), bias)
    with pytest.raises(AssertionError):
        assert_product(y, activation64(x, activation), decode64(weight), bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_rotated_input_is_rounded_to_its_dtype(dtype: torch.dtype) -> None:
    x, weight = torch.randn(M, K).to(dtype), rotated(torch.randn(N, K).to(dtype), "mxfp4", "mxfp4")
    y = F.linear(x, weight)
    assert y.dtype == dtype
    assert_product(y, activation64(hadamard(x, 32).to(dtype), "mxfp4"), decode64(weight))


def test_weight_only_computes_with_the_original_values() -> None:
    x, weight = torch.randn(M, K, dtype=torch.float64), rotated(torch.randn(N, K, dtype=torch.float64), "mxfp4")
    torch.testing.assert_close(F.linear(x, weight), x @ weight.dequantize().t())


@pytest.mark.parametrize("bias", [False, True])
def test_dgrad_rotates_the_result_back(bias: bool) -> None:
    x, b = torch.randn(M, N, dtype=torch.float64), torch.randn(K, dtype=torch.float64)
    weight = rotated(torch.randn(N, K, dtype=torch.float64), "mxfp4", "mxfp4")
    y = torch.addmm(b, x, weight) if bias else x @ weight
    expected = x @ weight.dequantize() + (b if bias else 0)
    torch.testing.assert_close(y, expected)
    assert not torch.allclose(y, x @ decode64(weight) + (b if bias else 0), atol=0.1)


@pytest.mark.parametrize("rows", [None, torch.tensor([3, 0, 2, 2, 1])])
def test_a_grouped_product_rotates_its_input(rows: Tensor | None) -> None:
    """Stacks: each group by its own matrix, a row that goes to two of them rotated all the same."""
    stack = rotated(torch.randn(3, N, K, dtype=torch.float64), "mxfp4")
    x = torch.randn(5 if rows is None else 4, K, dtype=torch.float64)
    offsets, bias = torch.tensor([2, 2, 5], dtype=torch.int32), torch.randn(3, N, dtype=torch.float64)
    y = grouped_product(x, stack, -1, Groups(offsets, rows), bias)
    w, x = stack.dequantize(), x if rows is None else x[rows]
    expected = torch.cat([x[:2] @ w[0].t() + bias[0], x[2:] @ w[2].t() + bias[2]])
    torch.testing.assert_close(y, expected)


def test_the_gradient_of_the_input() -> None:
    x = torch.randn(M, K, dtype=torch.float64, requires_grad=True)
    weight = rotated(torch.randn(N, K, dtype=torch.float64), "mxfp4")
    assert torch.autograd.gradcheck(lambda x: F.linear(x, weight), x)


def test_compiled_and_exported_compute_the_same() -> None:
    linear = nn.Linear(K, N)
    quantize_(linear, {"linear": {"weight": "mxfp4", "rotation": 32}})
    x = torch.randn(M, K)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(linear, fullgraph=True)(x), linear(x))
    make = torch.compile(lambda w: quantize(w, "mxfp4", rotation=32), fullgraph=True)
    assert same_bytes(make(x), quantize(x, "mxfp4", rotation=32))
    taken = torch.compile(lambda w: w.dequantize(), fullgraph=True)(linear.weight)
    assert torch.equal(taken, linear.weight.dequantize())


def test_an_embedding_looks_up_original_values() -> None:
    model = nn.Sequential(nn.Embedding(20, 64))
    quantize_(model, {"0": {"weight": "mxfp4", "rotation": 32}})
    torch.testing.assert_close(model(torch.tensor([3, 4])), model[0].weight.dequantize()[3:5])


# Saving


def test_a_rotated_tensor_is_saved_and_loaded() -> None:
    weight = rotated(torch.randn(N, K), "mxfp4", "mxfp4")
    tensors, metadata = flatten_state_dict({"w": weight})
    assert json.loads(metadata["mxquant"])["tensors"]["w"]["rotation"] == 32
    loaded = unflatten_state_dict(tensors, metadata)["w"]
    assert isinstance(loaded, MXTensor)
    assert same_bytes(loaded, weight)
    assert torch.equal(loaded.dequantize(), weight.dequantize())
    without = {"mxquant": metadata["mxquant"].replace('"rotation": 32', '"rotation": null')}
    unrotated: Any = unflatten_state_dict(tensors, without)["w"]
    assert not torch.allclose(unrotated.dequantize(), weight.dequantize(), atol=0.1)


@pytest.mark.parametrize("rotation", ["64", "true", '"32"', "0"])
def test_a_damaged_rotation_is_refused(rotation: str) -> None:
    tensors, metadata = flatten_state_dict({"w": rotated(torch.randn(N, K), "mxfp4")})
    damaged = {"mxquant": metadata["mxquant"].replace('"rotation": 32', f'"rotation": {rotation}')}
    with pytest.raises(ValueError, match="rotation"):
        unflatten_state_dict(tensors, damaged)


def test_a_rotated_tensor_is_not_copied_joined_or_equal_to_an_unrotated_one() -> None:
    w = torch.randn(N, K)
    a, b = quantize(w, "mxfp4", rotation=32), quantize(hadamard(w, 32), "mxfp4")
    with pytest.raises(ValueError, match="rotation"):
        b.copy_(a)
    with pytest.raises(ValueError, match="rotation"):
        torch.cat([a, b])
    assert not torch.equal(a, b)
    assert torch.equal(torch.cat([a, a]).dequantize(), torch.cat([a.dequantize()] * 2))


# Views


def test_slices_at_block_borders_decode_to_slices() -> None:
    weight = rotated(torch.randn(N, K), "mxfp4")
    assert torch.equal(weight[:, 32:].dequantize(), weight.dequantize()[:, 32:])
    assert torch.equal(weight[2:5].t().dequantize(), weight.dequantize()[2:5].t())


@pytest.mark.parametrize("cut", [slice(0, 40), slice(16, 48)])
def test_slices_off_a_border_are_refused(cut: slice) -> None:
    weight = rotated(torch.randn(N, K), "mxfp4")
    with pytest.raises(ValueError, match="multiple"):
        weight[:, cut]


# Models


def test_a_model_rotated_computes_what_its_dequantized_self_does() -> None:
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32)).double()
    quantize_(model, {"linear": {"weight": "mxfp4", "activation": None, "rotation": 32}})
    x = torch.randn(5, 64, dtype=torch.float64)
    y = model(x)
    assert "W4A16, rotation 32" in str(summary(model))
    assert "rotation=32" in repr(model[0].weight)
    ordinary = copy.deepcopy(model)
    dequantize_(ordinary)
    torch.testing.assert_close(y, ordinary(x))


def test_a_width_that_is_no_multiple_is_refused_before_anything_changes() -> None:
    model = nn.Sequential(nn.Linear(64, 40), nn.Linear(40, 8))
    with pytest.raises(ValueError, match=r"1\.weight \(8, 40\): rotation=32 needs .* multiple of 32 .* has 40"):
        quantize_(model, {"linear": {"weight": "mxfp4", "rotation": 32}})
    assert not isinstance(model[0].weight, MXTensor)


def test_a_weight_that_would_overflow_is_refused() -> None:
    model = nn.Linear(64, 8)
    nn.init.constant_(model.weight, 1e38)
    quantize_(copy.deepcopy(model), "mxfp4")
    with pytest.raises(ValueError, match="rotated"):
        quantize_(model, {"linear": {"weight": "mxfp4", "rotation": 32}})


@pytest.mark.parametrize("rotation", [16, 64, True, "32"])
def test_a_rotation_of_another_size_than_the_block_is_refused(rotation: Any) -> None:
    with pytest.raises(ValueError, match="32, the size of its block"):
        quantize(torch.randn(64), "mxfp4", rotation=rotation)
    with pytest.raises(ValueError, match="32, the size of its block"):
        quantize_(nn.Linear(64, 64), {"linear": {"weight": "mxfp4", "rotation": rotation}})
