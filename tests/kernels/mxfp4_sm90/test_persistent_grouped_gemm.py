"""What surrounds the grouped kernel whose warps have roles. What it computes: `tests/gpu`."""

import pytest
import torch
import triton
import triton.language as tl
from matmul_reference import assert_product

from kernels.mxfp4_sm90.packed_weights import weight
from kernels.mxfp4_sm90.rescaled_rows import MXFP4, decoded
from mxquant.formats import quantize_blocks
from mxquant.kernels.mxfp4_sm90 import persistent_grouped_gemm as grouped_specialized
from mxquant.kernels.mxfp4_sm90.activation_fp8 import fold_input
from mxquant.kernels.mxfp4_sm90.gluon_decode import rest_exponents, spread_pair
from mxquant.kernels.mxfp4_sm90.layout import pack_tiles
from mxquant.kernels.mxfp4_sm90.persistent_grouped_gemm import gather, settle, table_of_tiles, takes

# Where groups end: some empty, at the ends too; one group; nothing; ends that lie beyond the places.
OFFSETS = {
    "some empty": [0, 40, 40, 41, 170, 200], "the first": [200, 200, 200], "none": [0, 0, 0], "only one": [200],
    "many": [7] * 130, "beyond": [10, 250],
}  # fmt: skip


def tiles_of(offsets: list[int], places: int, rows: int) -> list[list[int]]:
    """The twin of `table_of_tiles`."""
    entries: list[list[int]] = []
    start = 0
    for matrix, end in enumerate(min(end, places) for end in offsets):
        first = len(entries)
        entries += [[matrix, start, end, first]] * -(-(end - start) // rows)
        start = end
    return entries


@pytest.mark.parametrize("rows", [32, 64, 128])
@pytest.mark.parametrize("offsets", OFFSETS.values(), ids=OFFSETS)
def test_the_table_has_every_tile_of_every_group(offsets: list[int], rows: int, device: torch.device) -> None:
    table = table_of_tiles(torch.tensor(offsets, dtype=torch.int32, device=device), 200, rows).tolist()
    expected = tiles_of(offsets, 200, rows)
    assert table[0][0] == len(expected) <= len(table) - 1
    assert table[1 : len(expected) + 1] == expected


def test_rows_are_gathered_with_their_scales(device: torch.device) -> None:
    x = torch.randn(5, 320, device=device).bfloat16()
    rows = torch.tensor([4, 0, 0, 3, 4, 4, 1], device=device)
    for mode in ("even", None):
        values, scale, _ = fold_input(x, mode, permute=True, rotated=False)
        sorted_values, sorted_scale = gather(values, scale, rows)
        assert torch.equal(sorted_values.view(torch.uint8), values.view(torch.uint8)[rows])
        assert torch.equal(sorted_scale, scale[rows])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("mode", ["even", None])
@pytest.mark.parametrize("gathered", [True, False])
def test_what_the_product_has_not_written(gathered: bool, mode: str | None, device: torch.device) -> None:
    """Of three matrices, one without rows: an unfit row in each group, and places of none; the rest stays as it was."""
    experts, n, k = 3, 64, 320
    tiles, w64 = weight(experts, n, k)
    offsets, places = [20, 20, 50], 70
    rows = torch.randint(0, 30, (places,)) if gathered else torch.arange(places)
    x = torch.randn(30 if gathered else places, k)
    unfit = [rows[3], rows[45]]
    for row in unfit:
        x[row, :32] *= 2.0**-60
        x[row, 40] = 2.0**-90
    x, bias = x.bfloat16(), torch.randn(experts, n)
    _, scale, _ = fold_input(x.to(device), mode, permute=True, rotated=False)
    y = torch.full((places, n), 7.0, device=device)
    given = [t.to(device) for t in (*tiles, bias, torch.tensor(offsets, dtype=torch.int32))]
    settle(y, x.to(device), *given, rows.to(device) if gathered else None, scale[rows.to(device)], mode)
    x64 = x.double() if mode is None else decoded(x, mode)
    for place in range(places):
        if place >= offsets[-1]:
            assert not y[place].any()
        elif any(rows[place] == row for row in unfit):
            group = 0 if place < offsets[0] else 2
            assert_product(y[place : place + 1].cpu(), x64[rows[place]][None], w64[group], bias[group])
            with pytest.raises(AssertionError):
                assert_product(y[place : place + 1].cpu(), x64[rows[place]][None], w64[1], bias[1])
        else:
            assert torch.equal(y[place].cpu(), torch.full((n,), 7.0))


@triton.jit
def _spread_kernel(words: tl.tensor, out: tl.tensor) -> None:
    at = tl.arange(0, 32)[:, None] * 128 + tl.arange(0, 128)[None, :]
    tl.store(out + at, spread_pair(tl.load(words + at), 16))


def test_a_last_chunk_of_two_blocks_is_spread_over_the_threads(device: torch.device) -> None:
    """With whatever follows it: as the same blocks stand in a chunk of four."""
    qdata, scale = quantize_blocks(torch.randn(64, 384), MXFP4)
    packed, whole = pack_tiles(qdata[:, :160], scale[:, :10]), pack_tiles(qdata, scale)
    assert packed is not None
    assert whole is not None
    rest = torch.cat([packed[0].flatten()[2 * 4096 :], torch.randint(0, 256, (2048,), dtype=torch.uint8)])
    spread = torch.empty(4096, dtype=torch.uint8, device=device)
    _spread_kernel[(1,)](rest.to(device), spread)
    expected = whole[0].flatten()[2 * 4096 :].view(2, 32, 4, 16)[:, :, :2]
    assert torch.equal(spread.cpu().view(2, 32, 4, 16)[:, :, :2], expected)
    assert not torch.equal(rest.view(2, 32, 4, 16)[:, :, :2], expected)


@triton.jit
def _rest_kernel(scale_bytes: tl.tensor, out: tl.tensor, K: tl.tensor, BLOCKS: tl.constexpr) -> None:
    thread = tl.arange(0, 128)
    row = tl.program_id(0).to(tl.int64) * 64
    four = rest_exponents(scale_bytes, row, thread, K // 256 * 8, K, BLOCKS)
    tl.store(out + tl.program_id(0) * 128 + thread, four)


@pytest.mark.parametrize("columns", [320, 384, 448])
def test_the_last_exponents_of_a_thread(columns: int, device: torch.device) -> None:
    """As in a weight of 512 columns whose others are zero, and have exponents of zero."""
    qdata, scale = quantize_blocks(torch.randn(128, columns), MXFP4)
    packed = pack_tiles(qdata, scale)
    padded = pack_tiles(
        torch.nn.functional.pad(qdata, (0, 256 - columns // 2)), torch.nn.functional.pad(scale, (0, 16 - columns // 32))
    )
    assert packed is not None
    assert padded is not None
    four = torch.empty(2, 128, dtype=torch.int32, device=device)
    _rest_kernel[(2,)](packed[1].to(device), four, columns, BLOCKS=columns // 32 - 8)
    assert torch.equal(four.cpu(), padded[1].view(torch.int32)[:, 128:].contiguous())


def test_it_takes_over_where_groups_are_large_enough(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """On a GPU of 132 multiprocessors."""
    monkeypatch.setattr(grouped_specialized, "multiprocessors", lambda device: 132)
    assert takes(1024, 128, 2880, 2880, device)
    assert not takes(1023, 128, 2880, 2880, device)
    assert not takes(1024, 128, 2880, 2848, device)
    # Tiles of 256 weight rows for three in four multiprocessors.
    assert takes(128, 9, 2816, 2880, device)
    assert not takes(128, 8, 2816, 2880, device)
