"""What a block of experts must give, in float64, one token and one expert at a time.

Nothing of `mxquant.modules` is used: parameters and flags are those of transformers, weights are decoded by
`matmul_reference`. Each step can be done wrongly on purpose, by which a check is shown to notice it.
"""

from collections.abc import Callable
from typing import Any

import torch
from matmul_reference import activation64, decode64
from torch import Tensor, nn

from mxquant import MXTensor


def weight64(parameter: Tensor, is_transposed: bool) -> Tensor:
    """[E, N, K] in float64."""
    tensor = parameter.transpose(-2, -1) if is_transposed else parameter
    return decode64(tensor) if isinstance(tensor, MXTensor) else tensor.detach().double()


def block64(
    experts: Any,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    activation: str | None,
    *,
    gate: Callable[[Tensor], Tensor] | None = None,
    has_bias: bool | None = None,
    quantizes_twice: bool = True,
    router_weight: str = "output",
) -> Tensor:
    """[T, H] in float64, of a block with the flags that transformers' decorator sets."""
    is_transposed, has_gate = experts.is_transposed, getattr(experts, "has_gate", True)
    up_name = "gate_up_proj" if has_gate else "up_proj"
    up, down = (weight64(getattr(experts, name), is_transposed) for name in (up_name, "down_proj"))
    gate = gate or (experts._apply_gate if has_gate else experts.act_fn)
    has_bias = experts.has_bias if has_bias is None else has_bias
    y = torch.zeros(x.shape, dtype=torch.float64)
    for token, choice in torch.cartesian_prod(torch.arange(ids.shape[0]), torch.arange(ids.shape[1])).tolist():
        expert, scale = int(ids[token, choice]), weights[token, choice].double()
        if not 0 <= expert < down.shape[0]:
            continue
        row = x[token : token + 1].double() * (scale if router_weight == "input" else 1)
        h = activation64(row, activation) @ up[expert].T
        if has_bias:
            h = h + getattr(experts, f"{up_name}_bias")[expert].double()
        h = gate(h)
        out = activation64(h, activation if quantizes_twice else None) @ down[expert].T
        if has_bias:
            out = out + experts.down_proj_bias[expert].double()
        if getattr(experts, "has_post_expert_norm", False):
            out = experts.post_expert_norm(out)
        y[token] += out[0] * (scale if router_weight == "output" else 1)
    return y


def routing(tokens: int, experts: int, k: int = 2) -> tuple[Tensor, Tensor]:
    """Ids [T, k], no expert twice for one token, and weights [T, k] that sum to one."""
    scores = torch.rand(tokens, experts)
    weights, ids = scores.topk(k)
    return ids, weights / weights.sum(-1, keepdim=True)


def relative_error(y: Tensor, expected: Tensor) -> float:
    return ((y.double() - expected).norm() / expected.norm()).item()


def assert_block(y: Tensor, expected: Tensor, bound: float) -> None:
    """`y` within `bound` of float64, in Frobenius norm and, of the largest output, everywhere."""
    assert y.shape == expected.shape
    assert torch.isfinite(y).all()
    assert relative_error(y, expected) <= bound
    assert (y.double() - expected).abs().max() <= 4 * bound * expected.abs().max()


def run(experts: nn.Module, implementation: str, *arguments: Tensor) -> Tensor:
    experts.config._experts_implementation = implementation
    with torch.no_grad():
        return experts(*arguments)
