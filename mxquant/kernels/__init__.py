"""Triton kernels: plain tensors in, plain tensors out. Each equals a twin in `mxquant.reference` or `mxquant.formats`.

`primitives` are device functions that kernels share, `runtime` launches kernels; the other folders hold one family of
kernels each. Importing any of them imports triton, which is not everywhere: `has_triton` tells.
"""

import functools
import importlib.util


@functools.cache
def has_triton() -> bool:
    """Whether triton is installed, so that the kernels can be imported."""
    return importlib.util.find_spec("triton") is not None
