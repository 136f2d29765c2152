"""Running a model on another device than its own, one part of it there at a time.

A part is a module that computes on the device as a whole: a transformer block, or a layer outside of the blocks whose
weight is there. When it is called, its parameters and buffers and a copy of what it is called with go to the device;
what it gives comes back to where the model is. A part that runs by itself stays there until another one does; one that
the model calls goes home at once, as what comes next may share tensors with it. So the device holds one part and what
one call of it needs. What the model had at home is kept there meanwhile, and put back as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from types import TracebackType
from typing import Any, cast

import torch
from torch import Tensor, nn

from mxquant.algorithms.calls import Call, fresh, moved, version_of
from mxquant.modules.quantize_target import Target

_Slots = dict[str, Tensor | None]
"""A module's own parameters, or its buffers."""


class Placement:
    """Where a model is and where it computes. Leaving its context puts everything back but what `keep` was told."""

    def __init__(self, model: nn.Module, device: torch.device | None = None, targets: Sequence[Target] = ()) -> None:
        """
        Args:
            device: where parts compute; None: where the model is, and nothing is moved.
            targets: weights that will stay on the device: their layers are parts, where they are not inside of one.
        """
        held = chain(model.parameters(), model.buffers())
        homes = (tensor.device for tensor in held if not tensor.is_meta and tensor.device != device)
        self.home = next(homes, device or torch.device("cpu"))
        """Where the model has a tensor that is not on the device: the place of batches and of what parts give."""
        self.device = None if self.home == device else device
        self._layers = {site.module for target in targets for site in target.sites}
        self._loaded: nn.Module | None = None
        self._data: dict[Tensor, Tensor] = {}
        """What the parameters of the loaded part hold at home."""
        self._slots: list[tuple[_Slots, _Slots, dict[str, tuple[Tensor, int]]]] = []
        """Of the loaded part's modules: what they hold, what they held, and the copies there with their versions."""

    def __enter__(self) -> Placement:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._release()

    def keep(self, target: Target) -> None:
        """Leave on the device what has taken the place of a weight, and the biases beside it."""
        for gone in (target.parameter, *(bias for site in target.sites for bias in site.biases)):
            self._data.pop(gone, None)

    def call(self, part: nn.Module, forward: Callable[..., Any], call: Call) -> Any:
        """What `forward`, the part's own, gives at home for a copy of a call."""
        if self.device is None:
            args, kwargs = fresh(call)
            return forward(*args, **kwargs)
        self._load(part)
        args, kwargs = fresh(call, self.device)
        return self._given(forward(*args, **kwargs))

    @contextmanager
    def running(
        self, module: nn.Module, parts: Sequence[nn.Module], apart: Sequence[nn.Module] = ()
    ) -> Iterator[torch.device | None]:
        """Let a module be called, each of its parts on the device; gives where its arguments have to be (None: as they
        are).

        Args:
            parts: beside the layers outside of them whose weights are on the device or will be.
            apart: modules that are left as they are.
        """
        if self.device is None:
            yield None
            return
        if module is not self._loaded:
            self._release()  # what it shares with other modules would make parts of them
        found = list(dict.fromkeys(self._outermost(module, set(parts), set(apart))))
        if found == [module]:
            self._load(module)
            yield self.device
            return
        handles: list[Any] = []
        try:
            for part in found:
                # Before the hooks that look at the arguments.
                handles.append(part.register_forward_pre_hook(self._take, prepend=True, with_kwargs=True))
                handles.append(part.register_forward_hook(lambda _, args, output: self._given(output)))
            yield None
        finally:
            for handle in handles:
                handle.remove()

    def _take(self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        self._load(part)
        return fresh((args, kwargs), self.device)

    def _given(self, output: Any) -> Any:
        """What the loaded part gives, at home, where the part goes as well."""
        output = moved(output, self.home)
        self._release()
        return output

    def _outermost(self, module: nn.Module, parts: set[nn.Module], apart: set[nn.Module]) -> Iterator[nn.Module]:
        if module in apart:
            return
        own = (tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None)
        if module in parts or module in self._layers or any(tensor.device == self.device for tensor in own):
            yield module
            return
        for child in module.children():
            yield from self._outermost(child, parts, apart)

    def _load(self, part: nn.Module) -> None:
        if part is self._loaded:
            return
        self._release()
        self._loaded = part
        copies: dict[Tensor, Tensor] = {}
        for module in part.modules():
            for slots in cast(tuple[_Slots, ...], (module._parameters, module._buffers)):
                placed: dict[str, tuple[Tensor, int]] = {}
                self._slots.append((slots, dict(slots), placed))
                for name, tensor in slots.items():
                    if tensor is None or tensor.is_meta or tensor.device == self.device:
                        continue
                    if type(tensor) is nn.Parameter:  # which others know by its identity
                        self._data[tensor] = tensor.data
                        tensor.data = tensor.data.to(self.device)
                        continue
                    if tensor not in copies:
                        copies[tensor] = tensor.to(self.device)
                    placed[name] = copies[tensor], version_of(copies[tensor])
                    slots[name] = copies[tensor]

    def _release(self) -> None:
        for parameter, data in self._data.items():
            parameter.data = data
        for slots, held, placed in self._slots:
            for name, tensor in slots.items():
                was, (there, version) = held.get(name), placed.get(name, (None, 0))
                if tensor is None or tensor is was:
                    continue
                if was is not None and tensor is there:
                    slots[name] = was if version_of(tensor) == version else was.copy_(tensor)
                elif not isinstance(tensor, nn.Parameter):  # a buffer that the forward has made
                    slots[name] = tensor.to(self.home)
        self._data.clear()
        self._slots.clear()
        self._loaded = None
