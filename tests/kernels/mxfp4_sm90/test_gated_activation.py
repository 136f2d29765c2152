"""The activation prologue with a gate, and products after it: bit by bit as after the gate's own kernel."""

import dataclasses

import pytest
import torch
from poison import POISONS, amid_poison, poisoned_workspaces
from torch import Tensor

from kernels.mxfp4_sm90.packed_weights import random_weight
from mxquant.kernels.moe import gated_activation as gated_activation_kernel
from mxquant.kernels.moe.gated_activation import gated_activation
from mxquant.kernels.mxfp4_sm90 import activation, activation_fp8
from mxquant.kernels.mxfp4_sm90.activation import plan_prologue, rescale_activation
from mxquant.kernels.mxfp4_sm90.grouped_gemm import grouped_gemm
from mxquant.kernels.runtime.plan import Step
from mxquant.reference.gated_activation import GatedActivation
from mxquant.reference.hadamard import hadamard
from mxquant.reference.rescale import Prologue

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
    """Eight rows: with a zero block, of zeros, beyond the clamp; 4 to 7 are out of range: values too far apart, NaN in
    a gate and in an up, and Inf, which a clamp brings down.
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
def test_gated_rows_equal_rows_of_the_gate_kernel(
    known: GatedActivation, mode: str | None, rotated: bool, columns: int, byte: int, device: torch.device
) -> None:
    """Read from amid poison, in rows that lie apart. Only rows out of range are written before quantization."""
    both = gates_and_ups(known, columns)
    gated = gated_activation(both.to(device), known)
    expected, scales, _ = rescale_activation(gated, Prologue(mode, rotated), permute=True)
    with poisoned_workspaces(byte):
        given = amid_poison(both, byte).to(device)
        values, ours, x_pre_quant = rescale_activation(given, Prologue(mode, rotated, known), permute=True)
    out_of_range = scales.isnan().squeeze(1)
    assert out_of_range[4:7].all()
    assert bool(out_of_range[7]) is (known.limit is None)
    assert not out_of_range[:3].any()
    assert same_values(ours, scales)
    bits = torch.int16 if mode is None else torch.uint8
    assert torch.equal(values.view(bits)[~out_of_range], expected.view(bits)[~out_of_range])
    kept = hadamard(gated, 32).bfloat16() if rotated else gated
    assert same_values(x_pre_quant[out_of_range], kept[out_of_range])
    assert (x_pre_quant[~out_of_range].view(torch.uint8) == byte).all()


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
    values, _, _ = rescale_activation(both, Prologue(mode, gate=known), permute=True)
    for name, (other, given) in broken(known, both).items():
        expected, _, _ = rescale_activation(gated_activation(given.contiguous(), other), Prologue(mode), permute=True)
        assert not torch.equal(values.float(), expected.float()), name


@pytest.mark.parametrize("columns", [2880, 5120])
def test_many_rows_have_three_blocks_a_thread(
    columns: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the values that one block a thread gives, where a quarter of the threads is idle."""
    both = gates_and_ups(OSS, columns).to(device)
    one_block = rescale_activation(both, Prologue("even", gate=OSS), permute=True)
    _, step = plan_prologue(2048, columns, 2 * columns, Prologue("even", gate=OSS))
    assert step.constants["CHUNKS"] == 3
    assert step.constants["IN_REGISTERS"]
    monkeypatch.setattr(activation_fp8, "_MANY_ROWS", 1)
    three_blocks = rescale_activation(both, Prologue("even", gate=OSS), permute=True)
    out_of_range = one_block[1].isnan().squeeze(1)
    assert same_values(three_blocks[1], one_block[1])
    assert torch.equal(three_blocks[0][~out_of_range].float(), one_block[0][~out_of_range].float())
    assert same_values(three_blocks[2][out_of_range], one_block[2][out_of_range])


def test_rows_beyond_the_registers_of_a_program(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one of two is out of range."""
    monkeypatch.setattr(activation_fp8, "_MAX_COLUMNS", 128)  # the smallest that columns are permuted within
    monkeypatch.setattr(activation, "_MAX_BLOCK_K", 128)
    for mode in ("even", None):
        both = torch.randn(2, 2 * 416).bfloat16().to(device)
        both[1, :64] *= 2.0**-60
        values, scales, x_pre_quant = rescale_activation(both, Prologue(mode, gate=OSS), permute=True)
        gated = gated_activation(both, OSS)
        expected, expected_scales, _ = rescale_activation(gated, Prologue(mode), permute=True)
        assert same_values(scales, expected_scales)
        assert scales.isnan().squeeze(1).tolist() == [False, True]
        assert torch.equal(values[0].float(), expected[0].float())
        assert torch.equal(x_pre_quant[1], gated[1])


@pytest.mark.parametrize("known, mode, rotated", [(SILU, None, False), (SILU, "floor", True), (OSS, "even", False)])
def test_grouped_gemm_of_gated_rows(
    known: GatedActivation, mode: str | None, rotated: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One launch fewer, amid poison. Rows in range share a tile with rows out of range: what is not written for them is
    not read.
    """
    columns, launched = 352, []
    launch = Step.launch
    monkeypatch.setattr(Step, "launch", lambda step, tensors: launched.append(step.kernel) or launch(step, tensors))
    packed, _ = random_weight(3, 64, columns)
    w_packed, w_scale = (t.to(device) for t in packed)
    both = gates_and_ups(known, columns).to(device)
    bias, offsets = torch.randn(3, 64, device=device), torch.tensor([1, 1, 7], dtype=torch.int32, device=device)
    arguments = (w_packed, w_scale, bias, offsets, None, 64)
    expected = grouped_gemm(gated_activation(both, known), *arguments, Prologue(mode, rotated), torch.float32)
    monkeypatch.setattr(gated_activation_kernel, "mxquant_gated_activation", None)
    with poisoned_workspaces(0xFF):
        y = grouped_gemm(both, *arguments, Prologue(mode, rotated, known), torch.float32)
    assert launched[: len(launched) // 2] == launched[len(launched) // 2 :]  # the gate's own kernel is no step
    assert same_values(y, expected)
    assert y[:5].isfinite().all()
    assert y[5:7].isnan().all()
    assert not y[7].any()
    monkeypatch.undo()
    other = Prologue(None if mode else "even")
    skipped = grouped_gemm(gated_activation(both, known), *arguments, other, torch.float32)
    assert not torch.allclose(y[:4], skipped[:4], rtol=1e-3)  # quantized or not, that shows
