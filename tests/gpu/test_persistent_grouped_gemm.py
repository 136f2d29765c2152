"""The persistent kernel on groups (`mxquant.kernels.mxfp4_sm90.persistent_grouped_gemm`), called directly."""

from typing import Any

import pytest
import torch
from matmul_reference import activation64, assert_product, decode64
from native_cases import needs_gpu
from poison import POISONS, poisoned_workspaces
from torch import Tensor

from mxquant import MXTensor, quantize
from mxquant.backends import Groups
from mxquant.reference.rescale import Prologue
from mxquant.tensor import as_weight, grouped_product

pytestmark = [
    *needs_gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]

MODES = pytest.mark.parametrize("mode", ["even", None], ids=["fp8", "fp16"])
ROWS = pytest.mark.parametrize("rows", [32, 64, 128])
# N, whole and in part of a program's 256, and K: with every tail that the kernel takes.
SIZES = [(256, 256), (320, 512), (64, 320), (192, 384), (512, 448), (320, 2880)]
# Rows of each group, and how many belong to none: a tile's rows, one more, one fewer; empty ones; all in one; none.
GROUPINGS = [([31, 0, 129, 64, 1, 0], 7), ([128, 65, 63, 32], 0), ([0, 300, 0], 0), ([1], 0), ([0, 0, 0, 0], 50),
             ([3] * 100, 5)]  # fmt: skip


def stack(experts: int, n: int, k: int, mode: str | None, device: torch.device) -> MXTensor:
    w = torch.randn(experts, n, k, device=device).bfloat16()
    weights = as_weight(quantize(w, "mxfp4").with_activation(mode and "mxfp4"))
    assert weights.metadata.layout == "mxfp4_tiles"
    return weights


def groups_of(sizes: list[int], beyond: int, gathered_from: int | None, device: torch.device) -> Groups:
    offsets = torch.tensor(sizes, device=device).cumsum(0).int()
    places = sum(sizes) + beyond
    rows = None if gathered_from is None else torch.randint(0, gathered_from, (places,), device=device)
    return Groups(offsets, rows)


def multiply(x: Tensor, weights: MXTensor, bias: Tensor | None, groups: Groups, mode: str | None) -> Tensor:
    from mxquant.kernels.mxfp4_sm90.persistent_grouped_gemm import persistent_grouped_gemm

    n, prologue = weights.shape[1], Prologue(mode)
    return persistent_grouped_gemm(x, weights.qdata, weights.scale, bias, *groups, n, prologue, torch.bfloat16)


def check(y: Tensor, x: Tensor, weights: MXTensor, bias: Tensor | None, groups: Groups, mode: str | None) -> None:
    """Each group against its own matrix; rows of no expert are zero."""
    w64, x64 = decode64(weights.canonical()), activation64(x, mode and "mxfp4")
    for expert, places in groups.on_host():
        assert_product(y[places], groups.pick(x64, places), w64[expert], None if bias is None else bias[expert])
    assert y.shape[0] == groups.count(x)
    assert not y[int(groups.offsets[-1]) :].any()


def rolled(weights: MXTensor) -> MXTensor:
    """Each matrix in the next one's place."""
    return weights.rewrap(weights.operand.map(lambda t: t.roll(1, 0)))


@pytest.fixture
def with_rows(monkeypatch: pytest.MonkeyPatch, rows: int) -> int:
    """So many rows in a tile, whatever the groups."""
    from mxquant.kernels.mxfp4_sm90 import persistent_grouped_gemm

    monkeypatch.setattr(persistent_grouped_gemm, "_group_block_m", lambda mean_rows, fp16: rows)
    return rows


