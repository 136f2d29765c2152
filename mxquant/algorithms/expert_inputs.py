"""The matrices of a weight, one for a linear layer and one for each expert, and the rows routed to each expert.

Legend: T tokens, R rows of one expert, H width of a token, N output features, K input features of a matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from mxquant.modules.experts import ExpertsLayout
from mxquant.modules.quantize_target import Target
from mxquant.ops import route


def weight_matrix(target: Target, index: int) -> Tensor:
    """One matrix of a target, [N, K]. A linear layer has index 0 only."""
    matrices = target.matrices(target.parameter.detach())
    return (matrices[index] if target.is_experts else matrices).movedim(target.k_axis, -1)


def is_routed_call(args: tuple[Any, ...]) -> bool:
    """Whether the arguments are those of an experts block: hidden states, expert ids and router weights."""
    return len(args) == 3 and all(isinstance(argument, Tensor) for argument in args)


class ExpertRows(NamedTuple):
    """The input rows of one expert."""

    expert: int
    x_RH: Tensor
    """Inputs, multiplied by the router weights if the layout applies those to the input."""
    token_R: Tensor
    """The token of each row."""
    weight_R1: Tensor | None
    """Router weights that multiply the outputs; None if they multiply the inputs."""


def routed_rows(module: nn.Module, layout: ExpertsLayout, args: tuple[Any, ...]) -> Iterator[ExpertRows]:
    """The rows of each expert that has tokens, in the order of the experts."""
    hidden_TH, ids, weights = args
    assert layout.down is not None
    routing = route(ids, _stack(module, layout, layout.down).shape[0])
    start = 0
    for index, end in enumerate(routing.offsets_E.tolist()):
        if end > start:
            token_R = routing.token_S[start:end]
            weight_R1 = weights.flatten()[routing.order_S[start:end]].unsqueeze(-1).to(hidden_TH.dtype)
            if layout.router_weight == "input":
                yield ExpertRows(index, hidden_TH[token_R] * weight_R1, token_R, None)
            else:
                yield ExpertRows(index, hidden_TH[token_R], token_R, weight_R1)
        start = end


def expert_linear(module: nn.Module, layout: ExpertsLayout, name: str, index: int, x_RK: Tensor) -> Tensor:
    """One expert's linear layer `name`, with its bias, on its rows: [R, N]. The weight may be quantized."""
    matrix = _stack(module, layout, name)[index]
    y_RN = F.linear(x_RK, matrix if layout.k_axis[name] == -1 else matrix.t())
    bias_name = layout.biases.get(name)
    bias = None if bias_name is None else module._parameters[bias_name]
    return y_RN if bias is None else y_RN + bias[index]


def _stack(module: nn.Module, layout: ExpertsLayout, name: str) -> Tensor:
    weight = module._parameters[name]
    assert weight is not None
    return layout.matrices(module, weight)
