"""Where the Triton kernels run here: compiled on a GPU if there is one, else in Triton's interpreter on the CPU."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

# Triton reads this when a kernel is defined, which is when a test module here is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    tl = pytest.importorskip("triton.language")
    triton = pytest.importorskip("triton")
    # Other tests may have imported Triton before, whose own library is then meant to be compiled.
    for name, function in list(vars(tl).items()):
        if isinstance(function, triton.runtime.JITFunction):
            setattr(tl, name, triton.jit(function.fn))


@pytest.fixture(autouse=True)
def restored_language() -> Iterator[None]:
    """The interpreter replaces functions of `triton.language` and leaves some of them so: a later test that compiles
    would get those.
    """
    import triton.language as tl

    patched = (tl, tl.core, tl.math, tl.tensor, tl.dtype, tl.core.tensor_descriptor_base)
    before = [dict(vars(holder)) for holder in patched]
    yield
    for holder, attributes in zip(patched, before):
        for name, value in attributes.items():
            if vars(holder).get(name) is not value:
                setattr(holder, name, value)


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    """In place of Triton's own, a `noting_driver.Driver`."""
    import triton

    from kernels.runtime.noting_driver import Driver

    fake = Driver()
    monkeypatch.setattr(triton.runtime.driver, "_active", fake)
    return fake
