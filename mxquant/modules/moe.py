"""The forward of an expert block, in two grouped matmuls: route, multiply, gate, multiply, weigh, sum.

Legend: T tokens, k experts a token, S = T k sorted places, E experts, H width of a token, F width inside an expert.

Nothing here waits for the device: tokens are sorted by expert with tensor operators, and a backend gets the offsets as
a tensor. Ids outside 0..E-1 belong to experts elsewhere (expert parallelism) and are left out. The order of every sum
is fixed: a token's experts are added in the order of its ids.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mxquant.backends import Groups
from mxquant.modules.experts import ExpertsLayout
from mxquant.modules.gates import known_gate
from mxquant.modules.layouts import experts_layout
from mxquant.ops import combine, gated_activation, route
from mxquant.reference.gated_activation import GatedActivation
from mxquant.reference.routing import Routing
from mxquant.tensor import MXTensor, grouped_product


def experts_forward(experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What a block of experts makes of its tokens, from the weights that `experts` holds, quantized or not.

    Quantized activations are quantized once a token for the first matmul and once a token and expert for the second.
    Differentiable in the hidden states, the router's weights and the biases; not in quantized weights.

    Args:
        experts: a module whose layout is known and names `up` and `down`: see `register_experts_layout`.
        hidden_states: [T, H], floating.
        top_k_index: [T, k] integers; ids outside 0..E-1 are left out of the sum.
        top_k_weights: [T, k], the router's weight of each.

    Returns:
        [T, H] in the dtype of `hidden_states`; sums over experts are in fp32 (fp64 for fp64).

    Raises:
        ValueError: the layout is unknown, or does not say how to compute the block; shapes that do not fit.
        TypeError: ids that are no integers.
    """
    layout = _computable(experts)
    _check_routed(hidden_states, top_k_index, top_k_weights)
    assert layout.down is not None
    assert layout.gate is not None
    # NOTE: otherwise reading each attribute of a quantized weight goes through its __torch_function__.
    with torch._C.DisableTorchFunctionSubclass():
        up = [_stack(experts, name, layout) for name in layout.up]
        down = _stack(experts, layout.down, layout)
        num_experts = down.shape[0]
    routing = route(top_k_index, num_experts)
    weighs_input = layout.router_weight == "input"
    if weighs_input:
        weight_S = torch.where(routing.is_local_TK, top_k_weights, 0).flatten()[routing.order_S].unsqueeze(-1)
        x_SH, rows = hidden_states[routing.token_S] * weight_S.to(hidden_states.dtype), None
    else:
        x_SH, rows = hidden_states, routing.token_S
    outputs = [
        _multiply(x_SH, w, layout.k_axis[name], experts, layout.biases.get(name), routing, rows)
        for name, w in zip(layout.up, up, strict=True)
    ]
    gate = known_gate(layout.gate, experts) if len(outputs) == 1 else None
    h_S = outputs[0] if gate is not None else layout.gate(experts, *outputs)
    bias_name = layout.biases.get(layout.down)
    y_SH = _multiply(h_S, down, layout.k_axis[layout.down], experts, bias_name, routing, None, gate)
    if layout.post_norm is not None:
        y_SH = getattr(experts, layout.post_norm)(y_SH)
    return combine(y_SH, routing, None if weighs_input else top_k_weights, hidden_states.dtype)


def _check_routed(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> None:
    """Kernels index by these shapes, so that none may be wrong.

    Raises:
        ValueError, TypeError: shapes that do not belong together, or ids that are no integers.
    """
    shapes = [tuple(tensor.shape) for tensor in (hidden_states, top_k_index, top_k_weights)]
    if hidden_states.dim() != 2 or top_k_index.dim() != 2 or shapes[1] != shapes[2] or shapes[0][0] != shapes[1][0]:
        raise ValueError(
            f"experts take hidden_states [T, H], top_k_index [T, k] and top_k_weights [T, k]; got {shapes[0]}, "
            f"{shapes[1]} and {shapes[2]}; flatten batches and sequences to tokens first"
        )
    if top_k_index.is_floating_point() or top_k_index.dtype == torch.bool or top_k_index.is_complex():
        raise TypeError(f"top_k_index is a tensor of integers; got {top_k_index.dtype}. Pass the indices of topk")


def _computable(experts: nn.Module) -> ExpertsLayout:
    layout = experts_layout(experts)
    if layout is None or not layout.up or layout.down is None or layout.gate is None:
        raise ValueError(
            f"the layout of {type(experts).__name__} "
            + ("is unknown" if layout is None else "does not name its up, down and gate")
            + "; call register_experts_layout for its class, or use the module's own forward"
        )
    return layout


def _stack(experts: nn.Module, name: str, layout: ExpertsLayout) -> Tensor:
    return layout.matrices(experts, experts._parameters[name])  # type: ignore[arg-type]


def _multiply(
    x: Tensor,
    w: Tensor,
    k_axis: int,
    experts: nn.Module,
    bias_name: str | None,
    routing: Routing,
    rows: Tensor | None,
    gate: GatedActivation | None = None,
) -> Tensor:
    """The grouped matmul of [S, K], or of the rows `rows` of [T, K], and its bias: [S, N], zero beyond the last expert.
    With a gate, of what it makes of twice as many columns.

    The differentiable way gathers rows first; it has the same values, but that it rounds products before adding a bias.
    """
    bias_EN = None if bias_name is None else experts._parameters[bias_name]
    wants_gradient = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, w, bias_EN))
    if isinstance(w, MXTensor) and not wants_gradient:
        return grouped_product(x, w, k_axis, Groups(routing.offsets_E, rows), bias_EN, gate)
    x = x if gate is None else gated_activation(x, gate)
    x = x if rows is None else x[rows]
    w_EKN = w if k_axis == -2 else w.transpose(-2, -1)
    # A dense weight is multiplied in its own dtype, as transformers does; a quantized one in its input's.
    y = F.grouped_mm(x if isinstance(w, MXTensor) else x.to(w.dtype), w_EKN, offs=routing.offsets_E).to(x.dtype)
    expert_S = routing.expert_S
    is_ours = (expert_S < w.shape[0]).unsqueeze(-1)
    y = torch.where(is_ours, y, 0)  # a dense grouped matmul leaves the other rows as it found them
    if bias_EN is None:
        return y
    padded = F.pad(bias_EN, (0, 0, 0, 1))  # E, the expert of places that belong to none, has a bias of zero
    return y + padded[expert_S].to(y.dtype)
