"""Sensitivity analysis: how much loss each weight adds in each format, and a mixed-precision mapping for a bit budget.

The added loss of a weight (of a linear layer, or the stacked experts of a block) is estimated for all formats from one
forward and backward of each batch, by the diagonal of the Fisher information (`fisher`), as in "SqueezeLLM" (arXiv
2306.07629) and HAWQ-V2 (arXiv 1911.03852). No labels are needed: the loss is the negative log-likelihood of a token
drawn from the model's own logits, or, for a model without logits, its output in a random direction.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mxquant.algorithms.blockwise import Batch, calibration_mode, model_stage
from mxquant.algorithms.fisher import FisherSums, attach_hooks
from mxquant.algorithms.forward_calls import clone_call
from mxquant.config import EVERY_KIND, MXConfig, MXFP4Config, MXFP6Config, MXFP8Config, resolve_config
from mxquant.formats import get_format
from mxquant.select import select_weights
from mxquant.tables import text_table
from mxquant.tensor import MXTensor

_logger = logging.getLogger("mxquant")
_DEFAULT = (MXFP4Config(), MXFP6Config(), MXFP8Config())


@dataclass(frozen=True)
class LayerSensitivity:
    """The estimates for one weight: of a linear layer, or the stacked experts of one matmul."""

    name: str
    """The parameter's name."""
    numel: int
    added_loss: tuple[float, ...]
    """For each config, in the order of `Sensitivity.configs`; summed over all tokens of the batches."""


@dataclass(frozen=True)
class Sensitivity:
    """The result of `sensitivity`, the most sensitive weight first. Prints as a table."""

    configs: tuple[MXConfig, ...]
    layers: list[LayerSensitivity]

    def propose(self, budget: float | str) -> dict[str, MXConfig]:
        """Choose a config for each weight within a budget, as a mapping for `quantize_`.

        Greedy: each weight starts with the best of the smallest configs. Then the change that removes the most loss per
        added bit is made, until none fits the budget.

        Args:
            budget: mean bits per weight, scales included, such as 4.5 or "4.5 bits".

        Raises:
            ValueError: `budget` is not a number, or below the bits of the smallest config.
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
        headers = ["layer", *map(_label, self.configs), "weights"]
        rows = [[row.name, *(f"{loss:.3g}" for loss in row.added_loss), f"{row.numel:,}"] for row in self.layers]
        return text_table(headers, rows)


def sensitivity(
    model: nn.Module, batches: Iterable[Batch], configs: Sequence[object] | object = _DEFAULT, *, seed: int = 0
) -> Sensitivity:
    """Estimate the loss that quantizing each weight alone to each config would add. The model does not change.

    Covers the weights that `quantize_` would quantize. Experts are left out with a warning if their layout does not
    name its projections and gate, or if no batch reaches their block. Changes of the routing are not estimated. The
    estimate is that of rounding to nearest, also for a config with GPTQ. Memory: a backward pass of one batch, and one
    fp32 number per weight element.

    Args:
        batches: each is what the model is called with; some hundreds of tokens are enough.
        configs: one config or several, or their shorthands such as "mxfp4".
        seed: for the draw from the model's predictions.

    Raises:
        ValueError: no batches, configs or weights, a weight that is already quantized, or an output without gradients.
        TypeError: a value in `configs` is not a config.
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
    sums = [FisherSums(target, resolved) for target in targets]
    calls = model_stage(model, list(batches)).calls
    if not calls:
        raise ValueError("there is nothing to estimate from: 0 batches; give some of what the model is called with")
    generator = torch.Generator().manual_seed(seed)
    with calibration_mode(model), _frozen(model), torch.enable_grad():
        handles = attach_hooks(sums)
        if not handles:
            raise _nothing_to_estimate(sums)
        try:
            for args, kwargs in map(clone_call, calls):
                _probe(model(*args, **kwargs), generator).backward()
        finally:
            for handle in handles:
                handle.remove()
    if unknown := [one.target.name for one in sums if not one.has_estimate]:
        _logger.warning(
            "experts are not estimated where no batch reaches them or their layout lacks up, down or gate: %s; "
            "name them beside the proposal, as in found.propose(5) | {'moe': 'mxfp4'}",
            ", ".join(unknown),
        )
    rows = [
        LayerSensitivity(one.target.name, one.target.parameter.numel(), one.losses())
        for one in sums
        if one.has_estimate
    ]
    if not rows:
        raise _nothing_to_estimate(sums)
    return Sensitivity(resolved, sorted(rows, key=lambda row: row.added_loss, reverse=True))


def _label(config: MXConfig) -> str:
    """A config's format and its settings that are not defaults."""
    return " ".join([config.format, *(part for part in config.changes() if not part.startswith("element="))])


def _nothing_to_estimate(sums: Sequence[FisherSums]) -> ValueError:
    names = ", ".join(one.target.name for one in sums)
    return ValueError(f"there is nothing to estimate: it cannot be told what these experts multiply: {names}")


def _probe(output: Any, generator: torch.Generator) -> Tensor:
    """The scalar to differentiate: the log-likelihood of drawn tokens, or the output in a random direction."""
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
    """Switch off the gradients of parameters: only those of activations are needed."""
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
