"""The registered backends in the order in which they are asked, and the choice of one for a problem."""

from __future__ import annotations

import difflib
import functools
import logging
from typing import TypeVar

from mxquant.backends.base import ANY_LAYOUT, CANONICAL, Backend, Problem
from mxquant.backends.emulation import Emulation
from mxquant.backends.fp8 import FP8
from mxquant.backends.fp16 import FP16
from mxquant.backends.triton import Triton

_logger = logging.getLogger("mxquant")
_backends: dict[str, Backend] = {backend.name: backend for backend in (FP8(), FP16(), Triton(), Emulation())}
_DEVICES = ("cuda", "gpu", "cpu", "hip", "rocm", "xpu", "mps")
_B = TypeVar("_B", bound=type[Backend])


def register_backend(cls: _B, before: str = Emulation.name) -> _B:
    """Add a backend, to be asked before the one named `before`. Usable as a class decorator.

    Args:
        cls: a subclass of `mxquant.backends.Backend` with a new `name`.
        before: an existing backend's name; by default emulation, which takes everything.

    Raises:
        TypeError: `cls` is not a concrete subclass of Backend with a name, or sets `gates` without overriding
            `grouped_matmul`, which applies them.
        ValueError: its name or its layout's name is taken or reserved, or `before` is unknown.
    """
    if not (isinstance(cls, type) and issubclass(cls, Backend)):
        raise TypeError(f"register_backend takes a subclass of mxquant.backends.Backend; got {cls!r}")
    if not isinstance(getattr(cls, "name", None), str):
        raise TypeError(f"{cls.__name__} has no name; give it a class attribute `name`, a string")
    if cls.gates and cls.grouped_matmul is Backend.grouped_matmul:
        raise TypeError(f"{cls.__name__} sets gates, which grouped_matmul applies; override it, or leave gates False")
    if cls.name in (*_backends, "auto", ""):
        registered = f"registered: {', '.join(_backends)} (auto is reserved)"
        is_removable = cls.name in _backends and cls.name != Emulation.name
        again = f"; mxquant.backends.unregister_backend({cls.name!r}) frees it" if is_removable else ""
        raise ValueError(f"backend name {cls.name!r} is taken{again}; {registered}")
    if cls.layout is not None and cls.layout.name in (
        CANONICAL,
        *(b.layout.name for b in _backends.values() if b.layout),
    ):
        raise ValueError(
            f"layout name {cls.layout.name!r} of backend {cls.name!r} is taken; give the layout another name"
        )
    position = list(_backends).index(_known(before))
    items = list(_backends.items())
    items.insert(position, (cls.name, cls()))
    _backends.clear()
    _backends.update(items)
    preferences.cache_clear()
    return cls


def unregister_backend(name: str) -> None:
    """Remove a backend that `register_backend` added. Weights in its layout can no longer be used.

    Raises:
        ValueError: no such backend, or emulation, which everything falls back to.
    """
    if _known(name) == Emulation.name:
        raise ValueError("backend 'emulation' cannot be removed: everything falls back to it")
    del _backends[name]
    preferences.cache_clear()


def list_backends() -> list[str]:
    """Names of the registered backends, in the order in which they are asked."""
    return list(_backends)


def get_backend(name: str) -> Backend:
    """The backend called `name`.

    Raises:
        ValueError: no such backend.
    """
    return _backends[_known(name)]


def backend_of_layout(name: str) -> Backend:
    """The first backend that reads layout `name`.

    Raises:
        ValueError: no registered backend has it.
    """
    for backend in _backends.values():
        if name == (CANONICAL if backend.layout is None else backend.layout.name):
            return backend
    raise ValueError(
        f"layout {name!r} belongs to no registered backend ({', '.join(_backends)}); register the backend that made it"
    )


def candidates(problem: Problem) -> list[tuple[str, str | None]]:
    """Every backend in order with None if it takes `problem`, else the reason why not."""
    return [(name, _reject(backend, problem)) for name, backend in _backends.items()]


def _reject(backend: Backend, problem: Problem) -> str | None:
    reason, layout = backend.reject(problem), backend.layout
    if reason is None and layout is not None and problem.layout not in (ANY_LAYOUT, layout.name):
        return f"reads layout {layout.name}, the weight is in {problem.layout}: it was not prepared, or does not fit"
    return reason


def select_backend(problem: Problem, requested: str = "auto") -> Backend:
    """The first backend that takes `problem`; or the requested one, even if the weight is not in its layout.

    Raises:
        ValueError: the requested backend is unknown, or rejects the problem.
    """
    return preferences(problem, requested)[0]


@functools.lru_cache(maxsize=4096)
def preferences(problem: Problem, requested: str = "auto") -> tuple[Backend, ...]:
    """The backends that take `problem`, best first; or the requested one alone. Raises as `select`."""
    if requested != "auto":
        backend = get_backend(requested)
        reason = backend.reject(problem)
        if reason is not None:
            raise ValueError(
                f"backend {requested!r} cannot compute this matmul: {reason}. "
                'Use backend="auto" for the best one that can, or explain() for what each says'
            )
        return (backend,)
    accepting = tuple(backend for backend in _backends.values() if _reject(backend, problem) is None)
    if not accepting[0].native and problem.device.type not in ("cpu", "meta"):
        _log_emulation(problem.device.type)
    return accepting


@functools.cache
def _log_emulation(device_type: str) -> None:
    """Warn once a process and device type that a run is slow and why."""
    _logger.warning(
        "no native backend computes this matmul on %s: emulating it (dequantize, then an ordinary matmul). "
        "mxquant.explain(layer) gives each backend's reason",
        device_type,
    )


def _known(name: str) -> str:
    if name not in _backends:
        hint = ""
        if name.partition(":")[0].lower() in _DEVICES:
            hint = '; a device is no backend: leave backend="auto", which chooses one by the device of the weight'
        elif near := difflib.get_close_matches(name.lower(), _backends, n=1):
            hint = f"; did you mean {near[0]!r}?"
        raise ValueError(f"backend {name!r} is unknown; registered: {', '.join(_backends)}{hint}")
    return name
