"""Routing of tokens to experts: sort token-expert pairs by expert, and add up the experts' outputs for each token.

Nothing here waits for the device. The order of every sum is fixed: a token's experts are added in the order of its ids.

Shape suffixes: T tokens, K choices a token, S = T K sorted token-expert pairs, E experts, H width of a token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Routing(NamedTuple):
    """Token-expert pairs sorted by expert, and the indices that gather them and take them back."""

    offsets_E: Tensor
    """int32: the sorted index at which each expert's pairs end."""
    order_S: Tensor
    """int64: the pair at each sorted index, token * K + choice."""
    sorted_index_S: Tensor
    """int64: the sorted index of each pair, the inverse of `order_S`."""
    ids_TK: Tensor
    """The expert of each pair. Ids outside 0..E-1 belong to no expert here and sort beyond the last offset."""

    @property
    def token_S(self) -> Tensor:
        """int64: the token at each sorted index, which gathers the experts' inputs."""
        return self.order_S // self.ids_TK.shape[1]

    @property
    def is_local_TK(self) -> Tensor:
        """Whether the expert of each pair is one of 0..E-1."""
        return (self.ids_TK >= 0) & (self.ids_TK < self.offsets_E.shape[0])

    @property
    def expert_S(self) -> Tensor:
        """int64: the expert at each sorted index; E beyond the last offset."""
        ids = torch.where(self.is_local_TK, self.ids_TK, self.offsets_E.shape[0])
        return ids.flatten()[self.order_S].to(torch.int64)


def route(ids_TK: Tensor, experts: int) -> Routing:
    """Sort token-expert pairs by expert; pairs of one expert keep their order.

    Args:
        ids_TK: int32 or int64; ids outside 0..experts-1 sort to the end, beyond the last offset.
    """
    is_local = (ids_TK >= 0) & (ids_TK < experts)
    ids = torch.where(is_local, ids_TK, experts).flatten().to(torch.int64)
    expert, order = torch.sort(ids, stable=True)
    offsets = torch.searchsorted(expert, torch.arange(experts, device=ids.device), right=True).to(torch.int32)
    sorted_index = torch.empty_like(order)
    sorted_index[order] = torch.arange(order.shape[0], device=order.device)
    return Routing(offsets, order, sorted_index, ids_TK)


def combine(y_SH: Tensor, routing: Routing, weights_TK: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The sum of each token's experts, times the router's weights where given: [T, H] in `dtype`.

    Sums are in fp32 (fp64 for fp64). Pairs of no expert here are left out, even where their weight is NaN.
    """
    y_SH = y_SH.to(torch.promote_types(y_SH.dtype, torch.float32))
    y_TKH = y_SH[routing.sorted_index_S].unflatten(0, routing.ids_TK.shape)
    if weights_TK is not None:
        y_TKH = y_TKH * torch.where(routing.is_local_TK, weights_TK, 0).unsqueeze(-1)
    return torch.where(routing.is_local_TK.unsqueeze(-1), y_TKH, 0).sum(1).to(dtype)
