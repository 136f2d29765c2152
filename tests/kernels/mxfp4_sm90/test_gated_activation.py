"""Rows gated on the way into the fold, and the product of them, are those of the gate's own kernel, bit by bit."""

import dataclasses

import pytest
import torch
from poison import POISONS, amid_poison, poisoned_workspaces
from torch import Tensor

from kernels.mxfp4_sm90.packed_weights import weight
from mxquant.kernels.moe import gated_activation as gate_rows
from mxquant.kernels.moe.gated_activation import gated_activation
from mxquant.kernels.mxfp4_sm90 import activation_fp8 as fold
from mxquant.kernels.mxfp4_sm90.activation_fp8 import fold_input
from mxquant.kernels.mxfp4_sm90.grouped_gemm import multiply_groups
from mxquant.kernels.runtime.plan import Step
from mxquant.reference.gated_activation import GatedActivation
from mxquant.reference.hadamard import hadamard

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SILU, PAIRS = GatedActivation(False), GatedActivation(True)
OSS, CLAMPED = GatedActivation(True, 7.0, 1.702), GatedActivation(False, 0.5, 1.0)
CASES = [
    (SILU, "even", False),
    (SILU, None, False),
    (SILU, "floor", True),
    (PAIRS, "floor", True),
    (OSS, "even", False),
    (OSS, None, False),
    (CLAMPED, "even", False),
    (CLAMPED, None, False),
]
"""Gates; scale modes of MXFP4, or None for rows that are not quantized; and whether rows are rotated."""


def gates_and_ups(known: GatedActivation, columns: int) -> Tensor:
    """Eight rows: with a zero block, of zeros, beyond the clamp; 4 to 7 do not fold: values too far apart, NaN in a
    gate and in an up, and Inf, which a clamp brings down.
    """
    both = torch.randn(8, 2, columns)  # gates, ups
    both[1, :, :32] = 0
    both[2] = 0
    both[3] *= 6
    both[4, :, 32:64] *= 2.0**-60
    both[5, 0, 40], both[6, 1, 3] = torch.nan, torch.nan
    both[7, :, 9] = torch.inf
    rows = both.transpose(1, 2) if known.interleaved else both
    return rows.reshape(8, 2 * columns).bfloat16()


def same_values(ours: Tensor, expected: Tensor) -> bool:
    """Bit by bit, every NaN alike."""
    integer = torch.int16 if ours.element_size() == 2 else torch.int32
    pair = [t.float().masked_fill(t.isnan(), torch.nan).to(t.dtype).view(integer) for t in (ours, expected)]
    return torch.equal(*pair)


@pytest.mark.parametrize(
    "known, mode, rotated, columns, byte",
    [*((*case, 96, POISONS[0]) for case in CASES), (OSS, "even", True, 704, POISONS[1]), (PAIRS, None, False, 704, 0)],
    ids=str,
)
def test_gated_rows_are_those_of_the_gate_folded(
    known: GatedActivation, mode: str | None, rotated: bool, columns: int, byte: int, device: torch.device
) -> None:
    """Read from amid poison, in rows that lie apart. Of what is recomputed from, only rows that do not fold are
    written.
    """
    both = gates_and_ups(known, columns)
    gated = gated_activation(both.to(device), known)
    expected, scales, _ = fold_input(gated, mode, permute=True, rotated=rotated)
    with poisoned_workspaces(byte):
        given = amid_poison(both, byte).to(device)
        values, ours, before = fold_input(given, mode, permute=True, rotated=rotated, gate=known)
    unfit = scales.isnan().squeeze(1)
    assert unfit[4:7].all()
    assert bool(unfit[7]) is (known.limit is None)
    assert not unfit[:3].any()
    assert same_values(ours, scales)
    bits = torch.int16 if mode is None else torch.uint8
    assert torch.equal(values.view(bits)[~unfit], expected.view(bits)[~unfit])
    kept = hadamard(gated, 32).bfloat16() if rotated else gated
    assert same_values(before[unfit], kept[unfit])
    assert (before[~unfit].view(torch.uint8) == byte).all()


