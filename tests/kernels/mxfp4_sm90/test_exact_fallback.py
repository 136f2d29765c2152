"""Rows that did not fold, picked from among many and recomputed."""

import pytest
import torch
from matmul_reference import assert_product

from kernels.mxfp4_sm90.packed_weights import weight
from kernels.mxfp4_sm90.rescaled_rows import MXFP4, decoded
from mxquant.formats import dequantize_blocks, quantize_blocks
from mxquant.kernels.mxfp4_sm90 import exact_fallback as exact_rows
from mxquant.kernels.mxfp4_sm90.activation_fp8 import fold_input
from mxquant.kernels.mxfp4_sm90.dequantize import repair
from mxquant.kernels.mxfp4_sm90.layout import pack_tiles

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("mode", ["even", None])
@pytest.mark.parametrize("count", [1, 33, 520])
def test_however_many_they_are(count: int, mode: str | None, device: torch.device) -> None:
    """One, one more than are recomputed at a time, and all, the last time fewer than that."""
    m, n, k = 520, 64, 320
    tiles, w64 = weight(1, n, k)
    unfit = torch.zeros(m, dtype=torch.bool)
    unfit[torch.randperm(m)[:count]] = True
    x, bias = torch.randn(m, k), torch.randn(n)
    x[unfit, :32] *= 2.0**-60
    x[unfit, 40] = 2.0**-90
    x = x.bfloat16()
    _, scale, _ = fold_input(x.to(device), mode, permute=True)
    assert torch.equal(scale.isnan()[:, 0].cpu(), unfit)
    y = torch.full((m, n), 7.0, device=device)
    repair(y, x.to(device), *(t[0].to(device) for t in tiles), bias.to(device), scale, mode)
    x64 = x.double() if mode is None else decoded(x, mode)
    assert_product(y[unfit].cpu(), x64[unfit], w64[0], bias)
    assert (y[~unfit] == 7).all()
    with pytest.raises(AssertionError):  # the control: without the bias
        assert_product(y[unfit].cpu(), x64[unfit], w64[0], None)


@pytest.mark.parametrize("mode", ["even", None])
def test_on_both_sides_of_what_a_program_looks_at(
    mode: str | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two programs write a weight's five tiles; another two look at the one row beyond. No other row is read."""
    monkeypatch.setattr(exact_rows, "multiprocessors", lambda device: 2)
    looked_at = exact_rows.LOOKED_AT.value
    m, n, k = looked_at + 1, 320, 288
    tiles, w64 = weight(n, k)
    unfit = torch.tensor([0, looked_at - 1, looked_at])
    x = torch.full((m, k), torch.nan, dtype=torch.bfloat16)
    x[unfit] = torch.randn(3, k).bfloat16()
    scale = torch.ones(m, 1)
    scale[unfit] = torch.nan
    y = torch.full((m, n), 7.0, device=device)
    repair(y, x.to(device), *(t.to(device) for t in tiles), None, scale.to(device), mode)
    x64 = x[unfit].double() if mode is None else decoded(x[unfit], mode)
    assert_product(y[unfit].cpu(), x64, w64)
    others = torch.ones(m, dtype=torch.bool)
    others[unfit] = False
    assert (y.cpu()[others] == 7).all()
    with pytest.raises(AssertionError):  # the control: rows exchanged
        assert_product(y[unfit].cpu(), x64.roll(1, 0), w64)


@pytest.mark.parametrize("mode", ["even", None])
def test_subnormal_activations(mode: str | None, device: torch.device) -> None:
    """Times a weight large enough that the product shows them."""
    codes = quantize_blocks(torch.randn(64, 288) * 2.0**100, MXFP4)
    tiles, w64 = pack_tiles(*codes), dequantize_blocks(*codes, MXFP4, 288, dtype=torch.float64)
    assert tiles is not None
    x = (torch.randint(1, 128, (3, 288)).double() * 2.0**-133).bfloat16()
    y = torch.zeros(3, 64, device=device)
    scale = torch.full((3, 1), torch.nan, device=device)
    repair(y, x.to(device), *(t.to(device) for t in tiles), None, scale, mode)
    x64 = x.double() if mode is None else decoded(x, mode)
    assert_product(y.cpu(), x64, w64)
    with pytest.raises(AssertionError):  # the control: as if they were zeros
        assert_product(torch.zeros(3, 64), x64, w64)
