"""Programmatic dependent launch (PDL): a kernel starts before the kernel whose results it reads has ended.

A kernel launched with `launch_pdl=True` may start once every program of the kernel before has called
`gdc_launch_dependents` or ended. It must call `gdc_wait` before it touches memory that the kernel before reads or
writes. Triton's interpreter runs one kernel after the other.
"""

from __future__ import annotations

import triton
import triton.language as tl  # noqa: F401 - the interpreter looks for it in every module of kernels
from triton.language.extra.cuda import gdc_launch_dependents as _launch_dependents
from triton.language.extra.cuda import gdc_wait as _wait

from mxquant.kernels.primitives.numerics import INTERPRETED


@triton.jit
def gdc_launch_dependents() -> None:
    if not INTERPRETED:
        _launch_dependents()


@triton.jit
def gdc_wait() -> None:
    if not INTERPRETED:
        _wait()
