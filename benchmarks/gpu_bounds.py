"""What a quantized linear cannot be faster than on a GPU, whatever computes it.

Launches that depend on each other; reading the weight's codes and scales from memory; and, for many rows of W4A4 on a
GPU with FP8 tensor cores, cuBLAS's product of operands that are FP8 already, with promoted sums.

Not a script: `gpu_linear.py` measures it in the same run.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from gpu_timing import copies, graph_microseconds
from torch import Tensor, nn

from mxquant import MXFP4Config, quantize_

# Rows from which a product takes longer than expanding the weight.
MANY = 2048
# Words of a program: 32 KiB, read by 16 bytes a thread at a time.
WORDS = 8192


def measure_bounds(shapes: Iterable[tuple[int, int]], rows: Iterable[int], device: str) -> Iterator[dict[str, Any]]:
    """A result for each bound: of no shape, of a shape, or of a shape and a number of rows."""
    yield {"bound": "launches", "us": round(launches(device), 2)}
    many = [m for m in rows if m >= MANY]
    for n, k in shapes:
        shape = f"{n}x{k}"
        taken = reading(n * k * 17 // 32, device)
        yield {
            "bound": "reading",
            "shape": shape,
            "us": round(taken, 2),
            "tb_s": round(n * k * 17 / 32 / taken / 1e6, 2),
        }
        for m in many:
            yield {"bound": "FP8 product", "shape": shape, "rows": m, "us": round(fp8_product(m, n, k, device), 2)}


def launches(device: str) -> float:
    """Of a W4A4 linear with next to nothing to compute."""
    layer = nn.Linear(256, 64, bias=False, device=device, dtype=torch.bfloat16)
    quantize_(layer, MXFP4Config())
    x = torch.randn(1, 256, device=device, dtype=torch.bfloat16)
    return graph_microseconds(lambda: [layer(x) for _ in range(100)], 100)


def reading(size: int, device: str) -> float:
    """Bytes that are not in the cache, into registers."""
    buffers = [torch.zeros(size // 4, dtype=torch.int32, device=device) for _ in range(copies(size))]
    grid = (triton.cdiv(size // 4, WORDS),)
    found = torch.empty(grid[0], dtype=torch.int32, device=device)
    return graph_microseconds(lambda: [_read_kernel[grid](b, found, size // 4, WORDS) for b in buffers], len(buffers))


@triton.jit
def _read_kernel(words: tl.tensor, found: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    largest = tl.max(tl.load(words + at, mask=at < size, other=0), 0)
    if largest != 0:  # never: nothing is written
        tl.store(found + tl.program_id(0), largest)


def fp8_product(m: int, n: int, k: int, device: str) -> float:
    """By cuBLAS, with one scale a row on both sides."""

    def operand(rows: int) -> tuple[Tensor, Tensor]:
        values = torch.randn(rows, k, device=device, dtype=torch.bfloat16).to(torch.float8_e4m3fn)
        return values, torch.ones(rows, 1, device=device)

    (x, x_scale), (w, w_scale) = operand(m), operand(n)
    options = {"out_dtype": torch.bfloat16, "use_fast_accum": False}
    return graph_microseconds(lambda: [torch._scaled_mm(x, w.t(), x_scale, w_scale.t(), **options)], 1)
