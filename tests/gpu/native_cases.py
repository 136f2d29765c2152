"""The backends under test, each with what it is asked to compute, and the judgement of its products in float64.

A test parametrized over `CASES` or a part of it takes a new backend by one more line here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from matmul_reference import ACTIVATIONS, FORMATS, activation64, assert_product, decode64
from torch import Tensor, nn

from mxquant import MXTensor, list_backends, quantize
from mxquant.tensor import as_weight

needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


class Case(NamedTuple):
    """A backend, and the pair of formats that it is given."""

    backend: str
    format: str
    activation: str | None
    shapes: tuple[tuple[int, int], ...]
    """Weight shapes (N, K) that it takes: the first is the one to use where the shape does not matter."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.shapes[0]

    @property
    def has_factors(self) -> bool:
        """Whether a product is multiplied with scales after the sum, which rounds once more."""
        return "nvfp4" in (self.format, self.activation) or (self.activation or "").startswith("fp8")

    @property
    def is_tiled(self) -> bool:
        """Whether it has kernels of its own for the product, which take whole tiles only."""
        return self.shapes is TILED_SHAPES

    def weight(self, w: Tensor, backend: str | None = None) -> MXTensor:
        """`w` quantized, as this backend's weight, or that of another; an error if the backend does not take it."""
        return as_weight(quantize(w, self.format).with_activation(self.activation), backend or self.backend)

    def check(self, y: Tensor, x: Tensor, weight: MXTensor, bias: Tensor | None = None) -> None:
        """`y` is what float64 gives for the decoded operands, within `assert_product`'s bounds."""
        assert_product(y, activation64(x, self.activation), decode64(weight.canonical()), bias)

    def model(self, device: torch.device) -> nn.Sequential:
        """Two bf16 layers of this backend's weights, with biases: K to 512, ReLU, 512 to N."""
        n, k = self.shape
        layers = [nn.Linear(k, 512), nn.Linear(512, n)]
        for layer in layers:
            layer.to(device, torch.bfloat16)
            layer.weight = nn.Parameter(self.weight(layer.weight.detach()), requires_grad=False)
        return nn.Sequential(layers[0], nn.ReLU(), layers[1])


# Of N, K in {16, 24, 40, 96, 130, 176, 232, 640, 2880, 5120} every one is there once as N and once as K: partial
# blocks and tiles, rows of an odd number of bytes, and widths of real layers.
ANY_SHAPE = (
    (130, 232), (16, 2880), (24, 130), (40, 96), (96, 5120), (176, 640), (232, 40), (640, 24), (2880, 16), (5120, 176),
)  # fmt: skip
# Multiples of 64 and of 32 from 256 on: one tile, few and many, K split among programs or not, with and without a rest
# of 256 columns; 640, 2880 and 5120 are among them.
TILED_SHAPES = ((256, 768), (64, 256), (640, 5120), (2880, 512), (5120, 256), (128, 2880), (192, 416))


def _case(backend: str, format: str, activation: str | None, shapes: tuple[tuple[int, int], ...]) -> Any:
    needs_hopper = shapes is TILED_SHAPES
    reason = ""
    if backend not in list_backends():
        reason = f"this version has no backend {backend}"
    elif needs_hopper and (not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0)):
        reason = "needs a Hopper GPU"
    case = Case(backend, format, activation, shapes)
    name = "-".join((backend, format, activation or "unquantized"))
    return pytest.param(case, id=name, marks=pytest.mark.skipif(bool(reason), reason=reason))


TENSOR_CORE_CASES = [
    _case("fp8", "mxfp4", "mxfp4", TILED_SHAPES),
    _case("fp16", "mxfp4", None, TILED_SHAPES),
]
"""Backends with kernels of their own for the product."""

# Each activation once, each format at least once: weights and activations are decoded by separate kernels, so that no
# pair is special. `test_products.test_every_pair_of_formats` has all pairs.
TRITON_CASES = [
    _case("triton", FORMATS[index % len(FORMATS)], activation, ANY_SHAPE)
    for index, activation in enumerate(ACTIVATIONS)
]
EMULATION_CASES = [
    _case("emulation", format, activation, ANY_SHAPE)
    for format, activation in (("mxfp4", "mxfp4"), ("nvfp4", "nvfp4"), ("mxfp6_e2m3", None))
]
CASES = [*TENSOR_CORE_CASES, *TRITON_CASES]
ONE_CASE_A_PATH = [*TENSOR_CORE_CASES, *TRITON_CASES[:2], TRITON_CASES[6], TRITON_CASES[7], *EMULATION_CASES]
"""For what does not depend on the format: MX and row-scaled activations, with and without factors after the sum."""
