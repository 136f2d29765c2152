"""Which modules are linear layers, and which axis of their weight the matmul contracts."""

from __future__ import annotations

from torch import nn


def linear_k_axis(module: nn.Module) -> int | None:
    """-1 for an `nn.Linear`, whose weight is [N, K]; -2 for transformers' `Conv1D` (GPT-2), whose weight is [K, N].

    None for every other module. `Conv1D` is recognized by its name, as transformers is optional.
    """
    if isinstance(module, nn.Linear):
        return -1
    return -2 if any(map(_is_conv1d, type(module).__mro__)) else None


def has_own_forward(module: nn.Module) -> bool:
    """Whether a linear layer's class overrides the forward, so that its output is not known to be the matmul's."""
    base: type[nn.Module] = next(cls for cls in type(module).__mro__ if cls is nn.Linear or _is_conv1d(cls))
    return type(module).forward is not base.forward


def _is_conv1d(cls: type) -> bool:
    return cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils"
