"""The persistent kernel (`mxquant.kernels.mxfp4_sm90.persistent_gemm`), called directly.

Backends choose it only where the result has work for most of a GPU, with larger weights than most tests need.
"""

from typing import Any

import pytest
import torch
from matmul_reference import DATA, activation64, assert_product, operands
from native_cases import needs_gpu
from poison import POISONS, poisoned_workspaces
from torch import Tensor

from mxquant import quantize
from mxquant.formats import FORMATS, dequantize_blocks, quantize_blocks
from mxquant.kernels.mxfp4_sm90.layout import pack_weight
from mxquant.reference.rescale import Prologue
from mxquant.tensor import as_weight

pytestmark = [
    *needs_gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]

MXFP4 = FORMATS["mxfp4"]
MODES = pytest.mark.parametrize("mode", ["even", None], ids=["fp8", "fp16"])
# One tile of the result, in part outside; some, whole and split; more than programs, the last wave split.
SHAPES = [(64, 256), (320, 512), (4096, 2048), (8192, 1024)]
# Tiles of 32, 64 and 128 rows, in part outside; several of those.
ROWS = [1, 31, 32, 33, 64, 65, 127, 128, 129, 300, 1000]


def multiply(x: Tensor, packed: tuple[Tensor, Tensor], bias: Tensor | None, n: int, mode: str | None) -> Tensor:
    from mxquant.kernels.mxfp4_sm90.persistent_gemm import persistent_gemm

    return persistent_gemm(x, *packed, bias, n, Prologue(mode), torch.bfloat16)


def packed_weight(w: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """w_packed and w_scale, and the values in float64."""
    codes = quantize_blocks(w, MXFP4)
    packed = pack_weight(*codes)
    assert packed is not None
    return packed, dequantize_blocks(*codes, MXFP4, w.shape[1], dtype=torch.float64)


def check(y: Tensor, x: Tensor, w64: Tensor, bias: Tensor | None, mode: str | None) -> None:
    assert_product(y, activation64(x, mode and "mxfp4"), w64, bias)


@MODES
@pytest.mark.parametrize("n, k", SHAPES)
@pytest.mark.parametrize("poison", POISONS)
def test_every_tile(n: int, k: int, mode: str | None, poison: float, device: torch.device) -> None:
    """Also amid poison: partial sums are all written before they are reduced."""
    packed, w64 = packed_weight(torch.randn(n, k, device=device).bfloat16())
    bias = torch.randn(n, device=device).bfloat16()
    for rows in ROWS:
        x = torch.randn(rows, k, device=device).bfloat16()
        with poisoned_workspaces(poison):
            y = multiply(x, packed, None, n, mode)
            with_bias = multiply(x, packed, bias, n, mode)
        check(y, x, w64, None, mode)
        check(with_bias, x, w64, bias, mode)
        with pytest.raises(AssertionError):
            check(y, x, w64, bias, mode)


@MODES
@pytest.mark.parametrize("kind", DATA)
def test_every_kind_of_data(kind: str, mode: str | None, device: torch.device) -> None:
    if mode and kind == "heavy_tailed":
        pytest.skip("has a bound of its own: test_tensor_cores.test_where_single_products_rule")
    for rows in (20, 60, 200):
        x, w = (t.bfloat16().to(device) for t in operands(kind, rows, 768, 320))
        packed, w64 = packed_weight(w)
        check(multiply(x, packed, None, 320, mode), x, w64, None, mode)


@pytest.mark.sanitize
@MODES
def test_rows_out_of_range(mode: str | None, device: torch.device) -> None:
    """In whole tiles and in split ones, with the bias once."""
    x = torch.randn(300, 512, device=device)
    x[::7, :32] *= 2.0**-60
    x[3] = torch.nan
    x[200, 5] = torch.inf
    x = x.bfloat16()
    packed, w64 = packed_weight(torch.randn(320, 512, device=device).bfloat16())
    bias = torch.randn(320, device=device).bfloat16()
    y = multiply(x, packed, bias, 320, mode)
    finite = [row for row in range(300) if row not in (3, 200)]
    check(y[finite], x[finite], w64, bias, mode)
    assert not y[3].isfinite().any()
    assert not y[200].isfinite().all()


@MODES
def test_results_are_deterministic(mode: str | None, device: torch.device) -> None:
    """Splits are reduced in order, whichever program is first."""
    packed, _ = packed_weight(torch.randn(4096, 2048, device=device).bfloat16())
    x = torch.randn(300, 2048, device=device).bfloat16()
    first = multiply(x, packed, None, 4096, mode)
    for _ in range(20):
        assert torch.equal(multiply(x, packed, None, 4096, mode), first)


def test_a_skipped_quantization_is_noticed(device: torch.device) -> None:
    packed, w64 = packed_weight(torch.randn(320, 512, device=device).bfloat16())
    x = torch.randn(100, 512, device=device).bfloat16()
    with pytest.raises(AssertionError):
        check(multiply(x, packed, None, 320, None), x, w64, None, "even")


@pytest.mark.parametrize("activation", ["mxfp4", None])
def test_backends_choose_it_where_it_keeps_the_gpu_busy(
    activation: str | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By shape alone: K of whole steps, and tiles of the result for three in four multiprocessors."""
    from mxquant.kernels.mxfp4_sm90 import persistent_gemm

    used = []
    original = persistent_gemm.persistent_gemm

    def noting(x: Tensor, *arguments: Any, **options: Any) -> Tensor:
        used.append(x.shape[0])
        return original(x, *arguments, **options)

    monkeypatch.setattr(persistent_gemm, "persistent_gemm", noting)
    busy = 3 * torch.cuda.get_device_properties(device).multi_processor_count // 4 + 1
    for n, k, rows, chosen in (
        (256 * busy, 256, 64, True), (256 * busy, 256, 8, False), (256 * busy, 288, 64, False), (256, 256, 64, False),
    ):  # fmt: skip
        w = torch.randn(n, k, device=device).bfloat16()
        weight = as_weight(quantize(w, "mxfp4").with_activation(activation))
        x = torch.randn(rows, k, device=device).bfloat16()
        used.clear()
        y = torch.nn.functional.linear(x, weight)
        assert used == ([rows] if chosen else [])
        codes = weight.canonical()
        w64 = dequantize_blocks(codes.qdata, codes.scale, MXFP4, k, dtype=torch.float64)
        check(y, x, w64, None, activation and "even")