def broken(known: GatedActivation, both: Tensor) -> dict[str, tuple[GatedActivation, Tensor]]:
    """Gates that differ in one thing, and what they are given."""
    swapped = both.unflatten(1, (-1, 2)).flip(2) if known.interleaved else both.unflatten(1, (2, -1)).flip(1)
    changed = {"swapped": (known, swapped.flatten(1)), "other order": (GatedActivation(not known.interleaved), both)}
    if known.alpha is not None:
        changed["no clamp"] = dataclasses.replace(known, limit=1e30), both
        changed["another alpha"] = dataclasses.replace(known, alpha=known.alpha / 2), both
    return changed


@pytest.mark.parametrize("known, mode", [(PAIRS, "even"), (OSS, "even"), (OSS, None), (CLAMPED, "even")])
def test_another_gate_would_show(known: GatedActivation, mode: str | None, device: torch.device) -> None:
    both = gates_and_ups(known, 96)[:4].to(device)
    values, _, _ = fold_input(both, mode, permute=True, gate=known)
    for name, (other, given) in broken(known, both).items():
        expected, _, _ = fold_input(gated_activation(given.contiguous(), other), mode, permute=True)
        assert not torch.equal(values.float(), expected.float()), name


@pytest.mark.parametrize("columns", [2880, 5120])
def test_many_rows_have_three_blocks_a_thread(
    columns: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the values that few rows have, of whose threads a quarter has no block."""
    both = gates_and_ups(OSS, columns).to(device)
    few = fold_input(both, "even", permute=True, gate=OSS)
    _, step = fold.folding(2048, columns, 2 * columns, "even", gate=OSS)
    assert step.constants["PARTS"] == 3
    assert step.constants["WHOLE"]
    monkeypatch.setattr(fold, "_MANY_ROWS", 1)
    many = fold_input(both, "even", permute=True, gate=OSS)
    unfit = few[1].isnan().squeeze(1)
    assert same_values(many[1], few[1])
    assert torch.equal(many[0][~unfit].float(), few[0][~unfit].float())
    assert same_values(many[2][unfit], few[2][unfit])


def test_rows_longer_than_a_program_holds(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one of two does not fold."""
    monkeypatch.setattr(fold, "_LONGEST_IN_REGISTERS", 128)  # the smallest that columns are permuted within
    for mode in ("even", None):
        both = torch.randn(2, 2 * 416).bfloat16().to(device)
        both[1, :64] *= 2.0**-60
        values, scales, before = fold_input(both, mode, permute=True, gate=OSS)
        gated = gated_activation(both, OSS)
        expected, expected_scales, _ = fold_input(gated, mode, permute=True)
        assert same_values(scales, expected_scales)
        assert scales.isnan().squeeze(1).tolist() == [False, True]
        assert torch.equal(values[0].float(), expected[0].float())
        assert torch.equal(before[1], gated[1])


@pytest.mark.parametrize("known, mode, rotated", [(SILU, None, False), (SILU, "floor", True), (OSS, "even", False)])
def test_groups_of_gated_rows(
    known: GatedActivation, mode: str | None, rotated: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One launch fewer, amid poison. In one tile with rows that fold, some are recomputed: what is not written for the
    others is not read.
    """
    columns, launched = 352, []
    launch = Step.launch
    monkeypatch.setattr(Step, "launch", lambda step, tensors: launched.append(step.kernel) or launch(step, tensors))
    stack, _ = weight(3, 64, columns)
    words, bytes_ = (t.to(device) for t in stack)
    both = gates_and_ups(known, columns).to(device)
    bias, offsets = torch.randn(3, 64, device=device), torch.tensor([1, 1, 7], dtype=torch.int32, device=device)
    arguments = (words, bytes_, bias, offsets, None, 64, mode, torch.float32)
    expected = multiply_groups(gated_activation(both, known), *arguments, rotated=rotated)
    monkeypatch.setattr(gate_rows, "mxquant_gated_activation", None)
    with poisoned_workspaces(0xFF):
        y = multiply_groups(both, *arguments, gate=known, rotated=rotated)
    assert launched[: len(launched) // 2] == launched[len(launched) // 2 :]  # the gate's own kernel is no step
    assert same_values(y, expected)
    assert y[:5].isfinite().all()
    assert y[5:7].isnan().all()
    assert not y[7].any()
    monkeypatch.undo()
    skipped = multiply_groups(gated_activation(both, known), *arguments[:-2], None if mode else "even", torch.float32)
    assert not torch.allclose(y[:4], skipped[:4], rtol=1e-3)  # quantized or not, that shows
