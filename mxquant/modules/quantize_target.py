"""One weight: checked, quantized, and put in the place of the original. Every way to quantize a model comes here.

`quantize_` checks all its targets, then replaces one after the other. Loaders check sizes on the meta device before
anything is read, then check and quantize each weight as it arrives.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from mxquant.backends import Operand, select_backend
from mxquant.config import MXConfig
from mxquant.formats import get_format
from mxquant.modules.experts import ExpertsLayout
from mxquant.modules.sites import Site, TiedSites
from mxquant.scheme import Scheme
from mxquant.tensor import Metadata, MXTensor, as_weight, describe, quantize

_SKIP_IT = "skip it (map it to None, or filter_fn)"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class Target(TiedSites):
    """A parameter to quantize, everywhere it is registered."""

    config: MXConfig

    @property
    def is_experts(self) -> bool:
        return self.sites[0].kind == "experts"

    @property
    def computing_sites(self) -> tuple[Site, ...]:
        """The linear layers or blocks of experts that multiply by it, each once."""
        found = {(site.module, site.attribute): site for site in self.sites if site.kind in ("linear", "experts")}
        return tuple(found.values())

    @property
    def k_axis(self) -> int:
        """The axis that its matmul contracts."""
        return self.sites[0].k_axis

    @property
    def scheme(self) -> Scheme:
        """The config's, but that an embedding multiplies nothing: it has no activations to quantize."""
        if any(site.kind != "embedding" for site in self.sites):
            return self.config.scheme
        return replace(self.config.scheme, activation=None, activation_scale_mode=None)

    def matrices(self, weight: Tensor) -> Tensor:
        """`weight`, of the parameter's shape, as [N, K]; of experts as `ExpertsLayout.matrices` has it."""
        site = self.sites[0]
        return weight if site.layout is None else site.layout.matrices(site.module, weight)


WeightQuantizer = Callable[[Tensor, MXConfig, int, int], MXTensor]
"""(matrix, config, K axis, index of the expert or 0) -> a weight-only MXTensor of the matrix's shape."""


def round_to_nearest(matrix: Tensor, config: MXConfig, k_axis: int, index: int) -> MXTensor:
    """The default `WeightQuantizer`."""
    return quantize(
        matrix,
        config.format,
        scale_mode=config.scale_mode,
        axis=k_axis,
        nonfinite="raise",
        rotation=config.rotation,
    )


def check_target(
    target: Target, weight: Tensor | None = None, *, device: torch.device | None = None, has_values: bool = True
) -> None:
    """Refuse a weight that the target's config cannot be applied to. Nothing is copied.

    Args:
        weight: what is quantized; None: the target's parameter.
        device: where it is quantized; None: where the weight is.
        has_values: False for a weight on the meta device. Sizes and dtypes are checked, and with `device` the backend.

    Raises:
        ValueError, TypeError, NotImplementedError: naming the weight; see `quantize_`.
    """
    weight = target.parameter if weight is None else weight
    name, config = target.name, target.config
    if isinstance(weight, MXTensor):
        raise ValueError(
            f"{name} is quantized already ({weight!r}); call dequantize_(model) first to quantize anew, or {_SKIP_IT}"
        )
    if is_lazy(weight):
        raise ValueError(f"{name} is not initialized yet; run the model once first, or {_SKIP_IT}")
    is_ordinary = type(weight) is Tensor or nn.Parameter in type(weight).__mro__
    if not is_ordinary or weight.layout != torch.strided:
        raise NotImplementedError(
            f"{name} is a {type(weight).__name__} of layout {weight.layout}; only ordinary, dense tensors can be "
            f"quantized. Convert it, or {_SKIP_IT}"
        )
    shape = tuple(weight.shape)
    if weight.dtype not in _DTYPES:
        accepted = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        raise TypeError(f"{name} is {weight.dtype}; only {accepted} can be quantized; convert it, or {_SKIP_IT}")
    if weight.is_meta and has_values:
        raise NotImplementedError(
            f"{name} {shape} is on the meta device and has no values; load the model's weights first, or {_SKIP_IT}"
        )
    if weight.numel() == 0:
        raise ValueError(f"{name} {shape} is empty: there is nothing to quantize; {_SKIP_IT}")
    layout = target.sites[0].layout
    if layout is not None and layout.num_experts is not None and weight.dim() != 2:
        raise ValueError(
            f"{name}: shape {shape} is not 2-D, as its layout's num_experts says; see register_experts_layout, or "
            + _SKIP_IT
        )
    try:
        matrices = target.matrices(weight.detach())
    except ValueError as error:
        raise ValueError(f"{name}: {error}; see register_experts_layout, or {_SKIP_IT}") from None
    if has_values:
        _check_values(f"{name} {shape}", weight, config.rotation)
    try:
        config.scheme.check_length(matrices.shape[target.k_axis])
    except ValueError as error:
        raise ValueError(f"{name} {shape}: {error}, or {_SKIP_IT}") from None
    if config.backend != "auto" and (has_values or device is not None):
        _check_backend(target, weight, device or weight.device)


def _check_values(what: str, weight: Tensor, rotation: int | None) -> None:
    low, high = torch.aminmax(weight.detach())
    largest = max(-low.item(), high.item()) * (rotation or 1)  # a block may hold its sum in one place
    if not largest <= torch.finfo(torch.float32).max:
        found = "holds values beyond fp32's range" if weight.dtype == torch.float64 else "holds NaN or Inf"
        if rotation is not None and largest < math.inf:
            found = "holds values that may leave fp32's range when they are rotated"
        raise ValueError(f"{what} {found}; repair the weight, or {_SKIP_IT}")


