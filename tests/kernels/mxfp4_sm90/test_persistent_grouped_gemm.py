"""What surrounds the persistent kernel on groups: tables, gathering, the tail of K. What it computes: `tests/gpu`."""

import pytest
import torch
import triton
import triton.language as tl

from kernels.mxfp4_sm90.rescaled_rows import MXFP4
from mxquant.formats import quantize_blocks
from mxquant.kernels.mxfp4_sm90 import persistent_grouped_gemm
from mxquant.kernels.mxfp4_sm90.activation import rescale_activation
from mxquant.kernels.mxfp4_sm90.gluon_decode import load_tail_exponents, spread_two_blocks
from mxquant.kernels.mxfp4_sm90.layout import pack_weight
from mxquant.kernels.mxfp4_sm90.persistent_grouped_gemm import gather_rows, is_faster, row_tile_table
from mxquant.reference.rescale import Prologue

# Where groups end: some empty, at the ends too; one group; nothing; ends that lie beyond the rows.
OFFSETS = {
    "some empty": [0, 40, 40, 41, 170, 200], "the first": [200, 200, 200], "none": [0, 0, 0], "only one": [200],
    "many": [7] * 130, "beyond": [10, 250],
}  # fmt: skip


def tiles_of(offsets: list[int], sorted_rows: int, rows: int) -> list[list[int]]:
    """The twin of `row_tile_table`."""
    entries: list[list[int]] = []
    start = 0
    for matrix, end in enumerate(min(end, sorted_rows) for end in offsets):
        first = len(entries)
        entries += [[matrix, start, end, first]] * -(-(end - start) // rows)
        start = end
    return entries


@pytest.mark.parametrize("rows", [32, 64, 128])
@pytest.mark.parametrize("offsets", OFFSETS.values(), ids=OFFSETS)
def test_row_tile_table_of_groups(offsets: list[int], rows: int, device: torch.device) -> None:
    table = row_tile_table(torch.tensor(offsets, dtype=torch.int32, device=device), 200, rows).tolist()
    expected = tiles_of(offsets, 200, rows)
    assert table[0][0] == len(expected) <= len(table) - 1
    assert table[1 : len(expected) + 1] == expected


def test_gather_rows_and_their_scales(device: torch.device) -> None:
    x = torch.randn(5, 320, device=device).bfloat16()
    rows = torch.tensor([4, 0, 0, 3, 4, 4, 1], device=device)
    for mode in ("even", None):
        values, scale, _ = rescale_activation(x, Prologue(mode), permute=True)
        sorted_values, sorted_scale = gather_rows(values, scale, rows)
        assert torch.equal(sorted_values.view(torch.uint8), values.view(torch.uint8)[rows])
        assert torch.equal(sorted_scale, scale[rows])


@triton.jit
def _spread_kernel(words: tl.tensor, out: tl.tensor) -> None:
    at = tl.arange(0, 32)[:, None] * 128 + tl.arange(0, 128)[None, :]
    tl.store(out + at, spread_two_blocks(tl.load(words + at), 16))


def test_spread_two_blocks(device: torch.device) -> None:
    """The same blocks are where they are in a chunk of four, whatever follows them."""
    qdata, scale = quantize_blocks(torch.randn(64, 384), MXFP4)
    packed, whole = pack_weight(qdata[:, :160], scale[:, :10]), pack_weight(qdata, scale)
    assert packed is not None
    assert whole is not None
    rest = torch.cat([packed[0].flatten()[2 * 4096 :], torch.randint(0, 256, (2048,), dtype=torch.uint8)])
    spread = torch.empty(4096, dtype=torch.uint8, device=device)
    _spread_kernel[(1,)](rest.to(device), spread)
    expected = whole[0].flatten()[2 * 4096 :].view(2, 32, 4, 16)[:, :, :2]
    assert torch.equal(spread.cpu().view(2, 32, 4, 16)[:, :, :2], expected)
    assert not torch.equal(rest.view(2, 32, 4, 16)[:, :, :2], expected)


@triton.jit
def _tail_kernel(w_scale: tl.tensor, out: tl.tensor, K: tl.tensor, BLOCKS: tl.constexpr) -> None:
    thread = tl.arange(0, 128)
    row = tl.program_id(0).to(tl.int64) * 64
    packed_exponents = load_tail_exponents(w_scale, row, thread, K // 256 * 8, K, BLOCKS)
    tl.store(out + tl.program_id(0) * 128 + thread, packed_exponents)


@pytest.mark.parametrize("columns", [320, 384, 448])
def test_tail_exponents(columns: int, device: torch.device) -> None:
    """As in a weight padded to 512 columns with zeros, whose exponents are zero."""
    qdata, scale = quantize_blocks(torch.randn(128, columns), MXFP4)
    packed = pack_weight(qdata, scale)
    padded = pack_weight(
        torch.nn.functional.pad(qdata, (0, 256 - columns // 2)), torch.nn.functional.pad(scale, (0, 16 - columns // 32))
    )
    assert packed is not None
    assert padded is not None
    exponents = torch.empty(2, 128, dtype=torch.int32, device=device)
    _tail_kernel[(2,)](packed[1].to(device), exponents, columns, BLOCKS=columns // 32 - 8)
    assert torch.equal(exponents.cpu(), padded[1].view(torch.int32)[:, 128:].contiguous())


def test_is_faster_for_large_groups(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """On a GPU of 132 multiprocessors."""
    monkeypatch.setattr(persistent_grouped_gemm, "multiprocessors", lambda device: 132)
    assert is_faster(1024, 128, 2880, 2880, device)
    assert not is_faster(1023, 128, 2880, 2880, device)
    assert not is_faster(1024, 128, 2880, 2848, device)
    # Tiles of 256 weight rows for three in four multiprocessors.
    assert is_faster(128, 9, 2816, 2880, device)
    assert not is_faster(128, 8, 2816, 2880, device)
