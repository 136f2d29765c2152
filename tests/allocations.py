"""What a call allocates, by the allocator's own records."""

from collections.abc import Callable
from typing import NamedTuple

from torch.profiler import ProfilerActivity, profile


class Allocations(NamedTuple):
    peak: int
    largest: int


def allocations(run: Callable[[], object]) -> Allocations:
    """The most bytes alive at once while `run` runs, and its largest single allocation.

    The profiler records every allocation of torch's CPU allocator with its sign, those inside of operators included.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = run()
    del result
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = largest = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak, largest = max(peak, live), max(largest, event.nbytes())
    return Allocations(peak, largest)
