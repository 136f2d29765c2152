"""Small models and a backend that several tests share, and `snapshot`, by which they see that nothing changed."""

from typing import Any

import torch
from torch import Tensor, nn

from mxquant import MXTensor
from mxquant.backends import Backend, Operand, Problem


def mlp(**options: Any) -> nn.Sequential:
    return nn.Sequential(nn.Linear(40, 64, **options), nn.ReLU(), nn.Linear(64, 16, bias=False, **options))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, 32)
        self.fc = nn.Linear(32, 32)
        self.lm_head = nn.Linear(32, 48, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.lm_head(self.fc(self.embed(ids)))


class WithExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(32, 32)
        self.experts = nn.ParameterDict({"w1": torch.randn(2, 32, 32), "w2": torch.randn(2, 32, 32)})


def snapshot(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Identity and bytes of every tensor, and the attributes of every module."""

    def contents(tensor: Tensor) -> bytes:
        if tensor.is_meta or tensor.is_sparse:
            return b""
        if isinstance(tensor, MXTensor):
            return b"".join(contents(inner) for inner in tensor.operand if inner is not None)
        return bytes(tensor.detach().clone().contiguous().view(torch.uint8).flatten().tolist())

    tensors = {name: (id(t), type(t), t.requires_grad, contents(t)) for name, t in model.named_parameters()}
    return tensors | {f"{name}()": (sorted(vars(module)),) for name, module in model.named_modules()}


class Picky(Backend):
    """Takes weight-only MXFP4 alone, and answers 1000 to everything, by which it is recognized."""

    name = "picky"

    def reject(self, problem: Problem) -> str | None:
        if problem.weight != "mxfp4":
            return f"only mxfp4, not {problem.weight}"
        return None if problem.activation is None else "weight-only"

    def matmul(self, x: Tensor, weight: Operand, bias: Tensor | None, problem: Problem) -> Tensor:
        return x.new_full((x.shape[0], problem.out_features), 1000.0)
