"""Implementations of the matmul: their protocol, their registry, and the backends, one file each."""

from mxquant.backends.base import ANY_LAYOUT, DGRAD, FORWARD, Backend, Groups, Layout, Operand, Problem
from mxquant.backends.kernel_choice import KernelChoice, TunableBackend
from mxquant.backends.registry import (
    backend_of_layout,
    candidates,
    get_backend,
    list_backends,
    register_backend,
    select_backend,
    unregister_backend,
)

__all__ = [
    "ANY_LAYOUT",
    "DGRAD",
    "FORWARD",
    "Backend",
    "Groups",
    "Layout",
    "Operand",
    "Problem",
    "KernelChoice",
    "TunableBackend",
    "candidates",
    "get_backend",
    "backend_of_layout",
    "list_backends",
    "register_backend",
    "select_backend",
    "unregister_backend",
]
