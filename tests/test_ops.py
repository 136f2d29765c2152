"""The choice between a kernel and its torch twin. That both give the same bytes is for tests/kernels and tests/gpu."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mxquant import formats, ops
from mxquant.formats import FORMATS, WEIGHT_FORMATS
from mxquant.kernels import has_triton
from mxquant.reference.gated_activation import GatedActivation
from mxquant.reference.hadamard import hadamard

needs_triton = pytest.mark.skipif(not has_triton(), reason="needs triton")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_blocks_are_rotated_before_they_are_quantized(name: str, dtype: torch.dtype) -> None:
    fmt, x = FORMATS[name], torch.randn(5, 96).to(dtype)
    given = {"per_tensor_scale": torch.tensor(0.01)} if fmt.per_tensor else {}
    found = ops.quantize_blocks(x, fmt, "even", rotation=fmt.block_size, **given)
    expected = formats.quantize_blocks(hadamard(x, fmt.block_size or 0), fmt, "even", **given)
    assert all(map(torch.equal, found, expected))
    assert not torch.equal(found[0], ops.quantize_blocks(x, fmt, "even", **given)[0])


def test_which_tensors_are_traced() -> None:
    with FakeTensorMode():
        fake = torch.empty(3)
    plain = torch.empty(3)
    assert ops.is_traced(plain, fake)
    assert ops.is_traced(torch.empty(3, device="meta"))
    assert not ops.is_traced(plain, torch.nn.Parameter(plain), None)


def test_gradients_go_through_an_expert_block() -> None:
    y, weights = torch.randn(6, 8, requires_grad=True), torch.rand(3, 2, requires_grad=True)
    routing = ops.route(torch.tensor([[0, 1], [1, 7], [3, 0]]), 4)
    ops.combine(
        ops.gated_activation(y.repeat(1, 2), GatedActivation(False)), routing, weights, torch.float32
    ).sum().backward()
    assert y.grad is not None
    assert (weights.grad[1, 1], weights.grad[0, 0] != 0) == (0, True)  # id 7 belongs to no expert here


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.uint8])
def test_narrow_ids_do_not_wrap(dtype: torch.dtype) -> None:
    routing = ops.route(torch.tensor([[100, 3]], dtype=dtype), 300)
    assert routing.offsets_E[-1] == 2
    assert routing.order_S.tolist() == [1, 0]


@needs_triton
def test_a_kernel_declines_what_it_does_not_list() -> None:
    from mxquant.kernels.moe import gated_activation, routing
    from mxquant.kernels.quantize import hadamard

    bf16, x = torch.bfloat16, torch.randn(4, 8)
    assert hadamard.reject(32, bf16, torch.float32) is None
    assert hadamard.reject(64, bf16, bf16) == "has no kernel for a rotation of size 64, only for 16, 32"
    assert "float64" in str(hadamard.reject(32, bf16, torch.float64))
    for reject in (gated_activation.reject, routing.reject_combine):
        assert reject(x) is None
        assert "contiguous" in str(reject(x.t()))
        assert "float64" in str(reject(x.double()))
    assert "one pair at least" in str(routing.reject_combine(x[:0]))
