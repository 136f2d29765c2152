"""Equality of bytes with a message that shows where they differ, and counts of differences."""

from __future__ import annotations

import numpy as np


def assert_same(actual: np.ndarray, expected: np.ndarray, what: str, where: np.ndarray | None = None) -> None:
    """Bit equality (NaN equals NaN) at the places of `where`, or everywhere."""
    differing = differences(actual, expected)
    if where is not None:
        differing &= where
    if not differing.any():
        return
    places = np.argwhere(differing)
    shown = "\n".join(
        f"  at {tuple(map(int, p))}: {actual[tuple(p)]} instead of {expected[tuple(p)]}" for p in places[:8]
    )
    raise AssertionError(f"{what}: {len(places)} of {differing.size} differ\n{shown}")


def differences(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise AssertionError(f"{actual.dtype}{actual.shape} compared with {expected.dtype}{expected.shape}")
    if actual.dtype.kind == "f":
        same = (actual == expected) & (np.signbit(actual) == np.signbit(expected))
        return ~(same | (np.isnan(actual) & np.isnan(expected)))
    return actual != expected
