"""The fixup: rows out of range are found among others and recomputed exactly."""

import pytest
import torch
from matmul_reference import assert_product

from kernels.mxfp4_sm90.packed_weights import packed_weight, random_weight
from kernels.mxfp4_sm90.rescaled_rows import decoded
from mxquant.kernels.mxfp4_sm90 import exact_fallback
from mxquant.kernels.mxfp4_sm90.activation import rescale_activation
from mxquant.kernels.mxfp4_sm90.exact_fallback import fixup, grouped_fixup
from mxquant.reference.rescale import Prologue

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("mode", ["even", None])
@pytest.mark.parametrize("count", [1, 33, 520])
def test_any_number_of_rows(count: int, mode: str | None, device: torch.device) -> None:
    """One, one more than are recomputed at a time, and all of them; with a bias. The other rows stay as they are."""
    m, n, k = 520, 64, 320
    packed, w64 = random_weight(1, n, k)
    out_of_range = torch.zeros(m, dtype=torch.bool)
    out_of_range[torch.randperm(m)[:count]] = True
    x, bias = torch.randn(m, k), torch.randn(n)
    x[out_of_range, :32] *= 2.0**-60
    x[out_of_range, 40] = 2.0**-90
    x = x.bfloat16()
    _, scale, _ = rescale_activation(x.to(device), Prologue(mode), permute=True)
    assert torch.equal(scale.isnan()[:, 0].cpu(), out_of_range)
    y = torch.full((m, n), 7.0, device=device)
    fixup(y, x.to(device), *(t[0].to(device) for t in packed), bias.to(device), scale, mode)
    x64 = x.double() if mode is None else decoded(x, mode)
    assert_product(y[out_of_range].cpu(), x64[out_of_range], w64[0], bias)
    assert (y[~out_of_range] == 7).all()
    with pytest.raises(AssertionError):  # the control: without the bias
        assert_product(y[out_of_range].cpu(), x64[out_of_range], w64[0], None)


@pytest.mark.parametrize("mode", ["even", None])
def test_rows_of_two_programs(mode: str | None, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two programs write a weight's five tiles; another two look at the one row beyond. No other row is read."""
    monkeypatch.setattr(exact_fallback, "multiprocessors", lambda device: 2)
    per_program = exact_fallback.ROWS_PER_PROGRAM.value
    m, n, k = per_program + 1, 320, 288
    packed, w64 = random_weight(n, k)
    out_of_range = torch.tensor([0, per_program - 1, per_program])
    x = torch.full((m, k), torch.nan, dtype=torch.bfloat16)
    x[out_of_range] = torch.randn(3, k).bfloat16()
    scale = torch.ones(m, 1)
    scale[out_of_range] = torch.nan
    y = torch.full((m, n), 7.0, device=device)
    fixup(y, x.to(device), *(t.to(device) for t in packed), None, scale.to(device), mode)
    x64 = x[out_of_range].double() if mode is None else decoded(x[out_of_range], mode)
    assert_product(y[out_of_range].cpu(), x64, w64)
    others = torch.ones(m, dtype=torch.bool)
    others[out_of_range] = False
    assert (y.cpu()[others] == 7).all()
    with pytest.raises(AssertionError):  # the control: rows exchanged
        assert_product(y[out_of_range].cpu(), x64.roll(1, 0), w64)


@pytest.mark.parametrize("columns", [416, 512])
def test_sums_are_nearly_exact(columns: int, device: torch.device) -> None:
    """Of a wide weight with zero blocks, subnormal rows and a zero row; NaN and Inf give NaN."""
    w = torch.randn(128, columns)
    w *= torch.exp2(torch.randint(-7, 7, (128, columns // 32)).float()).repeat_interleave(32, 1)
    w[:5, 32:64] = 0
    w[9] = 0
    w[70] *= 2.0**-110
    packed, w64 = packed_weight(w)
    x, bias = torch.randn(3, columns), torch.randn(128)
    x[0, :32] *= 2.0**-40
    x[1, 40], x[2, 3] = torch.nan, torch.inf
    x = x.bfloat16()
    _, scales, _ = rescale_activation(x.to(device), Prologue("even"), permute=False)
    assert scales.isnan().all()
    y = torch.empty(3, 128, device=device)
    fixup(y, x.to(device), *(t.to(device) for t in packed), bias.to(device), scales, "even")
    x64 = decoded(x[:1])
    # 16 exact block sums, each scaled and added in fp32, and the bias.
    bound = 24 * 2.0**-24 * (x64.abs() @ w64.abs().mT + bias.abs()) + 1e-30
    assert ((y[:1].cpu().double() - (x64 @ w64.mT + bias)).abs() <= bound).all()
    assert y[1:].isnan().all()


@pytest.mark.parametrize("mode", ["even", None])
def test_subnormal_activations(mode: str | None, device: torch.device) -> None:
    """Times a weight so large that the product shows them."""
    packed, w64 = packed_weight(torch.randn(64, 288) * 2.0**100)
    x = (torch.randint(1, 128, (3, 288)).double() * 2.0**-133).bfloat16()
    y = torch.zeros(3, 64, device=device)
    scale = torch.full((3, 1), torch.nan, device=device)
    fixup(y, x.to(device), *(t.to(device) for t in packed), None, scale, mode)
    x64 = x.double() if mode is None else decoded(x, mode)
    assert_product(y.cpu(), x64, w64)
    with pytest.raises(AssertionError):  # the control: as if they were zeros
        assert_product(torch.zeros(3, 64), x64, w64)


@pytest.mark.parametrize("mode", ["even", None])
@pytest.mark.parametrize("gathered", [True, False])
def test_rows_of_groups(gathered: bool, mode: str | None, device: torch.device) -> None:
    """A row out of range in two of three groups; one has no rows. Rows of no group become zero; the rest stays."""
    experts, n, k = 3, 64, 320
    packed, w64 = random_weight(experts, n, k)
    offsets, sorted_rows = [20, 20, 50], 70
    rows = torch.randint(0, 30, (sorted_rows,)) if gathered else torch.arange(sorted_rows)
    x = torch.randn(30 if gathered else sorted_rows, k)
    out_of_range = [rows[3], rows[45]]
    for row in out_of_range:
        x[row, :32] *= 2.0**-60
        x[row, 40] = 2.0**-90
    x, bias = x.bfloat16(), torch.randn(experts, n)
    _, scale, _ = rescale_activation(x.to(device), Prologue(mode), permute=True)
    y = torch.full((sorted_rows, n), 7.0, device=device)
    given = [t.to(device) for t in (*packed, bias, torch.tensor(offsets, dtype=torch.int32))]
    grouped_fixup(y, x.to(device), *given, rows.to(device) if gathered else None, scale[rows.to(device)], mode)
    x64 = x.double() if mode is None else decoded(x, mode)
    for i in range(sorted_rows):
        if i >= offsets[-1]:
            assert not y[i].any()
        elif any(rows[i] == row for row in out_of_range):
            group = 0 if i < offsets[0] else 2
            assert_product(y[i : i + 1].cpu(), x64[rows[i]][None], w64[group], bias[group])
            with pytest.raises(AssertionError):
                assert_product(y[i : i + 1].cpu(), x64[rows[i]][None], w64[1], bias[1])
        else:
            assert torch.equal(y[i].cpu(), torch.full((n,), 7.0))
