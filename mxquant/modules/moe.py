"""The forward of an expert block, in two grouped matmuls: route, multiply, gate, multiply, weigh, sum.

Legend: T tokens, k experts a token, S = T k sorted places, E experts, H width of a token, F width inside an expert.

Nothing here waits for the device: tokens are sorted by expert with tensor operators, and a backend gets the offsets as
a tensor. Ids outside 0..E-1 belong to experts elsewhere (expert parallelism) and are left out. The order of every sum
is fixed: a token's experts are added in the order of its ids.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mxquant.backends import Groups
from mxquant.modules.experts import ExpertsLayout
from mxquant.modules.experts_weight import stacked
from mxquant.modules.registry import experts_layout
from mxquant.tensor import MXTensor, grouped_product


class Routing(NamedTuple):
    """Places sorted by expert, and what is needed to go there and back."""

    offsets_E: Tensor
    """int32: where each expert's places end."""
    order_S: Tensor
    """int64: the token-expert pair, token * k + choice, that stands at each place."""
    expert_S: Tensor
    """int64: the expert at each place; E beyond the last place that belongs to one."""
    is_local_TK: Tensor
    """Whether the expert of each pair is one of ours."""

    @property
    def token_S(self) -> Tensor:
        return self.order_S // self.is_local_TK.shape[1]


def route(top_k_index: Tensor, num_experts: int) -> Routing:
    """Sort token-expert pairs by expert; pairs of one expert keep their order.

    Args:
        top_k_index: integers [T, k]; what is not in 0..num_experts-1 sorts to the end, beyond the last offset.
    """
    is_local = (top_k_index >= 0) & (top_k_index < num_experts)
    ids = torch.where(is_local, top_k_index, num_experts).flatten().to(torch.int64)
    expert, order = torch.sort(ids, stable=True)
    experts = torch.arange(num_experts, device=ids.device)
    offsets = torch.searchsorted(expert, experts, right=True).to(torch.int32)
    return Routing(offsets, order, expert, is_local)


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
        ValueError: the layout is unknown, or does not say how to compute the block.
    """
    layout = _computable(experts)
    assert layout.down is not None
    assert layout.gate is not None
    up = [_stack(experts, name, layout) for name in layout.up]
    down = _stack(experts, layout.down, layout)
    routing = route(top_k_index, down.shape[0])
    weight_S = torch.where(routing.is_local_TK, top_k_weights, 0).flatten()[routing.order_S].unsqueeze(-1)
    if layout.router_weight == "input":
        x_SH, rows = hidden_states[routing.token_S] * weight_S.to(hidden_states.dtype), None
    else:
        x_SH, rows = hidden_states, routing.token_S
    outputs = [
        _multiply(x_SH, w, layout.k_axis[name], experts, layout.biases.get(name), routing, rows)
        for name, w in zip(layout.up, up, strict=True)
    ]
    h_SF = layout.gate(experts, *outputs)
    y_SH = _multiply(h_SF, down, layout.k_axis[layout.down], experts, layout.biases.get(layout.down), routing, None)
    if layout.post_norm is not None:
        y_SH = getattr(experts, layout.post_norm)(y_SH)
    y_SH = y_SH.to(torch.promote_types(y_SH.dtype, torch.float32))
    if layout.router_weight == "output":
        y_SH = y_SH * weight_S
    return _sum_per_token(y_SH, routing).to(hidden_states.dtype)


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
    return stacked(experts._parameters[name], layout.stack_of(experts))  # type: ignore[arg-type]


def _multiply(
    x: Tensor, w: Tensor, k_axis: int, experts: nn.Module, bias_name: str | None, routing: Routing, rows: Tensor | None
) -> Tensor:
    """The grouped matmul of [S, K], or of the rows `rows` of [T, K], and its bias: [S, N], zero beyond the last expert.

    The differentiable way gathers rows first; it has the same values.
    """
    bias_EN = None if bias_name is None else experts._parameters[bias_name]
    wants_gradient = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, w, bias_EN))
    if isinstance(w, MXTensor) and not wants_gradient:
        return grouped_product(x, w, k_axis, Groups(routing.offsets_E, rows), bias_EN)
    x = x if rows is None else x[rows]
    w_EKN = w if k_axis == -2 else w.transpose(-2, -1)
    # A dense weight is multiplied in its own dtype, as transformers does; a quantized one in its input's.
    y = F.grouped_mm(x if isinstance(w, MXTensor) else x.to(w.dtype), w_EKN, offs=routing.offsets_E).to(x.dtype)
    is_ours = (routing.expert_S < w.shape[0]).unsqueeze(-1)
    y = torch.where(is_ours, y, 0)  # a dense grouped matmul leaves the other rows as it found them
    if bias_EN is None:
        return y
    padded = F.pad(bias_EN, (0, 0, 0, 1))  # E, the expert of places that belong to none, has a bias of zero
    return y + padded[routing.expert_S].to(y.dtype)


def _sum_per_token(y_SH: Tensor, routing: Routing) -> Tensor:
    """[S, H] in sorted places to [T, H], each token's experts added in the order of its ids."""
    place_S = torch.empty_like(routing.order_S)
    place_S[routing.order_S] = torch.arange(place_S.shape[0], device=place_S.device)
    return y_SH[place_S].unflatten(0, routing.is_local_TK.shape).sum(1)
