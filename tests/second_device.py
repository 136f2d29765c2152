"""A second device on a machine that has one: tensors keep their values on the CPU and are told apart by their storages.

While `SecondDevice` is entered, `.to(DEVICE)`, `torch.empty(..., device=DEVICE)` and the like make storages that count
as the device's, `tensor.device` says so, an operation on tensors of both places is the error that a GPU gives, and the
bytes of live storages are added up. What happens inside of one call of torch (its workspaces) is not seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, Future
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from mxquant import MXTensor
from mxquant.formats import table

CPU, DEVICE = torch.device("cpu"), torch.device("xpu", 0)  # a type for which mxquant has no kernels
_GET_DEVICE = Tensor.device.__get__  # type: ignore[attr-defined]
_NEW = {Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full, Tensor.new_tensor}
_MAY_CROSS = {
    Tensor.copy_,
    Tensor.__setitem__,
    Tensor.__getitem__,
    Tensor.data.__set__,  # type: ignore[attr-defined]
    torch._has_compatible_shallow_copy_type,
}
_storages: dict[int, StorageWeakRef] = {}
"""Those of the device, by the addresses that their weak references keep from being given to others. Of the process, as
mxquant keeps tables for each device."""


def parts_of(tensor: Tensor) -> list[Tensor]:
    inner = list(tensor.operand) if isinstance(tensor, MXTensor) else [tensor]
    return [part for part in inner if part is not None]


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from tensors_in(one)
    elif isinstance(value, dict):
        yield from tensors_in(tuple(value.values()))


def place_of(tensor: Tensor) -> torch.device:
    with torch._C.DisableTorchFunction():
        storage = parts_of(tensor)[0].untyped_storage()
    return DEVICE if storage._cdata in _storages else CPU


class _SameThread(Executor):
    def __init__(self, max_workers: int) -> None:
        pass

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(function(*args, **kwargs))
        return done


class SecondDevice(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        """The most bytes that were on the device at once."""

    def __enter__(self) -> SecondDevice:
        make = Tensor._make_wrapper_subclass
        self._patches = ExitStack()
        # torch has no wrapper for a device that is not here, and a mode is of one thread.
        wrapper = patch.object(
            Tensor, "_make_wrapper_subclass", lambda *args, **kwargs: make(*args, **kwargs | {"device": CPU})
        )
        self._patches.enter_context(wrapper)
        self._patches.enter_context(patch.object(table, "ThreadPoolExecutor", _SameThread))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    @staticmethod
    def live() -> int:
        """Bytes that are on the device now."""
        for key in [key for key, reference in _storages.items() if reference.expired()]:
            del _storages[key]
        with torch._C.DisableTorchFunction():
            return sum(torch.UntypedStorage._new_with_weak_ptr(ref.cdata).nbytes() for ref in _storages.values())

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func == _GET_DEVICE:
            return place_of(args[0])
        tensors = list(tensors_in((args, kwargs)))
        place, args, kwargs = _without_device(func, tensors, args, kwargs)
        output = func(*args, **kwargs)
        if func in (Tensor.to, Tensor.cpu) and place_of(tensors[0]) != place and _shares(output, tensors[0]):
            output = output.clone()
        if place == DEVICE:
            self._tag(output, tensors)
        return output

    def _tag(self, output: Any, given: list[Tensor]) -> None:
        before = {part.untyped_storage()._cdata for one in given for part in parts_of(one)}
        found = [part.untyped_storage() for one in tensors_in(output) for part in parts_of(one)]
        storages = {storage._cdata: storage for storage in found}
        made = {key: StorageWeakRef(one) for key, one in storages.items() if key not in before | _storages.keys()}
        if made:
            _storages.update(made)
            self.peak = max(self.peak, self.live())


def _without_device(
    func: Any, tensors: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.device, tuple[Any, ...], dict[str, Any]]:
    """Where the result is, and the arguments without the place that is not here.

    Raises:
        RuntimeError: tensors of both places, where a GPU takes none from elsewhere.
    """
    if func is Tensor.to:
        others = [one for one in (*args[1:], *kwargs.values()) if isinstance(one, (torch.device, str, Tensor))]
        named = [place_of(one) if isinstance(one, Tensor) else torch.device(one) for one in others]
        return (
            named[0] if named else place_of(tensors[0]),
            tuple(CPU if isinstance(one, (torch.device, str)) else one for one in args),
            {key: CPU if isinstance(one, (torch.device, str)) else one for key, one in kwargs.items()},
        )
    if func is Tensor.cpu:
        return CPU, args, kwargs
    if kwargs.get("device") is not None:
        place = torch.device(kwargs["device"])
        return place, args, kwargs | {"device": CPU if place == DEVICE else place}
    if func in _NEW:
        return place_of(args[0]), args, kwargs
    places = {place_of(one) for one in tensors if one.dim() > 0 or place_of(one) == DEVICE}
    if len(places) > 1 and func not in _MAY_CROSS:
        raise RuntimeError(f"Expected all tensors to be on the same device, but {func} got {places}")
    return (place_of(args[0]) if len(places) > 1 else next(iter(places), CPU)), args, kwargs


def _shares(one: Tensor, other: Tensor) -> bool:
    return any(a.untyped_storage()._cdata == b.untyped_storage()._cdata for a, b in _pairs(one, other))


def _pairs(one: Tensor, other: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(parts_of(one), parts_of(other), strict=True)