@MODES
@ROWS
@pytest.mark.usefixtures("with_rows")
@pytest.mark.parametrize("gathered", [True, False], ids=["gathered", "sorted"])
def test_every_grouping(gathered: bool, mode: str | None, device: torch.device) -> None:
    """Of every size, with memory poisoned, with a bias and without."""
    for index, (n, k) in enumerate(SIZES):
        sizes, beyond = GROUPINGS[index]
        weights = stack(len(sizes), n, k, mode, device)
        groups = groups_of(sizes, beyond, 40 if gathered else None, device)
        x = torch.randn(40 if gathered else sum(sizes) + beyond, k, device=device).bfloat16()
        bias = (k / 32 * torch.randn(len(sizes), n, device=device)).bfloat16()
        with poisoned_workspaces(POISONS[index % 2]):
            y = multiply(x, weights, None, groups, mode)
            with_bias = multiply(x, weights, bias, groups, mode)
        check(y, x, weights, None, groups, mode)
        check(with_bias, x, weights, bias, groups, mode)
        if any(sizes):
            with pytest.raises(AssertionError):
                check(y, x, weights, bias, groups, mode)
        if len(sizes) > 1 and any(sizes):
            with pytest.raises(AssertionError):  # the control: matrices exchanged
                check(y, x, rolled(weights), None, groups, mode)


@pytest.mark.sanitize
@MODES
@ROWS
@pytest.mark.usefixtures("with_rows")
def test_rows_out_of_range(mode: str | None, device: torch.device) -> None:
    """In several groups, one after the other and far between, with the bias once."""
    sizes = [20, 3, 0, 150, 90]
    weights = stack(5, 320, 448, mode, device)
    x = torch.randn(60, 448, device=device)
    x[::7, :32] *= 2.0**-60
    x[::7, 40] = 2.0**-90
    x = x.bfloat16()
    bias = torch.randn(5, 320, device=device).bfloat16()
    groups = groups_of(sizes, 9, 60, device)
    check(multiply(x, weights, bias, groups, mode), x, weights, bias, groups, mode)
    assert groups.rows is not None
    x[3] = torch.nan
    y = multiply(x, weights, bias, groups, mode)[: sum(sizes)]
    assert torch.equal(y.isnan().all(1), groups.rows[: sum(sizes)] == 3)


@MODES
def test_results_are_deterministic_and_those_of_the_split_k_kernel(mode: str | None, device: torch.device) -> None:
    """At the sizes of gpt-oss. Both kernels are within the bounds."""
    from mxquant.kernels.mxfp4_sm90.grouped_gemm import grouped_gemm

    weights = stack(16, 2880, 2880, mode, device)
    ids = torch.randint(0, 16, (1200,), device=device)
    groups = groups_of(torch.bincount(ids, minlength=16).tolist(), 0, 300, device)
    x = torch.randn(300, 2880, device=device).bfloat16()
    first = multiply(x, weights, None, groups, mode)
    for _ in range(20):
        assert torch.equal(multiply(x, weights, None, groups, mode), first)
    given = (x, weights.qdata, weights.scale, None, *groups, 2880, Prologue(mode), torch.bfloat16)
    check(first, x, weights, None, groups, mode)
    check(grouped_gemm(*given), x, weights, None, groups, mode)


@pytest.mark.parametrize("activation", ["mxfp4", None])
def test_backends_choose_it_for_many_rows_a_group(
    activation: str | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mxquant.kernels.mxfp4_sm90 import persistent_grouped_gemm

    used = []
    original = persistent_grouped_gemm.persistent_grouped_gemm

    def noting(x: Tensor, *arguments: Any, **options: Any) -> Tensor:
        used.append(x.shape[0])
        return original(x, *arguments, **options)

    monkeypatch.setattr(persistent_grouped_gemm, "persistent_grouped_gemm", noting)
    # Of 6,656 weight rows there are 104 tiles for the 132 multiprocessors of an H200, of 64 there are 4.
    for n, k, rows, chosen in (
        (6656, 320, 400, True),
        (6656, 320, 8, False),
        (6656, 288, 400, False),
        (64, 320, 400, False),
    ):
        weights = stack(4, n, k, activation and "even", device)
        x = torch.randn(rows, k, device=device).bfloat16()
        groups = groups_of([rows // 4] * 4, 0, None, device)
        used.clear()
        y = grouped_product(x, weights, -1, groups)
        assert used == ([rows] if chosen else [])
        check(y, x, weights, None, groups, activation and "even")
