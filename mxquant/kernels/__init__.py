"""Triton kernels: plain tensors in, plain tensors out. Each equals a twin in `mxquant.reference` or `mxquant.formats`.

`primitives` holds the device functions that kernels share, `runtime` launches kernels, and each other folder holds one
family of kernels. Importing any of them imports triton, which is optional: ask `has_triton` first.

Each kernel lists the formats, scale modes and dtypes it takes, and its `reject` gives the reason why it declines a
call. What a kernel does not list it declines: a new format runs on its torch twins until a kernel lists it.
"""

import functools
import importlib.util
from collections.abc import Iterable


@functools.cache
def has_triton() -> bool:
    """Whether triton is installed, so that the kernels can be imported."""
    return importlib.util.find_spec("triton") is not None


def reject_unlisted(what: str, given: object, listed: Iterable[object]) -> str | None:
    """None if `given` is among what a kernel lists, else the reason why the kernel declines it."""
    if given in listed:
        return None
    return f"has no kernel for {what} {given}, only for {', '.join(map(str, listed))}".replace("torch.", "")
