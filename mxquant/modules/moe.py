"""The forward of an expert block, in two grouped matmuls: route, multiply, gate, multiply, weigh, sum.

Legend: T tokens, k experts a token, S = T k token-expert pairs sorted by expert, E experts, H width of a token.

Nothing here waits for the device: pairs are sorted by tensor operators, and a backend gets the offsets as a tensor. Ids
outside 0..E-1 belong to experts on other ranks (expert parallelism) and are left out. The order of every sum is fixed:
a token's experts are added in the order of its ids.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mxquant.backends import Groups
from mxquant.modules.experts import ExpertsLayout
from mxquant.modules.experts_layouts import experts_layout
from mxquant.modules.gates import known_gate
from mxquant.ops import combine, gated_activation, route
from mxquant.reference.gated_activation import GatedActivation
from mxquant.reference.routing import Routing
from mxquant.tensor import MXTensor, grouped_product


def experts_forward(experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The forward of a block of experts, with the weights that `experts` holds, quantized or not.

    Activations are quantized once a token for the first matmul, and once a token and expert for the second. The result
    is differentiable in the hidden states, the router's weights and the biases, not in quantized weights.

    Args:
        experts: a module whose layout is known and names `up` and `down`: see `register_experts_layout`.
        hidden_states: [T, H], floating.
        top_k_index: [T, k] integers; ids outside 0..E-1 are left out of the sum.
        top_k_weights: [T, k], the router's weights.

    Returns:
        [T, H] in the dtype of `hidden_states`; sums over experts are in fp32 (fp64 for fp64).

    Raises:
        ValueError: the layout is unknown, or does not say how to compute the block; the shapes do not fit.
        TypeError: the ids are no integers.
    """
    layout = _computable_layout(experts)
    _check_routed(hidden_states, top_k_index, top_k_weights)
    up, down, count = _weights_of(experts, layout)
    routing = route(top_k_index, count)
    weighs_input = layout.router_weight == "input"
    if weighs_input:
        weight_S = torch.where(routing.is_local_TK, top_k_weights, 0).flatten()[routing.order_S].unsqueeze(-1)
        x_SH, rows = hidden_states[routing.token_S] * weight_S.to(hidden_states.dtype), None
    else:
        x_SH, rows = hidden_states, routing.token_S
    outputs = [_grouped_linear(x_SH, weight, routing, rows) for weight in up]
    assert layout.gate is not None
    gate = known_gate(layout.gate, experts) if len(outputs) == 1 else None
    h_S = outputs[0] if gate is not None else layout.gate(experts, *outputs)
    y_SH = _grouped_linear(h_S, down, routing, gate=gate)
    if layout.post_norm is not None:
        y_SH = getattr(experts, layout.post_norm)(y_SH)
    return combine(y_SH, routing, None if weighs_input else top_k_weights, hidden_states.dtype)


def _check_routed(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> None:
    """Check shapes and dtypes, by which kernels index, with the errors of `experts_forward`."""
    shapes = [tuple(tensor.shape) for tensor in (hidden_states, top_k_index, top_k_weights)]
    if hidden_states.dim() != 2 or top_k_index.dim() != 2 or shapes[1] != shapes[2] or shapes[0][0] != shapes[1][0]:
        raise ValueError(
            f"experts take hidden_states [T, H], top_k_index [T, k] and top_k_weights [T, k]; got {shapes[0]}, "
            f"{shapes[1]} and {shapes[2]}; flatten batches and sequences to tokens first"
        )
    if top_k_index.is_floating_point() or top_k_index.dtype == torch.bool or top_k_index.is_complex():
        raise TypeError(f"top_k_index is a tensor of integers; got {top_k_index.dtype}. Pass the indices of topk")


def _computable_layout(experts: nn.Module) -> ExpertsLayout:
    layout = experts_layout(experts)
    if layout is None or not layout.is_computable:
        raise ValueError(
            f"the layout of {type(experts).__name__} "
            + ("is unknown" if layout is None else "does not name its up, down and gate")
            + "; call register_experts_layout for its class, or use the module's own forward"
        )
    return layout


class _Weight(NamedTuple):
    stack: Tensor
    """[E, N, K] or [E, K, N]."""
    k_axis: int
    bias_EN: Tensor | None


def _weights_of(experts: nn.Module, layout: ExpertsLayout) -> tuple[list[_Weight], _Weight, int]:
    """The weights of the first matmul, that of the second, and the number of experts."""
    assert layout.down is not None
    parameters = experts._parameters
    # NOTE: while its dispatch is on, each size that is read of a quantized weight takes a microsecond.
    with torch._C.DisableTorchFunctionSubclass():
        *up, down = (
            _Weight(
                layout.matrices(experts, parameters[name]),  # type: ignore[arg-type]
                layout.k_axis[name],
                parameters[layout.biases[name]] if name in layout.biases else None,
            )
            for name in (*layout.up, layout.down)
        )
        return up, down, down.stack.shape[0]


def _grouped_linear(
    x: Tensor, weight: _Weight, routing: Routing, rows: Tensor | None = None, gate: GatedActivation | None = None
) -> Tensor:
    """The grouped matmul of [S, K], or of the rows `rows` of [T, K], and its bias: [S, N], zero beyond the last expert.

    With a gate, `x` is [S, 2 K], gates and ups, and goes through it first.

    NOTE: where a gradient is wanted, rows are gathered first and products are rounded before a bias is added. All else
    is equal.
    """
    stack, k_axis, bias_EN = weight
    wants_gradient = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, stack, bias_EN))
    if isinstance(stack, MXTensor) and not wants_gradient:
        return grouped_product(x, stack, k_axis, Groups(routing.offsets_E, rows), bias_EN, gate)
    x = x if gate is None else gated_activation(x, gate)
    x = x if rows is None else x[rows]
    w_EKN = stack if k_axis == -2 else stack.transpose(-2, -1)
    # A dense weight is multiplied in its own dtype, as transformers does; a quantized one in its input's.
    y = F.grouped_mm(x if isinstance(stack, MXTensor) else x.to(stack.dtype), w_EKN, offs=routing.offsets_E).to(x.dtype)
    expert_S = routing.expert_S
    is_local_S = (expert_S < stack.shape[0]).unsqueeze(-1)
    y = torch.where(is_local_S, y, 0)  # a dense grouped matmul leaves other rows uninitialized
    if bias_EN is None:
        return y
    padded = F.pad(bias_EN, (0, 0, 0, 1))  # a zero bias for pairs of no expert here, whose expert is E
    return y + padded[expert_S].to(y.dtype)
