"""The kernels alone, one family a file: plain tensors in, plain tensors out, each compared with its twin in
`mxquant.formats`.
"""

import functools
import importlib.util


@functools.cache
def has_triton() -> bool:
    """Whether the kernels that import triton can be imported."""
    return importlib.util.find_spec("triton") is not None
