"""Which weights a format costs most, and a mapping of formats for a budget of bits.

The loss that quantizing a weight adds, a linear layer's or a block's stacked experts, is estimated for all weights and
formats from one forward and backward of each batch: half the sum of (gradient x error)^2, over the elements of the
weight, token by token, and of the input where activations are quantized (`fisher`). That is the diagonal of the Fisher
information, as in "SqueezeLLM" (arXiv 2306.07629) and HAWQ-V2 (arXiv 1911.03852). Gradients are those of the model's
own predictions: of the logarithm of a token drawn from its logits; or, for a model without logits, of its output in a
random direction. No labels are needed.
"""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mxquant.algorithms.calls import fresh
from mxquant.algorithms.fisher import Sums, observe
from mxquant.algorithms.stages import Batch, calibrating, model_stage
from mxquant.config import EVERY_KIND, MXFP4Config, MXFP6Config, MXFP8Config, _MXConfig, resolve_config
from mxquant.formats import get_format
from mxquant.select import select_weights
from mxquant.tensor import MXTensor

_logger = logging.getLogger("mxquant")
_DEFAULT = (MXFP4Config(), MXFP6Config(), MXFP8Config())


@dataclass(frozen=True)
class LayerSensitivity:
    """One weight: of a linear layer, or the stacked experts of a block in one of its matmuls."""

    name: str
    """Of the parameter."""
    numel: int
    added_loss: tuple[float, ...]
    """The estimate for each config, in the order of `Sensitivity.configs`; sums over all tokens of the batches."""


@dataclass(frozen=True)
class Sensitivity:
    """What `sensitivity` found, the most sensitive weight first. Prints as a table."""

    configs: tuple[_MXConfig, ...]
    layers: list[LayerSensitivity]

    def propose(self, budget: float | str) -> dict[str, _MXConfig]:
        """A mapping for `quantize_`: for each weight one of the configs, within a mean number of bits a weight.

        Each weight begins with the best of the cheapest configs; then what takes away most loss a bit comes first.

        Args:
            budget: such as 4.5 or "4.5 bits", scales included.

        Raises:
            ValueError: no number, or fewer bits than the smallest config takes.
        """
        allowed = _parse_budget(budget)
        bits = [get_format(config.format).bits_per_weight for config in self.configs]
        if allowed < min(bits):
            raise ValueError(f"budget={budget!r} is below the smallest config's {min(bits)} bits a weight")
        cheapest = [index for index, one in enumerate(bits) if one == min(bits)]
        chosen = {layer.name: min(cheapest, key=layer.added_loss.__getitem__) for layer in self.layers}
        left = (allowed - min(bits)) * sum(layer.numel for layer in self.layers)
        while True:
            best: tuple[float, str, int, float] | None = None
            for layer in self.layers:
                now = chosen[layer.name]
                for index, more in enumerate(bits):
                    cost = (more - bits[now]) * layer.numel
                    gain = layer.added_loss[now] - layer.added_loss[index]
                    if cost < 0 or cost > left or gain <= 0:
                        continue
                    worth = gain / cost if cost else math.inf
                    if best is None or worth > best[0]:
                        best = (worth, layer.name, index, cost)
            if best is None:
                return {name: self.configs[index] for name, index in chosen.items()}
            _, name, index, cost = best
            chosen[name] = index
            left -= cost

    def __str__(self) -> str:
        from rich import box
        from rich.console import Console
        from rich.table import Table

        table = Table("layer", *map(_label, self.configs), "weights", box=box.MARKDOWN)
        for layer in self.layers:
            table.add_row(layer.name, *(f"{loss:.3g}" for loss in layer.added_loss), f"{layer.numel:,}")
        text = io.StringIO()
        Console(file=text, width=10_000, color_system=None, markup=False, emoji=False, highlight=False).print(table)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines() if line.strip())