def _check_backend(target: Target, weight: Tensor, device: torch.device) -> None:
    """Ask the named backend about the weight to be, by a stand-in without values."""
    try:
        problem = describe(stand_in_for(target, weight.dtype, "meta"), device=device)
        select_backend(problem, target.config.backend)
    except ValueError as error:
        raise ValueError(f"{target.name} {tuple(weight.shape)}: {error}") from None


def stand_in_for(target: Target, dtype: torch.dtype, device: str = "cpu") -> MXTensor:
    """The quantized weight to be, in shape, format and rule for activations; its bytes are all one zero byte."""
    fmt = get_format(target.config.format)
    shape = target.matrices(torch.empty(target.parameter.shape, device="meta")).shape
    lead, length = [*shape], shape[target.k_axis]
    del lead[target.k_axis]
    byte = torch.zeros(1, dtype=torch.uint8, device=device)
    operand = Operand(
        byte.expand(*lead, fmt.packed_size(length)),
        byte.expand(*lead, fmt.num_blocks(length)),
        torch.ones((), dtype=torch.float32, device=device) if fmt.per_tensor else None,
    )
    return MXTensor(operand, Metadata(target.scheme, target.k_axis, dtype), shape)


def quantized_parameter(
    target: Target,
    weight: Tensor | None = None,
    *,
    device: torch.device | None = None,
    quantizer: WeightQuantizer = round_to_nearest,
) -> nn.Parameter:
    """The frozen parameter that takes the place of a checked weight, with the Python attributes of the target's.

    Experts are quantized one after the other, each as a weight of its own: NVFP4 has a per-tensor scale for each.

    Args:
        weight: what is quantized; None: the target's parameter.
        device: quantize there and leave the result there; None: where the weight is.
        quantizer: finds the codes of each matrix.

    Returns:
        an MXTensor of the weight's shape; [E, N, K] or [E, K, N] where a 2-D parameter holds E experts.

    Raises:
        ValueError: NaN or Inf, or the named backend is unknown or cannot compute the config there.
    """
    matrices = target.matrices((target.parameter if weight is None else weight).detach())
    quantize_all = _quantize_stack if target.is_experts else _quantize_matrix
    quantized = quantize_all(matrices, target, device or matrices.device, quantizer)
    return parameter_like(target.parameter, as_weight(quantized, target.config.backend), requires_grad=False)


def _quantize_matrix(matrix: Tensor, target: Target, device: torch.device, quantizer: WeightQuantizer) -> MXTensor:
    scheme = target.scheme
    quantized = quantizer(matrix.to(device), target.config, target.k_axis, 0)
    return quantized.with_activation(scheme.activation, scheme.activation_scale_mode)


def _quantize_stack(stack: Tensor, target: Target, device: torch.device, quantizer: WeightQuantizer) -> MXTensor:
    config, k_axis = target.config, target.k_axis
    fmt = get_format(config.format)
    experts, n, k = stack.movedim(k_axis, -1).shape
    qdata = torch.empty(experts, n, fmt.packed_size(k), dtype=torch.uint8, device=device)
    scale = torch.empty(experts, n, fmt.num_blocks(k), dtype=torch.uint8, device=device)
    per_tensor = torch.empty(experts, 1, 1, dtype=torch.float32, device=device) if fmt.per_tensor else None
    for index in range(experts):
        expert = quantizer(stack[index].to(device), config, k_axis, index)
        qdata[index], scale[index] = expert.qdata, expert.scale
        if per_tensor is not None and expert.per_tensor_scale is not None:
            per_tensor[index] = expert.per_tensor_scale
    return MXTensor(Operand(qdata, scale, per_tensor), Metadata(target.scheme, k_axis, stack.dtype), stack.shape)


def quantize_target(
    target: Target, device: torch.device | None = None, quantizer: WeightQuantizer = round_to_nearest
) -> None:
    """Quantize one checked weight and swap it in, wherever it is registered. Its biases move to `device` as well.

    Whatever can fail comes before the first change.
    """
    quantized = quantized_parameter(target, device=device, quantizer=quantizer)
    biases = [bias for site in target.sites for bias in site.biases]
    moved = [] if device is None else [(bias, bias.data.to(device)) for bias in biases]
    for site in target.sites:
        site.module.register_parameter(site.attribute, quantized)
        site.forget_skip()
    for bias, data in moved:
        bias.data = data


def dequantized_parameter(parameter: nn.Parameter, layout: ExpertsLayout | None = None) -> nn.Parameter:
    """An ordinary parameter with the values and the Python attributes of a quantized one; frozen if it was.

    Args:
        layout: the layout of the module, if it is a block of experts: a parameter that was 2-D is 2-D again.
    """
    if not isinstance(parameter, MXTensor):
        raise TypeError(f"only a quantized parameter can be dequantized; got {type(parameter).__name__}")
    values = parameter.dequantize()
    if layout is not None and layout.num_experts is not None:
        values = values.flatten(0, 1)
    return parameter_like(parameter, values, requires_grad=parameter.requires_grad)


def parameter_like(old: nn.Parameter, data: Tensor, *, requires_grad: bool) -> nn.Parameter:
    """A new parameter of `data`, with the Python attributes that others put on the old one."""
    attributes = old.foreign_attributes() if isinstance(old, MXTensor) else old.__dict__
    new = nn.Parameter(data, requires_grad=requires_grad)
    new.__dict__.update(attributes)
    return new
