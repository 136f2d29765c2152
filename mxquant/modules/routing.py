"""To the experts and back: token-expert pairs sorted by expert, and the experts' outputs added up for each token.

Nothing here waits for the device. The order of every sum is fixed: a token's experts are added in the order of its ids.

Shape suffixes: T tokens, K choices a token, S = T K sorted places, E experts, H width of a token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mxquant.tensor.eager import runs_kernels


class Routing(NamedTuple):
    """Places sorted by expert, and what is needed to go there and back."""

    offsets_E: Tensor
    """int32: where each expert's places end."""
    order_S: Tensor
    """int64: the token-expert pair, token * K + choice, that stands at each place."""
    place_S: Tensor
    """int64: where each pair stands."""
    ids_TK: Tensor
    """The expert of each pair; what is not in 0..E-1 belongs to none here and stands beyond the last offset."""

    @property
    def token_S(self) -> Tensor:
        return self.order_S // self.ids_TK.shape[1]

    @property
    def is_local_TK(self) -> Tensor:
        """Whether the expert of each pair is one of ours."""
        return (self.ids_TK >= 0) & (self.ids_TK < self.offsets_E.shape[0])

    @property
    def expert_S(self) -> Tensor:
        """int64: the expert at each place; E beyond the last offset."""
        ids = torch.where(self.is_local_TK, self.ids_TK, self.offsets_E.shape[0])
        return ids.flatten()[self.order_S].to(torch.int64)


def route(top_k_index: Tensor, num_experts: int) -> Routing:
    """Sort token-expert pairs by expert; pairs of one expert keep their order.

    Args:
        top_k_index: integers [T, K]; what is not in 0..num_experts-1 sorts to the end, beyond the last offset.
    """
    if top_k_index.dtype not in (torch.int32, torch.int64):
        top_k_index = top_k_index.to(torch.int64)  # a narrow type may not hold num_experts
    if runs_kernels(top_k_index) and top_k_index.numel():
        from mxquant.kernels.moe.routing import route as route_kernel

        return Routing(*route_kernel(top_k_index, num_experts), top_k_index)
    is_local = (top_k_index >= 0) & (top_k_index < num_experts)
    ids = torch.where(is_local, top_k_index, num_experts).flatten().to(torch.int64)
    expert, order = torch.sort(ids, stable=True)
    experts = torch.arange(num_experts, device=ids.device)
    offsets = torch.searchsorted(expert, experts, right=True).to(torch.int32)
    place = torch.empty_like(order)
    place[order] = torch.arange(place.shape[0], device=place.device)
    return Routing(offsets, order, place, top_k_index)


def combine(y_SH: Tensor, routing: Routing, weights_TK: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The sum of each token's experts, times the router's weights where given: [T, H] in `dtype`.

    Sums are in fp32 (fp64 for fp64). Pairs of no expert here are left out, whatever their weight.
    """
    tensors = (y_SH,) if weights_TK is None else (y_SH, weights_TK)
    if runs_kernels(*tensors) and y_SH.is_contiguous() and y_SH.numel():
        from mxquant.kernels.moe.routing import combine as combine_kernel

        return combine_kernel(y_SH, routing.place_S, routing.ids_TK, weights_TK, routing.offsets_E.shape[0], dtype)
    y_TKH = y_SH.to(torch.promote_types(y_SH.dtype, torch.float32))[routing.place_S].unflatten(0, routing.ids_TK.shape)
    if weights_TK is not None:
        y_TKH = y_TKH * torch.where(routing.is_local_TK, weights_TK, 0).unsqueeze(-1)
    return torch.where(routing.is_local_TK.unsqueeze(-1), y_TKH, 0).sum(1).to(dtype)
