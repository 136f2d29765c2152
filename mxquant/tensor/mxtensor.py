"""MXTensor: a tensor subclass that holds packed codes and scales and behaves as the tensor that they encode.

Its operators are in `views`, `lifecycle`, `matmul` and `grouped`, which register them in `dispatch`. An operation that
cannot be done on packed codes raises and names `.dequantize()`: nothing dequantizes implicitly.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import sys
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from mxquant.backends.base import CANONICAL, Operand
from mxquant.formats.spec import Format, get_format
from mxquant.scheme import Scheme
from mxquant.tensor.checks import as_bits, check_multiplier, check_operand
from mxquant.tensor.dequantize import canonical_form, dequantize
from mxquant.tensor.dispatch import FUNCTIONS, NAMED_OPERATORS, OPERATORS
from mxquant.tensor.exporters import refuse_torchscript_trace, refuse_unwrapped_export
from mxquant.tensor.metadata import Metadata, check_dtype, logical_shape, physical_shape

_logger = logging.getLogger("mxquant")
_SHARED_ACTIVATION_SCALE = (
    "one static activation scale for %d experts: the range of each one's own activations is lost. Give one for each "
    "expert where there are such, or none to have them computed at run time"
)
_FROZEN = (
    "requires_grad_(True) leaves quantized weights frozen: packed codes cannot be trained. Train adapters on top "
    "(LoRA), or call mxquant.dequantize_(model) before it to train the weights themselves"
)
_COPYING_REQUIRES_GRAD = (torch.nn.Parameter.__new__.__code__, torch.nn.Module._load_from_state_dict.__code__)
_NO_MEMORY = 1 << 62  # beyond what processors and GPUs can address
# NOTE: increase it when an operator of `torch.ops.mxquant` changes its arguments: compile caches on users' disks hold
# graphs that call the old one.
_OPERATORS = 4
_OWN_ATTRIBUTES = frozenset((*Operand._fields, "metadata", "backend", "_is_param"))


class MXTensor(torch.Tensor):
    """A tensor of any rank, quantized in blocks along one axis.

    Made by `mxquant.quantize`, `MXTensor.from_qdata` and `mxquant.quantize_`. `shape` and `dtype` are those of the
    decoded values, strides are dense, `nbytes` counts the real bytes.

    Attributes:
        qdata: packed codes, uint8 [..., packed bytes]: the other axes in order, the blocked axis last.
        scale: scale bits, uint8 [..., blocks]: E8M0, or E4M3 for NVFP4.
        per_tensor_scale: NVFP4's multiplier, fp32, 0-dim or [..., 1] over the other axes; None for MX formats.
        activation_scale: static scale of the activations, fp32, 0-dim or [E, 1, 1] for a stack; or None. Set it with
            `with_activation`: `metadata.scheme` says whether there is one.
        metadata: the frozen `Metadata`.
        backend: name of the requested backend, or "auto". Never saved.
    """

    qdata: Tensor
    scale: Tensor
    per_tensor_scale: Tensor | None
    activation_scale: Tensor | None
    metadata: Metadata
    backend: str

    def __new__(
        cls,
        operand: Operand | MXTensor,
        metadata: Metadata | None = None,
        shape: Sequence[int] = (),
        backend: str = "auto",
        requires_grad: bool = False,
    ) -> MXTensor:
        if isinstance(operand, MXTensor):  # accelerate moves weights by `type(parameter)(value, requires_grad=...)`
            return cast(MXTensor, torch.nn.Parameter(operand, requires_grad))
        if metadata is None:
            raise TypeError("MXTensor is made by mxquant.quantize or MXTensor.from_qdata, not of values alone")
        metadata.scheme.check_length(shape[metadata.axis])
        static = operand.activation_scale is not None
        if metadata.scheme.static_activation_scale != static:
            metadata = metadata.with_scheme(static_activation_scale=static)
        tensor: MXTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            shape,
            strides=_dense_strides(shape, metadata.axis),
            dtype=metadata.dtype,
            device=operand.qdata.device,
            requires_grad=requires_grad,
        )
        # NOTE: not in __init__, which would run for the parameter above too.
        tensor.qdata, tensor.scale, tensor.per_tensor_scale, tensor.activation_scale = operand
        tensor.metadata, tensor.backend = metadata, backend
        return tensor

    @staticmethod
    def from_qdata(
        qdata: Tensor,
        scale: Tensor,
        format: str,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype = torch.bfloat16,
        axis: int = -1,
        per_tensor_scale: Tensor | None = None,
    ) -> MXTensor:
        """An MXTensor around existing codes and scales, without a copy.

        Args:
            qdata: uint8 [..., packed bytes], the blocked axis last. 8-bit floats are taken as their bits.
            scale: uint8 [..., blocks]. 8-bit floats are taken as their bits.
            format: a weight format's name.
            shape: logical shape; None: as many codes as fill the bytes of `qdata`, with `axis` in its place.
            dtype: of the decoded values: bf16, fp16, fp32 or fp64.
            axis: the blocked axis in the logical shape.
            per_tensor_scale: for NVFP4 only: fp32 multiplier, one element, or [..., 1] over the other axes.

        Raises:
            ValueError: a shape does not fit, or a per-tensor scale is missing or superfluous.
            TypeError: a wrong dtype.
        """
        fmt = get_format(format)
        qdata, scale = as_bits("qdata", qdata), as_bits("scale", scale)
        if qdata.dim() == 0:
            raise ValueError("qdata is 0-dim; it is [..., packed bytes] with the blocked axis last")
        if type(axis) is not int:
            raise TypeError(f"axis is one integer; got {axis!r}")
        if not -qdata.dim() <= axis < qdata.dim():
            raise ValueError(f"axis {axis} is out of range for a tensor of rank {qdata.dim()}")
        axis = axis if axis < 0 else axis - qdata.dim()
        if shape is None:
            codes = qdata.shape[-1] // fmt.bytes_per_group * fmt.codes_per_group
            shape = logical_shape((*qdata.shape[:-1], codes), axis)
        if not isinstance(shape, Sequence) or not all(isinstance(n, (int, torch.SymInt)) and n >= 0 for n in shape):
            raise TypeError(f"shape is a sequence of sizes; got {shape!r}")
        if len(shape) != qdata.dim():
            raise ValueError(
                f"shape {tuple(shape)} has rank {len(shape)}, qdata {tuple(qdata.shape)} rank {qdata.dim()}"
            )
        metadata = Metadata(Scheme(fmt.name), axis, check_dtype(dtype))
        return MXTensor(check_operand(Operand(qdata, scale, per_tensor_scale), metadata, shape), metadata, tuple(shape))

    @property
    def format(self) -> str:
        return self.metadata.scheme.weight

    @property
    def axis(self) -> int:
        """The blocked axis, negative."""
        return self.metadata.axis

    @property
    def activation(self) -> str | None:
        return self.metadata.scheme.activation

    @property
    def data(self) -> MXTensor:
        return self.detach()  # type: ignore[return-value]

    @data.setter
    def data(self, value: Tensor) -> None:
        """Take the inner tensors of another MXTensor. torch's own setter would silently change nothing."""
        if isinstance(value, MXTensor) and value.dtype != self.dtype and self._is_cast_of(value):
            self._become(value)
            return
        alike = isinstance(value, MXTensor) and value.metadata == self.metadata
        if not isinstance(value, MXTensor) or not alike or value.shape != self.shape or value.device != self.device:
            raise TypeError(
                f"cannot set the data of {self!r} to {brief(value)}: metadata, shape and device must be the same. "
                "Assign a new torch.nn.Parameter to the module instead"
            )
        self.qdata, self.scale, self.per_tensor_scale, self.activation_scale = value.operand

    def _is_cast_of(self, value: MXTensor) -> bool:
        """Whether the other has the same shape, device and metadata but for the dtype that it stands for."""
        recast = dataclasses.replace(value.metadata, dtype=self.metadata.dtype)
        return recast == self.metadata and value.shape == self.shape and value.device == self.device

    def _become(self, value: MXTensor) -> None:
        """Exchange this tensor's content for that of `value`, of another dtype, as `module.to()` does.

        `param.data = param.data.float()` comes here, by which peft's `prepare_model_for_kbit_training` casts a model.
        """
        new = type(self)(value.operand, value.metadata, value.shape, self.backend)
        new.__dict__.update(self.foreign_attributes() | self.parameter_mark())
        torch.utils.swap_tensors(self, new)

    @property
    def operand(self) -> Operand:
        """The inner tensors as they are, in `metadata.layout`."""
        return Operand(self.qdata, self.scale, self.per_tensor_scale, self.activation_scale)

    def data_ptr(self) -> int:
        """An address that tensors of the same memory share: accelerate recognizes tied weights by it.

        Nothing is stored there, so that a kernel that mistakes packed codes for values fails.
        """
        address = self.qdata.data_ptr()
        return address | _NO_MEMORY if address else 0

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Real bytes of all inner tensors."""
        return sum(tensor.nbytes for tensor in self.operand if tensor is not None)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values as an ordinary, contiguous tensor of the logical shape, in `dtype` (default: the tensor's own).

        Computed as code x scale (x per-tensor scale) in fp32 or fp64, rotated back if rotated, and rounded once. Not
        differentiable.

        Raises:
            TypeError: `dtype` is not bf16, fp16, fp32 or fp64.
        """
        return dequantize(self.operand, self.metadata, self.shape, self.metadata.dtype if dtype is None else dtype)

    def with_activation(
        self, activation: str | None, scale_mode: str | None = None, scale: Tensor | None = None
    ) -> MXTensor:
        """The same bytes, with activations quantized otherwise.

        NOTE: the format applies to every matmul along the blocked axis, gradients included. If the forward contracts
        across the blocks (`x @ weight` of a weight [K, N] blocked along N), use a weight-only tensor.

        Args:
            activation: an activation format's name, or None for weight-only.
            scale_mode: of a format that has modes; None: its default.
            scale: static fp32 scale (NVFP4's per-tensor scale, FP8's scale): one element, or E for a stack of E
                matrices; None: computed at run time.

        Raises:
            ValueError: an unknown format or mode, or a scale that the format cannot have or of a wrong shape.
            TypeError: a scale that is not fp32 on the tensor's device.
        """
        metadata = self.metadata.with_scheme(
            activation=activation, activation_scale_mode=scale_mode, static_activation_scale=scale is not None
        )
        static = None if scale is None else self._static_scale(scale)
        return self.rewrap(self.operand._replace(activation_scale=static), metadata)

    def _static_scale(self, scale: Tensor) -> Tensor:
        check_multiplier("a static activation scale", scale, self.device)
        if self.dim() == 3 and self.axis != -3 and scale.numel() == self.shape[0] > 1:
            return scale.detach().reshape(-1, 1, 1)
        if scale.numel() != 1:
            stack = f", or {self.shape[0]}, one for each matrix" if self.dim() == 3 else ""
            raise ValueError(f"a static activation scale has one element{stack}; got shape {tuple(scale.shape)}")
        if self.dim() == 3 and self.shape[0] > 1:
            _logger.warning(_SHARED_ACTIVATION_SCALE, self.shape[0])
        return scale.detach().reshape(())

    def rewrap(
        self, operand: Operand, metadata: Metadata | None = None, shape: Sequence[int] | None = None
    ) -> MXTensor:
        """A tensor of the same class and backend with other inner tensors, metadata or shape."""
        shape = self.shape if shape is None else shape
        if torch.is_inference_mode_enabled() and not self.is_inference():
            # A view of a tensor made outside inference mode is no inference tensor either.
            with torch.inference_mode(False):
                return type(self)(operand, metadata or self.metadata, shape, self.backend)
        return type(self)(operand, metadata or self.metadata, shape, self.backend)

    def canonical(self) -> MXTensor:
        """The same tensor in the canonical layout; itself if it is."""
        if self.metadata.layout == CANONICAL:
            return self
        return self.rewrap(*canonical_form(self.operand, self.metadata, self.shape))

    def foreign_attributes(self) -> dict[str, Any]:
        """Attributes that other code put on the tensor (weight loaders, sharding marks). A replacement keeps them."""
        return {name: value for name, value in self.__dict__.items() if name not in _OWN_ATTRIBUTES}

    def parameter_mark(self) -> dict[str, Any]:
        """The attribute that makes a subclass instance an `nn.Parameter`. A copy keeps it."""
        return {"_is_param": True} if isinstance(self, torch.nn.Parameter) else {}

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        scheme = self.metadata.scheme
        rotated = f", rotation={scheme.rotation}" if scheme.rotation else ""
        grad = ", requires_grad=True" if self.requires_grad else ""
        kind, dtype = f"{scheme.weight}, {scheme.precision}{rotated}", str(self.dtype).removeprefix("torch.")
        return f"{type(self).__name__}({kind}, shape={tuple(self.shape)}, dtype={dtype}, device={self.device}{grad})"

    # Copying and sharing: torch's own versions need a storage. Pickling is in `state`.

    def __deepcopy__(self, memo: dict[int, Any]) -> MXTensor:
        copied = memo[id(self)] = self.rewrap(self.operand.map(torch.clone))
        copied.__dict__.update(copy.deepcopy(self.foreign_attributes() | self.parameter_mark(), memo))
        return copied

    def __copy__(self) -> MXTensor:
        copied = self.rewrap(self.operand)
        copied.__dict__.update(self.foreign_attributes() | self.parameter_mark())
        return copied

    def requires_grad_(self, requires_grad: bool = True) -> MXTensor:
        """Does nothing, as codes cannot be trained, and warns of it once a process."""
        # NOTE: torch calls it to copy another parameter's flag. That is no wish to train, and not warned of.
        if requires_grad and sys._getframe(1).f_code not in _COPYING_REQUIRES_GRAD:
            _warn_of_frozen_weights()
        return self

    def share_memory_(self) -> MXTensor:
        self.operand.map(Tensor.share_memory_)
        return self

    def is_shared(self) -> bool:
        return all(inner.is_shared() for inner in self.operand if inner is not None)

    # The protocol of wrapper subclasses.

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Metadata, str]]:
        return [name for name in Operand._fields if getattr(self, name) is not None], (self.metadata, self.backend)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: tuple[Metadata, str], outer_size: Sequence[int], outer_stride: Any
    ) -> MXTensor:
        metadata, backend = context
        operand = Operand(*(inner.get(name) for name in Operand._fields))  # type: ignore[arg-type]
        if any(scale is not None and scale.dtype != torch.float32 for scale in operand[2:]):
            raise TypeError(
                "the scales of a quantized weight are no longer float32: .to(dtype) casts them once parameters are "
                "unwrapped; cast before unwrap_tensor_subclass_parameters"
            )
        return cls(operand, metadata, outer_size, backend)

    def _stable_hash_for_caching(self) -> str:
        """The key of this tensor's kind in compile caches: the class, metadata, backend and the operators' version."""
        return f"{type(self).__name__}:{self.metadata.to_json()}:{self.backend}:{_OPERATORS}"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # The short cut is inside: it reads attributes of the tensor, and each would come back here.
        with torch._C.DisableTorchFunctionSubclass():
            if not torch.compiler.is_compiling():
                refuse_torchscript_trace()
                if (short_cut := FUNCTIONS.get(func)) is not None:
                    result = short_cut(*args, **kwargs)
                    if result is not NotImplemented:
                        return result
            try:
                return func(*args, **kwargs)
            except RuntimeError as error:
                refuse_unwrapped_export(error)
                raise

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        implementation = OPERATORS.get(func) or NAMED_OPERATORS.get(str(func))
        if implementation is not None:
            return implementation(*args, **kwargs)
        # In inference mode composite operators are not decomposed on the way here.
        result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        raise NotImplementedError(
            f"{func} is not implemented on the packed codes of a quantized tensor; call .dequantize() first for an "
            "ordinary tensor, or mxquant.dequantize_(model)"
        )


class EmulatedMXTensor(MXTensor):
    """An MXTensor whose matmuls are emulated.

    `quantize_` makes it where no native backend computes the config on the weight's device, or if backend="emulation"
    is named. Moving to another device chooses the class again. It is saved as an MXTensor.
    """


@functools.cache
def _warn_of_frozen_weights() -> None:
    _logger.warning(_FROZEN)


def brief(value: Any) -> str:
    """One short line about any tensor, without its values."""
    if isinstance(value, Tensor) and not isinstance(value, MXTensor):
        return f"an ordinary tensor of shape {tuple(value.shape)}, {value.dtype}, on {value.device}"
    return repr(value)


def block_format(tensor: MXTensor) -> Format:
    return get_format(tensor.metadata.scheme.weight)


def _dense_strides(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    """Strides of a dense tensor whose innermost axis is `axis`."""
    physical = physical_shape(shape, axis)
    strides = [1]
    for size in reversed(physical[1:]):
        strides.append(strides[-1] * max(size, 1) if isinstance(size, int) else strides[-1] * size)
    return logical_shape(strides[::-1], axis)
