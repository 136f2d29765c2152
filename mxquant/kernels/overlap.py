"""Kernels that are launched before those whose results they read have ended ("programmatic dependent launch").

A kernel launched with `launch_pdl=True` may start as soon as every program of the one before has said `let_next_start`
or ended; it must call `await_previous` before it reads or writes what that one does. Triton's interpreter, for tests
without a GPU, runs one kernel after the other.
"""

from __future__ import annotations

import triton
import triton.language as tl  # noqa: F401 - the interpreter looks for it in every module of kernels
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mxquant.kernels.triton_numerics import INTERPRETED


@triton.jit
def let_next_start() -> None:
    if not INTERPRETED:
        gdc_launch_dependents()


@triton.jit
def await_previous() -> None:
    if not INTERPRETED:
        gdc_wait()
