"""One parameter of a linear layer or embedding, to its quantized form and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from mxquant.tensor import MXTensor, as_weight, quantize


class WeightConfig(Protocol):
    """What a config says about one weight."""

    @property
    def format(self) -> str: ...
    @property
    def scale_mode(self) -> str: ...
    @property
    def activation_format(self) -> str | None: ...
    @property
    def activation_scale_mode(self) -> str | None: ...
    @property
    def backend(self) -> str: ...
    @property
    def rotation(self) -> int | None: ...


WeightQuantizer = Callable[[Tensor, WeightConfig, int, int], MXTensor]
"""From a matrix, its config, the axis that its matmul contracts and its index in a stack (else 0) to a weight-only
MXTensor."""


def round_to_nearest(weight: Tensor, config: WeightConfig, k_axis: int, index: int) -> MXTensor:
    """The default `WeightQuantizer`."""
    return quantize(
        weight,
        config.format,
        scale_mode=config.scale_mode,
        axis=k_axis,
        nonfinite="raise",
        rotation=config.rotation,
    )


def quantize_parameter(
    parameter: nn.Parameter,
    config: WeightConfig,
    device: torch.device | str | None = None,
    *,
    weight_only: bool = False,
    quantizer: WeightQuantizer = round_to_nearest,
) -> nn.Parameter:
    """A frozen parameter with the quantized weight, blocked along its last axis, with the Python attributes of the
    old one.

    Args:
        parameter: [N, K], floating.
        device: quantize there and leave the result there; None: where the parameter is.
        weight_only: nothing is multiplied with it (an embedding), so that no activation is quantized.
        quantizer: what finds the codes.

    Raises:
        ValueError: NaN or Inf in the weight, or the named backend is unknown or cannot compute the config there.
    """
    source = parameter.detach() if device is None else parameter.detach().to(device)
    quantized = quantizer(source, config, -1, 0)
    if not weight_only:
        quantized = quantized.with_activation(config.activation_format, config.activation_scale_mode)
    return replace_parameter(parameter, as_weight(quantized, config.backend), requires_grad=False)


def dequantize_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """An ordinary parameter with the values of a quantized one, with its Python attributes; frozen, as the quantized
    one was.
    """
    if not isinstance(parameter, MXTensor):
        raise TypeError(f"only a quantized parameter can be dequantized; got {type(parameter).__name__}")
    return replace_parameter(parameter, parameter.dequantize(), requires_grad=parameter.requires_grad)


def replace_parameter(old: nn.Parameter, data: torch.Tensor, *, requires_grad: bool) -> nn.Parameter:
    attributes = old.foreign_attributes() if isinstance(old, MXTensor) else old.__dict__
    new = nn.Parameter(data, requires_grad=requires_grad)
    new.__dict__.update(attributes)
    return new
