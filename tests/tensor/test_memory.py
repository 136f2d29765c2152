"""How much memory quantizing and multiplying take, by the allocator's own records."""

import pytest
import torch
import torch.nn.functional as F
from allocations import allocations
from matmul_reference import FORMATS, quantized
from torch.profiler import ProfilerActivity, profile

from mxquant import quantize


def test_the_records_are_complete() -> None:
    """The control of the tests below: two megabytes at once and three in sequence are seen as two."""

    def run() -> None:
        a = torch.empty(1 << 20, dtype=torch.uint8)
        b = torch.bitwise_not(a)
        del a
        c = torch.bitwise_not(b)
        del b, c

    assert allocations(run) == (2 << 20, 1 << 20)


@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("format", FORMATS)
def test_quantizing_takes_at_most_three_times_the_weight(format: str, axis: int) -> None:
    """Beyond the original, the result included."""
    w = torch.randn(1024, 1024, dtype=torch.bfloat16)
    quantize(w[:32], format)  # tables that are made once
    assert allocations(lambda: quantize(w, format, axis=axis)).peak <= 3 * w.nbytes


@pytest.mark.usefixtures("fixed_backends")
@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("format, activation", [(f, None) for f in FORMATS] + [("mxfp4", "mxfp4"), ("nvfp4", "nvfp4")])
def test_an_emulated_linear_never_holds_the_dequantized_weight(format: str, activation: str | None, rows: int) -> None:
    n = k = 2048
    x = torch.randn(rows, k, dtype=torch.bfloat16)
    weight = quantized(torch.randn(n, k, dtype=torch.bfloat16), format, activation)
    F.linear(x, weight)  # tables that are made once
    used = allocations(lambda: F.linear(x, weight))
    whole = n * k * 2
    assert used.largest < whole // 2
    assert used.peak < whole


def test_nothing_dequantized_is_kept_after_the_product() -> None:
    weight = quantized(torch.randn(512, 512, dtype=torch.bfloat16), "mxfp4")
    x = torch.randn(4, 512, dtype=torch.bfloat16)
    F.linear(x, weight)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        y = F.linear(x, weight)
    kept = sum(e.nbytes() for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]")
    assert kept == y.nbytes


def test_slices_and_transposes_copy_nothing() -> None:
    weight = quantize(torch.randn(512, 512), "mxfp4")
    for view in (lambda: weight[10:20], lambda: weight.t(), lambda: weight[:, 32:96], lambda: weight.view(2, 256, 512)):
        assert allocations(view).peak < 1024
