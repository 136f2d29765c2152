"""Copies of a tensor against cache hits, and the host's time for one eager call. Not a benchmark itself."""

import statistics
import time
from collections.abc import Callable

import torch

CACHED_BYTES = 400 << 20
"""What the calls of one graph read at least between them: several times the L2 cache of any GPU so far."""


def copies(bytes_each: float) -> int:
    """How many tensors of a size leave nothing in the cache when they are used in turn."""
    return max(1, round(CACHED_BYTES / bytes_each))


def host_microseconds(run: Callable[[], object], calls: int = 100) -> float:
    """Median time until an eager call returns, the GPU idle before it, so that no full queue is waited for."""
    for _ in range(20):
        run()
    times = []
    for _ in range(calls):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return statistics.median(times) * 1e6
