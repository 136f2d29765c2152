"""`sqnr_db` against its definition in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mxquant import MXTensor, quantize
from mxquant.tensor import sqnr
from mxquant.tensor.sqnr import sqnr_db


def definition(x: Tensor, y: Tensor) -> float:
    x, y = (t.dequantize(torch.float32) if isinstance(t, MXTensor) else t for t in (x, y))
    return 20 * math.log10(x.double().norm() / (x.double() - y.double()).norm())


@pytest.mark.parametrize("rows_in_chunk", [1, 3, 100])
def test_sqnr_is_that_of_the_whole_tensor(rows_in_chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqnr, "_CHUNK_ELEMENTS", rows_in_chunk * 64)
    x = torch.randn(8, 64, dtype=torch.bfloat16)
    a, b = quantize(x, "mxfp4"), quantize(x, "mxfp6_e2m3")
    for reference, quantized in ((x, a), (b, a), (a, x), (x, x + 1)):
        assert sqnr_db(reference, quantized) == pytest.approx(definition(reference, quantized), abs=1e-9)


def test_equal_tensors_have_no_noise() -> None:
    x = torch.randn(3, 5)
    assert sqnr_db(x, x) == sqnr_db(x[:0], x[:0]) == sqnr_db(torch.zeros(2), torch.zeros(2)) == math.inf


def test_a_zero_reference_has_no_signal() -> None:
    assert sqnr_db(torch.zeros(2, 3), torch.ones(2, 3)) == -math.inf


def test_a_scalar() -> None:
    assert sqnr_db(torch.tensor(10.0), torch.tensor(9.0)) == pytest.approx(20)
