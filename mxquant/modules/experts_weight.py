"""One stacked parameter of an expert block, to its quantized form and back."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mxquant.backends.base import Operand
from mxquant.formats import get_format
from mxquant.modules.linear import WeightConfig, WeightQuantizer, replace_parameter, round_to_nearest
from mxquant.scheme import Scheme
from mxquant.tensor import Metadata, MXTensor, as_weight


def quantize_experts(
    parameter: nn.Parameter,
    config: WeightConfig,
    k_axis: int,
    *,
    stack: int | None = None,
    device: torch.device | str | None = None,
    quantizer: WeightQuantizer = round_to_nearest,
) -> nn.Parameter:
    """A frozen parameter with the quantized experts, physically [E, N, K], with the Python attributes of the old one.

    One expert is quantized after the other, as if it were a weight of its own: NVFP4 has a per-tensor scale for each.

    Args:
        parameter: [E, N, K] (`k_axis` -1) or [E, K, N] (-2), floating; 2-D with the first two axes in one if `stack`.
        stack: number of experts in a 2-D parameter.
        device: quantize there and leave the result there; None: where the parameter is.
        quantizer: what finds the codes of each expert.

    Raises:
        ValueError: NaN or Inf in the weight, a stack that is none, or a backend that is unknown or cannot compute the
            config.
    """
    source = stacked(parameter.detach(), stack)
    fmt = get_format(config.format)
    experts, length = source.shape[0], source.shape[k_axis]
    lead = (experts, source.shape[-1 if k_axis == -2 else -2])
    to = source.device if device is None else torch.device(device)
    qdata = torch.empty(*lead, fmt.packed_size(length), dtype=torch.uint8, device=to)
    scale = torch.empty(*lead, fmt.num_blocks(length), dtype=torch.uint8, device=to)
    per_tensor = torch.empty(experts, 1, 1, dtype=torch.float32, device=to) if fmt.per_tensor else None
    for index in range(experts):
        expert = source[index].to(to)
        one = quantizer(expert, config, k_axis, index)
        qdata[index], scale[index] = one.qdata, one.scale
        if per_tensor is not None and one.per_tensor_scale is not None:
            per_tensor[index] = one.per_tensor_scale
    metadata = Metadata(Scheme(fmt.name, rotation=config.rotation), k_axis, source.dtype)
    quantized = MXTensor(Operand(qdata, scale, per_tensor), metadata, source.shape)
    quantized = quantized.with_activation(config.activation_format, config.activation_scale_mode)
    return replace_parameter(parameter, as_weight(quantized, config.backend), requires_grad=False)


def stacked(weight: Tensor, stack: int | None) -> Tensor:
    """A weight as a stack of matrices: itself, or a 2-D one cut into `stack`.

    Raises:
        ValueError: its rows cannot be cut so, or it is not 3-D.
    """
    if stack is not None and weight.dim() == 2 and stack > 0 and weight.shape[0] % stack == 0:
        return weight.unflatten(0, (stack, -1))
    if weight.dim() != 3:
        raise ValueError(f"shape {tuple(weight.shape)} is no stack of {'' if stack is None else f'{stack} '}matrices")
    return weight


def dequantize_experts(parameter: nn.Parameter, stack: int | None) -> nn.Parameter:
    """An ordinary parameter with the values of quantized experts, in the shape that the module had."""
    assert isinstance(parameter, MXTensor)
    values = parameter.dequantize()
    return replace_parameter(
        parameter, values if stack is None else values.flatten(0, 1), requires_grad=parameter.requires_grad
    )
