"""What `quantize_` refuses, before anything is changed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from mxquant.backends import select as select_backend
from mxquant.config import _MXConfig
from mxquant.formats import get_format
from mxquant.modules.experts_weight import stacked
from mxquant.select import Target
from mxquant.tensor import MXTensor, describe

_SKIP_IT = "skip it (map it to None, or filter_fn)"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_weight(
    name: str,
    weight: Tensor,
    config: _MXConfig,
    device: torch.device | None = None,
    k_axis: int = -1,
    stack: int | None = None,
) -> None:
    """Refuse a weight that `config` cannot be applied to on `device` (None: where it is). No copy of it is made.

    Raises:
        ValueError, TypeError, NotImplementedError: naming the weight; see `quantize_`.
    """
    if isinstance(weight, MXTensor):
        raise ValueError(
            f"{name} is quantized already ({weight!r}); call dequantize_(model) first to quantize anew, or {_SKIP_IT}"
        )
    if is_lazy(weight):
        raise ValueError(f"{name} is not initialized yet; run the model once first, or {_SKIP_IT}")
    if nn.Parameter not in type(weight).__mro__ or weight.layout != torch.strided:
        raise NotImplementedError(
            f"{name} is a {type(weight).__name__} of layout {weight.layout}; only ordinary, dense tensors can be "
            f"quantized. Convert it, or {_SKIP_IT}"
        )
    shape = tuple(weight.shape)
    if weight.dtype not in _DTYPES:
        accepted = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        raise TypeError(f"{name} is {weight.dtype}; only {accepted} can be quantized; convert it, or {_SKIP_IT}")
    if weight.is_meta:
        raise NotImplementedError(
            f"{name} {shape} is on the meta device and has no values; load the model's weights first, or {_SKIP_IT}"
        )
    if weight.numel() == 0:
        raise ValueError(f"{name} {shape} is empty: there is nothing to quantize; {_SKIP_IT}")
    if stack is not None and (weight.dim() != 2 or weight.shape[0] % stack):
        raise ValueError(
            f"{name}: shape {shape} is no stack of {stack} matrices, one below the other, as its layout's num_experts "
            f"says; see register_experts_layout, or {_SKIP_IT}"
        )
    _check_values(name, weight, config.rotation)
    try:
        matrices = stack if stack and k_axis == -2 else 1  # of a 2-D parameter, one below the other along K
        config.scheme.check_length(weight.shape[k_axis] // matrices)
    except ValueError as error:
        raise ValueError(f"{name} {shape}: {error}, or {_SKIP_IT}") from None
    if config.backend != "auto":
        _check_backend(name, weight, config, device, k_axis, stack)


def _check_values(name: str, weight: Tensor, rotation: int | None) -> None:
    low, high = torch.aminmax(weight.detach())
    largest = max(-low.item(), high.item()) * (rotation or 1)  # a block may hold its sum in one place
    if not largest <= torch.finfo(torch.float32).max:
        found = "holds values beyond fp32's range" if weight.dtype == torch.float64 else "holds NaN or Inf"
        if rotation is not None and largest < math.inf:
            found = "holds values that may leave fp32's range when they are rotated"
        raise ValueError(f"{name} {tuple(weight.shape)} {found}; repair the weight, or {_SKIP_IT}")


def check_stack(target: Target) -> None:
    try:
        stacked(target.parameter, target.stack)
    except ValueError as error:
        raise ValueError(f"{target.name}: {error}; see register_experts_layout, or {_SKIP_IT}") from None


def _check_backend(
    name: str, weight: Tensor, config: _MXConfig, device: torch.device | None, k_axis: int, stack: int | None
) -> None:
    """Ask the named backend about the weight to be, by a stand-in of its shape without values."""
    fmt = get_format(config.format)
    like = torch.empty(weight.shape, device="meta")
    physical = (like if stack is None else stacked(like, stack)).movedim(k_axis, -1).shape
    *lead, length = physical
    stand_in = MXTensor.from_qdata(
        torch.empty(*lead, fmt.packed_size(length), dtype=torch.uint8, device="meta"),
        torch.empty(*lead, fmt.num_blocks(length), dtype=torch.uint8, device="meta"),
        fmt.name,
        physical,
        weight.dtype,
        per_tensor_scale=torch.empty((), dtype=torch.float32, device="meta") if fmt.per_tensor else None,
    ).with_activation(config.activation_format, config.activation_scale_mode)
    try:
        select_backend(describe(stand_in, device=device or weight.device), config.backend)
    except ValueError as error:
        raise ValueError(f"{name} {tuple(weight.shape)}: {error}") from None


def check_calibration(calibration: object, targets: list[Target]) -> list[Any]:
    """The batches as a list, empty where no config needs any.

    Raises:
        ValueError: batches are missing, none, or not used by any config.
        TypeError: not an iterable of batches.
    """
    wanting = [target for target in targets if target.config.gptq is not None]
    if not wanting:
        if calibration is not None:
            raise ValueError(
                "calibration is given, but no config of this call has an algorithm that uses it; leave it out, or set "
                'algorithm="gptq"'
            )
        return []
    if calibration is None:
        raise ValueError(
            f'{wanting[0].name}: algorithm="gptq" needs calibration data; pass calibration=batches, an iterable of '
            "what the model is called with (tensors, tuples or dicts)"
        )
    if isinstance(calibration, (Tensor, Mapping, str)) or not isinstance(calibration, Iterable):
        raise TypeError(
            f"calibration is an iterable of batches, each a tensor, a tuple or a dict; got {type(calibration).__name__}"
            ". Put a single batch in a list"
        )
    batches = list(calibration)
    for batch in batches:
        if not isinstance(batch, (Tensor, tuple, list, Mapping)):
            raise TypeError(f"a calibration batch is a tensor, a tuple or a dict; got {type(batch).__name__}")
    if not batches:
        raise ValueError("calibration holds no batches; a generator that was used before is empty")
    if len({target.config.gptq.sequential for target in wanting if target.config.gptq}) > 1:
        raise ValueError("some configs say GPTQ(sequential=True), others False; all of one call are calibrated alike")
    return batches


def check_movable(model: nn.Module) -> None:
    """Refuse a model whose blocks cannot be run on a device of the caller's choice.

    Raises:
        ValueError: accelerate's hooks say where its modules compute.
    """
    hooked = next((name for name, module in model.named_modules() if hasattr(module, "_hf_hook")), None)
    if hooked is not None:
        raise ValueError(
            f"{hooked or 'the model'} has a hook of accelerate's that says where it computes, so that GPTQ cannot run "
            "it on another device: load the model without device_map, or leave device out"
        )