def sensitivity(
    model: nn.Module, batches: Iterable[Batch], configs: Sequence[object] | object = _DEFAULT, *, seed: int = 0
) -> Sensitivity:
    """Estimate what quantizing each weight alone to each config would add to the loss. The model stays as it is.

    What `quantize_` would leave alone is not looked at. Experts of a layout that does not say what they multiply, or
    whose block no batch reaches, are left out with a warning; a change of the routing is not estimated. A config's GPTQ
    is not run: the estimate is that of rounding. Memory is that of a backward pass of one batch, and one fp32 number a
    weight.

    Args:
        batches: some hundreds of tokens are enough; each batch is what the model is called with.
        configs: configs or their shorthands, such as "mxfp4"; or one alone.
        seed: of the draw from the model's predictions.

    Raises:
        ValueError: no batches, configs or weights, a weight that is quantized already, or an output that has no
            gradients.
        TypeError: a config that is none.
    """
    given = configs if isinstance(configs, Iterable) and not isinstance(configs, (str, Mapping)) else [configs]
    resolved = tuple(config for value in given if (config := resolve_config(value)) is not None)
    if not resolved:
        raise ValueError(f"configs={configs!r} has none; give configs such as 'mxfp4', 'mxfp6'")
    targets = select_weights(model, {EVERY_KIND: resolved[0]}).targets
    if quantized := [target.name for target in targets if isinstance(target.parameter, MXTensor)]:
        raise ValueError(
            f"{len(quantized)} weights are quantized already, such as {quantized[0]}; estimate on the model as it was "
            "before quantize_"
        )
    sums = [Sums(target, resolved) for target in targets]
    calls = model_stage(model, list(batches)).calls
    if not calls:
        raise ValueError("there is nothing to estimate from: 0 batches; give some of what the model is called with")
    generator = torch.Generator().manual_seed(seed)
    with calibrating(model), _frozen(model), torch.enable_grad():
        handles = observe(sums)
        if not handles:
            raise _nothing_to_estimate(sums)
        try:
            for args, kwargs in map(fresh, calls):
                _probe(model(*args, **kwargs), generator).backward()
        finally:
            for handle in handles:
                handle.remove()
    if unknown := [one.target.name for one in sums if not one.is_known]:
        _logger.warning(
            "experts are not estimated where no batch reaches them or their layout lacks up, down or gate: %s; "
            "name them beside the proposal, as in found.propose(5) | {'moe': 'mxfp4'}",
            ", ".join(unknown),
        )
    rows = [
        LayerSensitivity(one.target.name, one.target.parameter.numel(), one.losses()) for one in sums if one.is_known
    ]
    if not rows:
        raise _nothing_to_estimate(sums)
    return Sensitivity(resolved, sorted(rows, key=lambda row: row.added_loss, reverse=True))


def _label(config: _MXConfig) -> str:
    """What tells a config apart: its format, and what is not that config's default."""
    return " ".join([config.format, *(part for part in config.changes() if not part.startswith("element="))])


def _nothing_to_estimate(sums: Sequence[Sums]) -> ValueError:
    names = ", ".join(one.target.name for one in sums)
    return ValueError(f"there is nothing to estimate: it cannot be told what these experts multiply: {names}")


def _probe(output: Any, generator: torch.Generator) -> Tensor:
    """The scalar whose gradients are squared."""
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        log_p = logits.float().log_softmax(-1).flatten(0, -2)
        drawn = torch.multinomial(log_p.detach().exp().cpu(), 1, generator=generator).to(log_p.device)
        return log_p.gather(-1, drawn).sum()
    first = (
        output if isinstance(output, Tensor) else next(iter(output.values() if isinstance(output, Mapping) else output))
    )
    if not isinstance(first, Tensor) or not first.requires_grad:
        raise ValueError(f"the model's output, {type(first).__name__}, has no gradients to estimate from")
    return (first * torch.randn(first.shape, generator=generator).to(first)).sum()


@contextmanager
def _frozen(model: nn.Module) -> Any:
    """Without gradients of parameters, which nobody asks for."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def _parse_budget(budget: float | str) -> float:
    text = budget.removesuffix("bits").removesuffix("bit").strip() if isinstance(budget, str) else budget
    try:
        return float(text)
    except (TypeError, ValueError):
        raise ValueError(f"budget={budget!r} is no number of bits a weight; give 4.5 or '4.5 bits'") from None
