"""Rows that did not fold, picked from among many and recomputed."""

import pytest
import torch
from matmul_reference import assert_product

from kernels.folded_rows import decoded
from kernels.tiled_weights import weight
from mxquant.kernels.fold import fold_input
from mxquant.kernels.tiled_expand import repair

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("mode", ["even", None])
@pytest.mark.parametrize("count", [1, 33, 520])
def test_however_many_they_are(count: int, mode: str | None, device: torch.device) -> None:
    """One, one more than are recomputed at a time, and all of more than a program looks after."""
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
