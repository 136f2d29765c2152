"""The persistent kernel: that it compiles, and its schedule. What it computes: `tests/gpu`."""

import os
import subprocess
import sys

import pytest
import torch

from mxquant.kernels.mxfp4_sm90.persistent_gemm import mxquant_persistent_split_k_reduce, schedule_tiles
from mxquant.kernels.mxfp4_sm90.tile_scheduler import TILES

# Apart, as Triton is set to interpret here. A multiprocessor of Hopper has 227 KiB of shared memory for a program.
COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout
from mxquant.kernels.mxfp4_sm90.gluon_kernel import mxquant_mxfp4_persistent_gemm as kernel

for bits, rows, each, stages, grouped, k_tail in (
    (8, 128, 2, 3, False, 0), (8, 64, 1, 3, False, 6), (16, 128, 2, 4, False, 6), (16, 32, 1, 4, False, 0),
    (8, 128, 2, 3, True, 2), (16, 64, 1, 4, True, 4),
):
    layout = NVMMASharedLayout(128, bits, 2)
    columns = 256 if bits == 8 else 128
    word = f"u{bits}[{columns // 4}, {1024 // bits}]"
    value = f"{'fp8e5' if bits == 8 else 'fp16'}[{rows}, 128]"
    result = f"bf16[{rows}, 64],{NVMMASharedLayout(128, 16, 2)!r}"
    types = dict(
        w_desc=f"tensordesc<{word},{layout!r}>", x_desc=f"tensordesc<{value},{layout!r}>",
        y="*bf16" if grouped else f"tensordesc<{result}>", w_scale="*u8", x_scale="*fp32", bias="*bf16",
        partial="*fp32", table="*i32", M="i32", N="i32", K="i32", whole_tiles="i32", splits="i32",
    )
    constants = dict(GROUPED=grouped, TILES_EACH=each, BM=rows, BK=columns, STAGES=stages, K_TAIL=k_tail, HAS_BIAS=True)
    names = kernel.arg_names
    source = GluonASTSource(
        kernel,
        {name: types.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in ("w_scale", "x_scale", "partial", "N", "K")},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "launch_pdl": True})
    kind = "f32.e5m2.e5m2" if bits == 8 else "f32.f16.f16"
    for n in (rows, 64) if grouped else (rows,):
        assert f"wgmma.mma_async.sync.aligned.m64n{n}k{256 // bits}.{kind}" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= 227 * 1024, compiled.metadata.shared
"""


@pytest.mark.slow
def test_compiles_for_hopper() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    "tiles, expected",
    [(132, (132, 1)), (112, (112, 1)), (448, (396, 2)), (224, (224, 1)), (1792, (1716, 3)), (134, (132, 8))],
)
def test_a_short_last_wave_splits_k(tiles: int, expected: tuple[int, int]) -> None:
    """Where that makes the wave shorter by more than storing and reducing takes."""
    assert schedule_tiles(tiles, 132, 8192, fp16=False) == expected


@pytest.mark.parametrize("k", [256, 512, 4096])
@pytest.mark.parametrize("tiles", [1, 7, 131, 132, 133, 500, 3000])
def test_every_split_has_columns(tiles: int, k: int) -> None:
    whole_tiles, splits = schedule_tiles(tiles, 132, k, fp16=True)
    assert 1 <= splits <= k // 256
    assert 0 <= tiles - whole_tiles < 132
    assert splits > 1 or whole_tiles == tiles


def test_split_k_reduction_is_in_order(device: torch.device) -> None:
    """150 rows and 320 weight rows are 3 x 2 tiles, the last of both in part outside. From the third on, tiles have
    three
    splits."""
    m, n, rows, whole_tiles, splits = 150, 320, 64, 2, 3
    y = torch.full((m, n), torch.nan)
    partial = torch.randn(4 * splits, TILES.value, 64, rows)
    y = y.to(device)
    mxquant_persistent_split_k_reduce[(4, TILES.value)](
        partial.to(device), y, m, n, whole_tiles, SPLITS=splits, BM=rows
    )
    expected = torch.full((3 * rows, 2 * 256), torch.nan)
    for index in range(whole_tiles, 6):
        # All row tiles for one weight tile before the next.
        row, column = index % 3 * rows, index // 3 * 256
        each = partial.unflatten(0, (4, splits))[index - whole_tiles]
        summed = (each[0] + each[1]) + each[2]
        expected[row : row + rows, column : column + 256] = summed.flatten(0, 1).T
    torch.testing.assert_close(y.cpu(), expected[:m, :n], rtol=0, atol=0, equal_nan=True)
