"""Rotated weights on every backend of a GPU: their inputs are rotated once, by the prologue or before it."""

import pytest
import torch
import torch.nn.functional as F
from matmul_reference import assert_product
from native_cases import needs_gpu
from torch import Tensor

from mxquant import MXTensor, explain, quantize
from mxquant.formats import FORMATS, dequantize_blocks, quantize_blocks
from mxquant.reference.hadamard import hadamard
from mxquant.tensor import as_weight

pytestmark = needs_gpu

MXFP4 = FORMATS["mxfp4"]


def on_grid(x: Tensor) -> Tensor:
    return dequantize_blocks(*quantize_blocks(x.cpu(), MXFP4), MXFP4, x.shape[1], dtype=torch.float64)


def weight(w: Tensor, activation: str | None, backend: str) -> MXTensor:
    return as_weight(quantize(w, "mxfp4", rotation=32).with_activation(activation), backend=backend)


@pytest.mark.parametrize("rows", [1, 17, 130, 600, 2100])
@pytest.mark.parametrize(
    "backend, activation",
    [("fp8", "mxfp4"), ("fp16", None), ("triton", "mxfp4"), ("triton", None), ("emulation", "mxfp4")],
)
def test_products_of_rotated_operands(backend: str, activation: str | None, rows: int, device: torch.device) -> None:
    """Rows in range and out of range."""
    w, x = torch.randn(2048, 512).bfloat16(), torch.randn(rows, 512).bfloat16()
    x[rows // 2, :32] *= 2.0**-60
    chosen = weight(w.to(device), activation, backend)
    assert explain(chosen).chosen == backend
    y = F.linear(x.to(device), chosen).cpu()
    x_rotated = hadamard(x, 32).bfloat16()
    x64 = x_rotated.double() if activation is None else on_grid(x_rotated)
    assert_product(y, x64, on_grid(hadamard(w, 32)), None)
    with pytest.raises(AssertionError):  # the control: an input that is not rotated
        assert_product(y, on_grid(x), on_grid(hadamard(w, 32)), None)
