"""Small models of several shapes, batches for them, and a calibration that stops half-way."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mxquant import experts_forward, quantize_, register_experts_layout
from mxquant.algorithms import sensitivity

WIDTH, INNER, VOCABULARY = 64, 96, 50


class Block(nn.Module):
    """Two projections of one input, a product of them, and a way back."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.gate = nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, hidden_states: Tensor, scale: float = 1.0) -> Tensor:
        x = self.norm(hidden_states)
        return hidden_states + scale * self.down(self.up(x) * torch.sigmoid(self.gate(x)))


class TupleBlock(Block):
    def forward(self, hidden_states: Tensor, scale: float = 1.0) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(hidden_states, scale), None


class Experts(nn.Module):
    """The last expert gets no tokens."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, 2 * INNER, WIDTH) / 8)
        self.down = nn.Parameter(torch.randn(experts, WIDTH, INNER) / 8)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return experts_forward(self, x, ids, weights)


def routing(tokens: int, device: torch.device | None = None) -> Tensor:
    """Two experts of the first three for each token, whatever it is: quantizing must not change who gets what."""
    places = torch.arange(tokens, device=device)
    return torch.stack([places % 3, places // 3 % 3], 1)


register_experts_layout(Experts, {"up": -1, "down": -1}, up="up", down="down", gate_order="halves")


class MoEBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = Experts()

    def forward(self, hidden_states: Tensor, scale: float = 1.0) -> Tensor:
        x = self.norm(hidden_states).flatten(0, -2)
        ids = routing(x.shape[0], x.device)
        y = self.experts(x, ids, x[:, 2:4].sigmoid())
        return hidden_states + scale * y.view(hidden_states.shape)


class Model(nn.Module):
    """An embedding, blocks and a head, which `quantize_` leaves alone unless it is named."""

    def __init__(self, block: type[nn.Module] = Block, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(blocks))
        self.dropout = nn.Dropout(0.5)
        self.pooler = nn.Linear(WIDTH, WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            output: Any = block(hidden, scale=scale)
            hidden = output[0] if isinstance(output, tuple) else output
        return self.lm_head(torch.tanh(self.pooler(self.dropout(hidden))))


class Unchained(Model):
    """Something happens between the blocks."""

    def forward(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = 2 * block(hidden, scale=scale)
        return self.lm_head(torch.tanh(self.pooler(hidden)))


def batches(count: int = 3, rows: int = 8) -> list[Tensor]:
    return [torch.randint(0, VOCABULARY, (rows, 16)) for _ in range(count)]


class Stopped(Exception):
    pass


def stop_after(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, count: int | None) -> list[None]:
    """Let a function of `owner` run `count` times (None: always), then raise; returns one entry for each call."""
    work, calls = getattr(owner, name), list[None]()

    def counted(*args: Any, **kwargs: Any) -> Any:
        if len(calls) == count:
            raise Stopped
        calls.append(None)
        return work(*args, **kwargs)

    monkeypatch.setattr(owner, name, counted)
    return calls


@torch.no_grad()
def losses_within_budgets(model: nn.Module, data: list[Tensor]) -> list[float]:
    """The divergence from the model's predictions when it is quantized within 4.25, 5 and 6.25 bits by sensitivity."""
    found, losses = sensitivity(model, data), []
    expected = [model(ids).logits.log_softmax(-1) for ids in data]
    for budget in (4.25, 5, 6.25):
        quantized = copy.deepcopy(model)
        quantize_(quantized, found.propose(budget))
        outputs = [quantized(ids).logits.log_softmax(-1) for ids in data]
        losses.append(sum((p.exp() * (p - q)).sum().item() for p, q in zip(expected, outputs, strict=True)))
    return losses
