"""Inputs that exercise a quantizer: ordinary, on ties, next to ties, and over the whole exponent range. fp32 values."""

from __future__ import annotations

import numpy as np

from formats.reference import ELEMENT_OF_FORMAT, Element, midpoints

MX_FORMATS = list(ELEMENT_OF_FORMAT)


def gaussian(rows: int, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, length)).astype(np.float32)


def all_scales(rows: int, length: int, seed: int = 1) -> np.ndarray:
    """Gaussian rows, each times a power of two: 2^-149 to 2^125 over the rows."""
    exponents = np.linspace(-149, 125, rows).round()
    return (gaussian(rows, length, seed) * 2.0 ** exponents[:, None]).astype(np.float32)


def heavy_tailed(rows: int, length: int, seed: int = 2) -> np.ndarray:
    """Twenty binades inside a block, so that subnormal codes, zeros and signs of zeros all occur."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((rows, length)) * 2.0 ** rng.uniform(-20, 0, (rows, length))).astype(np.float32)


def ties(element: Element, seed: int = 3) -> np.ndarray:
    """Every midpoint of both signs and its fp32 neighbours, in blocks of 32 whose maximum keeps the scale at 2^k."""
    middle = midpoints(element).astype(np.float32)
    values = np.concatenate([middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf))])
    values = np.concatenate([values, -values])
    values = np.random.default_rng(seed).permutation(np.append(values, np.zeros(-len(values) % 31, np.float32)))
    rows = values.reshape(-1, 31)
    largest = np.full((len(rows), 1), element.max_value, np.float32)
    rows = np.concatenate([rows, largest], axis=1)
    return np.concatenate([rows * np.float32(2.0**k) for k in (-100, -3, 0, 5, 90)])


def everything(element: Element) -> np.ndarray:
    """[n, 32]: all of the above."""
    parts = [gaussian(16, 64), all_scales(64, 32), heavy_tailed(32, 64), ties(element)]
    return np.concatenate([part.reshape(-1, 32) for part in parts])
