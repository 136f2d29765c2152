"""Running a model on another device than its own, one transformer block at a time.

A unit is a module that computes on the device as a whole: a transformer block, or a layer outside of the blocks whose
weight is there. When a unit is called, its parameters, its buffers and a copy of its arguments move to the device. Its
outputs move back to the model's device. A unit that runs by itself stays on the device until another one runs. A unit
that the model calls moves back at once, since the next module may share tensors with it. So the device holds one unit
and what one call of it needs. The original tensors stay in the model's memory meanwhile, and are put back afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from mxquant.algorithms.forward_calls import Call, clone_call, move_tensors, tensor_version
from mxquant.modules.quantize_target import Target

_Slots = dict[str, Tensor | None]
"""A module's own parameters, or its buffers."""


class BlockOffload:
    """Where a model is stored and where it computes. On exit, all but the quantized weights moves back."""

    def __init__(self, model: nn.Module, device: torch.device | None = None, targets: Sequence[Target] = ()) -> None:
        """
        Args:
            device: where units compute; None: on the model's device, and nothing moves.
            targets: weights that will stay on the device. Their layers are units where no other unit contains them.
        """
        stored = chain(model.parameters(), model.buffers())
        devices = (tensor.device for tensor in stored if not tensor.is_meta and tensor.device != device)
        self.model_device = next(devices, device or torch.device("cpu"))
        """Device of the first tensor that is not on `device`. Batches and outputs are kept there."""
        self.device = None if self.model_device == device else device
        self._layers = {site.module for target in targets for site in target.sites}
        self._loaded: nn.Module | None = None
        self._data: dict[Tensor, Tensor] = {}
        """The original data of the loaded unit's parameters."""
        self._slots: list[tuple[_Slots, _Slots, dict[str, tuple[Tensor, int]]]] = []
        """For each module of the loaded unit: its slots, a copy of them from before, the moved tensors and versions."""

    def __enter__(self) -> BlockOffload:
        return self

    def __exit__(self, *error: object) -> None:
        self._unload()

    def keep_on_device(self, target: Target) -> None:
        """Leave a weight that has just been quantized on the device, and the biases beside it."""
        for replaced in (target.parameter, *(bias for site in target.sites for bias in site.biases)):
            self._data.pop(replaced, None)

    def call(self, unit: nn.Module, forward: Callable[..., Any], call: Call) -> Any:
        """The outputs, on the model's device, of a unit's `forward` for a copy of the arguments."""
        if self.device is None:
            args, kwargs = clone_call(call)
            return forward(*args, **kwargs)
        self._load(unit)
        args, kwargs = clone_call(call, self.device)
        return self._return_output(forward(*args, **kwargs))

    @contextmanager
    def offloaded(
        self, module: nn.Module, units: Sequence[nn.Module], excluded: Sequence[nn.Module] = ()
    ) -> Iterator[torch.device | None]:
        """Within this context a call of `module` runs each of its units on the device.

        Args:
            units: layers outside of them with weights on the device are units as well.
            excluded: modules that stay as they are.

        Yields:
            the device that the arguments of `module` must be on; None: any.
        """
        if self.device is None:
            yield None
            return
        if module is not self._loaded:
            self._unload()  # its tensors on the device would make units of the modules that share them
        found = list(dict.fromkeys(self._outermost_units(module, set(units), set(excluded))))
        if found == [module]:
            self._load(module)
            yield self.device
            return
        handles: list[Any] = []
        try:
            for unit in found:
                # Before the hooks that look at the arguments.
                handles.append(unit.register_forward_pre_hook(self._load_with_inputs, prepend=True, with_kwargs=True))
                handles.append(unit.register_forward_hook(lambda _, args, output: self._return_output(output)))
            yield None
        finally:
            for handle in handles:
                handle.remove()

    def _load_with_inputs(self, unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        self._load(unit)
        return clone_call((args, kwargs), self.device)

    def _return_output(self, output: Any) -> Any:
        """Move a unit's outputs, then the unit itself, back to the model's device."""
        output = move_tensors(output, self.model_device)
        self._unload()
        return output

    def _outermost_units(
        self, module: nn.Module, units: set[nn.Module], excluded: set[nn.Module]
    ) -> Iterator[nn.Module]:
        if module in excluded:
            return
        own = (tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None)
        if module in units or module in self._layers or any(tensor.device == self.device for tensor in own):
            yield module
            return
        for child in module.children():
            yield from self._outermost_units(child, units, excluded)

    def _load(self, unit: nn.Module) -> None:
        """Move a unit's parameters and buffers to the device. A unit that was there moves back first."""
        if unit is self._loaded:
            return
        self._unload()
        self._loaded = unit
        copies: dict[Tensor, Tensor] = {}
        for module in unit.modules():
            for slots in cast(tuple[_Slots, ...], (module._parameters, module._buffers)):
                placed: dict[str, tuple[Tensor, int]] = {}
                self._slots.append((slots, dict(slots), placed))
                for name, tensor in slots.items():
                    if tensor is None or tensor.is_meta or tensor.device == self.device:
                        continue
                    # NOTE: others, such as optimizers, refer to a plain parameter: it stays the same object. Subclasses
                    # and buffers have no data that could be exchanged, so that a copy takes their place.
                    if type(tensor) is nn.Parameter:
                        self._data[tensor] = tensor.data
                        tensor.data = tensor.data.to(self.device)
                        continue
                    if tensor not in copies:
                        copies[tensor] = tensor.to(self.device)
                    placed[name] = copies[tensor], tensor_version(copies[tensor])
                    slots[name] = copies[tensor]

    def _unload(self) -> None:
        """Put the original tensors of the loaded unit back, with what its forward changed in place."""
        for parameter, data in self._data.items():
            parameter.data = data
        for slots, originals, placed in self._slots:
            for name, tensor in slots.items():
                original, (copied, version) = originals.get(name), placed.get(name, (None, 0))
                if tensor is None or tensor is original:
                    continue
                if original is not None and tensor is copied:
                    is_unchanged = tensor_version(tensor) == version
                    slots[name] = original if is_unchanged else original.copy_(tensor)
                elif not isinstance(tensor, nn.Parameter):  # a buffer that the forward has made
                    slots[name] = tensor.to(self.model_device)
        self._data.clear()
        self._slots.clear()
        self._loaded = None


def check_movable(model: nn.Module) -> None:
    """Refuse a model whose blocks accelerate's hooks place, with a ValueError."""
    hooked = next((name for name, module in model.named_modules() if hasattr(module, "_hf_hook")), None)
    if hooked is not None:
        raise ValueError(
            f"{hooked or 'the model'} has a hook of accelerate's that says where it computes, so that GPTQ cannot run "
            "it on another device: load the model without device_map, or leave device out"
        )
