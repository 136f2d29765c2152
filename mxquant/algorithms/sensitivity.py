"""Which layers a format costs most, and a mapping of formats for a budget of bits.

The loss that quantizing a layer adds is estimated for all layers and formats from one forward and backward of each
batch: half the sum of (gradient x error)^2, over the elements of the weight, token by token, and of the input where
activations are quantized. That is the diagonal of the Fisher information, as in "SqueezeLLM" (arXiv 2306.07629) and
HAWQ-V2 (arXiv 1911.03852). Gradients are those of the model's own predictions: of the logarithm of a token drawn from
its logits; or, for a model without logits, of its output in a random direction. No labels are needed.

Legend: T tokens, N output features, K input features.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mxquant.algorithms.stages import Batch, calibrating, model_stage
from mxquant.config import EVERY_KIND, MXFP4Config, MXFP6Config, MXFP8Config, _MXConfig, resolve_config
from mxquant.formats import get_format
from mxquant.kernels.qdq import quantize_dequantize
from mxquant.kernels.rotate import rotate
from mxquant.select import select
from mxquant.tensor import quantize

_DEFAULT = (MXFP4Config(), MXFP6Config(), MXFP8Config())


@dataclass(frozen=True)
class LayerSensitivity:
    """One linear layer."""

    name: str
    """Of its weight."""
    numel: int
    added_loss: tuple[float, ...]
    """The estimate for each config, in the order of `Sensitivity.configs`; sums over all tokens of the batches."""


@dataclass(frozen=True)
class Sensitivity:
    """What `sensitivity` found, the most sensitive layer first. Prints as a table."""

    configs: tuple[_MXConfig, ...]
    layers: list[LayerSensitivity]

    def propose(self, budget: float | str) -> dict[str, _MXConfig]:
        """A mapping for `quantize_`: for each weight one of the configs, within a mean number of bits a weight.

        From the cheapest configs on, what takes away most loss a bit comes first.

        Args:
            budget: such as 4.5 or "4.5 bits", scales included.

        Raises:
            ValueError: no number, or fewer bits than the smallest config takes.
        """
        allowed = _parse_budget(budget)
        bits = [get_format(config.format).bits_per_weight for config in self.configs]
        if allowed < min(bits):
            raise ValueError(f"budget={budget!r} is below the smallest config's {min(bits)} bits a weight")
        cheapest = bits.index(min(bits))
        chosen = dict.fromkeys((layer.name for layer in self.layers), cheapest)
        left = (allowed - bits[cheapest]) * sum(layer.numel for layer in self.layers)
        while True:
            best: tuple[float, str, int, float] | None = None
            for layer in self.layers:
                now = chosen[layer.name]
                for index, more in enumerate(bits):
                    cost = (more - bits[now]) * layer.numel
                    gain = layer.added_loss[now] - layer.added_loss[index]
                    if 0 < cost <= left and gain > 0 and (best is None or gain / cost > best[0]):
                        best = (gain / cost, layer.name, index, cost)
            if best is None:
                return {name: self.configs[index] for name, index in chosen.items()}
            _, name, index, cost = best
            chosen[name] = index
            left -= cost

    def __str__(self) -> str:
        from rich import box
        from rich.console import Console
        from rich.table import Table

        table = Table("layer", *(config.format for config in self.configs), "weights", box=box.MARKDOWN)
        for layer in self.layers:
            table.add_row(layer.name, *(f"{loss:.3g}" for loss in layer.added_loss), f"{layer.numel:,}")
        text = io.StringIO()
        Console(file=text, width=10_000, color_system=None, markup=False, emoji=False, highlight=False).print(table)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines() if line.strip())


def sensitivity(
    model: nn.Module, batches: Iterable[Batch], configs: Sequence[object] = _DEFAULT, *, seed: int = 0
) -> Sensitivity:
    """Estimate what quantizing each linear layer alone to each config would add to the loss. The model stays as it is.

    Experts are not looked at, nor what `quantize_` would leave alone. A config's GPTQ is not run: the estimate is that
    of rounding. Memory is that of a backward pass of one batch, and one fp32 number a weight.

    Args:
        batches: some hundreds of tokens are enough; each batch is what the model is called with.
        configs: configs or their shorthands, such as "mxfp4".
        seed: of the draw from the model's predictions.

    Raises:
        ValueError: no batches, configs or layers, or an output that has no gradients.
        TypeError: a config that is none.
    """
    resolved = tuple(config for value in configs if (config := resolve_config(value)) is not None)
    if not resolved:
        raise ValueError(f"configs={configs!r} has none; give configs such as 'mxfp4', 'mxfp6'")
    targets = select(model, {EVERY_KIND: resolved[0]}).targets
    layers = {
        site.name: site.module for target in targets for site in target.sites[:1] if isinstance(site.module, nn.Linear)
    }
    calls = model_stage(model, list(batches)).calls
    if not calls or not layers:
        raise ValueError(f"there is nothing to estimate: {len(calls)} batches, {len(layers)} linear layers")
    sums = {name: _Sums(layer.weight.detach(), resolved) for name, layer in layers.items()}
    generator = torch.Generator().manual_seed(seed)
    with calibrating(model), _frozen(model), torch.enable_grad():
        handles = [layer.register_forward_hook(sums[name].hook) for name, layer in layers.items()]
        handles += [layer.register_forward_pre_hook(_require_gradient) for layer in layers.values()]
        try:
            for args, kwargs in calls:
                _probe(model(*args, **kwargs), generator).backward()
        finally:
            for handle in handles:
                handle.remove()
    rows = [LayerSensitivity(name, layers[name].weight.numel(), found.losses()) for name, found in sums.items()]
    return Sensitivity(resolved, sorted(rows, key=lambda row: row.added_loss, reverse=True))


class _Sums:
    """Of one layer: the squared gradients of its weight, and the losses that its quantized inputs add."""

    def __init__(self, weight_NK: Tensor, configs: Sequence[_MXConfig]) -> None:
        self.weight_NK = weight_NK.float()
        self.configs = configs
        self.fisher_NK = torch.zeros_like(self.weight_NK)
        self.input_losses = [0.0] * len(configs)

    def hook(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        x_TK = args[0].detach().flatten(0, -2).float()
        output.register_hook(lambda gradient: self._add(x_TK, gradient.flatten(0, -2).float()))

    def _add(self, x_TK: Tensor, gradient_TN: Tensor) -> None:
        self.fisher_NK.addmm_(gradient_TN.square().t(), x_TK.square())
        gradient_TK = gradient_TN @ self.weight_NK
        for index, config in enumerate(self.configs):
            if config.activation_format is not None:
                error_TK = _quantized_input(x_TK, config) - x_TK
                self.input_losses[index] += 0.5 * (gradient_TK * error_TK).square().sum().item()

    def losses(self) -> tuple[float, ...]:
        """For each config, of the weight's and the inputs' errors together."""
        found = []
        for config, of_inputs in zip(self.configs, self.input_losses, strict=True):
            rotation = config.rotation
            q = quantize(self.weight_NK, config.format, scale_mode=config.scale_mode, rotation=rotation)
            error_NK = q.dequantize() - self.weight_NK
            found.append(0.5 * (self.fisher_NK * error_NK.square()).sum().item() + of_inputs)
        return tuple(found)


def _quantized_input(x_TK: Tensor, config: _MXConfig) -> Tensor:
    """What the matmul makes of its input, rotated back."""
    assert config.activation_format is not None
    fmt = get_format(config.activation_format, activation=True)
    mode = config.activation_scale_mode or fmt.default_scale_mode
    given = x_TK if config.rotation is None else rotate(x_TK, config.rotation)
    values, outer = quantize_dequantize(given, fmt, mode, None, torch.float32)
    values = values if outer is None else values * outer
    return values if config.rotation is None else rotate(values, config.rotation)


def _require_gradient(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Gradients reach a layer's output also where no parameter before it takes any."""
    first, *rest = args
    return (first if first.requires_grad else first.detach().requires_grad_(), *rest)


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
