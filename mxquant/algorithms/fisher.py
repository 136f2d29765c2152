"""Estimating the loss that quantizing each weight adds, by the diagonal of the Fisher information.

Hooks see a layer's inputs in the forward and the gradients of its outputs in the backward. The estimate for one matrix
is half the sum of (gradient x error)^2 over the elements of the weight, token by token. With quantized activations the
same sum over the inputs is added. Each expert has one matrix, and the tokens that are routed to it. A block of experts
runs unchanged in the forward; its backward hook recomputes it expert by expert to get the gradients inside.

Legend: T tokens (of one expert: rows R), N output features, K input features, H width of a token.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mxquant.algorithms.expert_inputs import expert_linear, is_routed_call, routed_rows, weight_matrix
from mxquant.algorithms.forward_calls import tensor_version
from mxquant.config import MXConfig
from mxquant.formats import get_format
from mxquant.modules.experts import ExpertsLayout
from mxquant.modules.quantize_target import Target
from mxquant.reference.fake_quantize import fake_quantize
from mxquant.reference.hadamard import hadamard
from mxquant.tensor import quantize


class FisherSums:
    """For one weight: the Fisher diagonal of each of its matrices, and the loss that quantized inputs add."""

    def __init__(self, target: Target, configs: Sequence[MXConfig]) -> None:
        self.target = target
        self.has_estimate = any(site.kind == "linear" for site in target.sites)
        """Whether there is an estimate. Experts have one once their block has run."""
        self._configs = configs
        self._fisher: dict[int, Tensor] = {}
        self._input_losses = [0.0] * len(configs)

    def add(self, index: int, x_TK: Tensor, gradient_TN: Tensor) -> Tensor:
        """Accumulate the rows that matrix `index` multiplies. Returns their gradients, fp32 [T, K]."""
        matrix_NK = weight_matrix(self.target, index).float()
        x_TK, gradient_TN = x_TK.detach().float(), gradient_TN.float()
        if index not in self._fisher:
            self._fisher[index] = torch.zeros_like(matrix_NK, memory_format=torch.contiguous_format)
        self._fisher[index].addmm_(gradient_TN.square().t(), x_TK.square())
        gradient_TK = gradient_TN @ matrix_NK
        for position, config in enumerate(self._configs):
            if config.activation_format is not None:
                error_TK = _quantized_input(x_TK, config) - x_TK
                self._input_losses[position] += 0.5 * (gradient_TK * error_TK).square().sum().item()
        return gradient_TK

    def losses(self) -> tuple[float, ...]:
        """The added loss for each config, by the errors of the weight and of the inputs."""
        found = list(self._input_losses)
        for index, fisher_NK in self._fisher.items():
            matrix_NK = weight_matrix(self.target, index).float()
            for position, config in enumerate(self._configs):
                q = quantize(matrix_NK, config.format, scale_mode=config.scale_mode, rotation=config.rotation)
                error_NK = q.dequantize() - matrix_NK
                found[position] += 0.5 * (fisher_NK * error_NK.square()).sum().item()
        return tuple(found)


def attach_hooks(sums: Sequence[FisherSums]) -> list[RemovableHandle]:
    """Attach the hooks that accumulate into `sums`. Remove them by the handles."""
    handles = []
    blocks: dict[nn.Module, dict[str, FisherSums]] = {}
    kept = _InputCopies()
    for one in sums:
        for site in one.target.computing_sites:
            if site.kind == "experts":
                blocks.setdefault(site.module, {})[site.attribute] = one
                continue
            handles.append(site.module.register_forward_pre_hook(_require_gradient))
            handles.append(site.module.register_forward_hook(_linear_hook(one, kept)))
    for module, parts in blocks.items():
        layout = next(iter(parts.values())).target.sites[0].layout
        if layout is not None and layout.is_computable and {*layout.up, layout.down} <= parts.keys():
            handles.append(module.register_forward_pre_hook(_require_gradient))
            handles.append(module.register_forward_hook(_experts_hook(layout, parts, kept)))
    return handles


class _InputCopies:
    """Copies of inputs, since the model may change them in place before the backward. Layers share one copy."""

    def __init__(self) -> None:
        self._last: tuple[weakref.ref[Tensor], int, weakref.ref[Tensor]] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self._last is not None:
            source, version, copy = self._last
            kept = copy()
            if kept is not None and source() is x and version == tensor_version(x):
                return kept
        kept = x.detach().clone()
        self._last = weakref.ref(x), tensor_version(x), weakref.ref(kept)
        return kept


def _linear_hook(sums: FisherSums, kept: _InputCopies) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        x = kept(args[0])
        output.register_hook(lambda gradient: _add_linear(sums, x.flatten(0, -2), gradient.flatten(0, -2)))

    return hook


def _add_linear(sums: FisherSums, x_TK: Tensor, gradient_TN: Tensor) -> None:
    sums.add(0, x_TK, gradient_TN)


def _experts_hook(layout: ExpertsLayout, parts: Mapping[str, FisherSums], kept: _InputCopies) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if is_routed_call(args) and isinstance(output, Tensor):
            given = tuple(kept(argument) for argument in args)
            output.register_hook(lambda gradient: _add_experts(module, layout, parts, given, gradient))

    return hook


def _add_experts(
    module: nn.Module,
    layout: ExpertsLayout,
    parts: Mapping[str, FisherSums],
    args: tuple[Any, ...],
    gradient_TH: Tensor,
) -> None:
    """Backpropagate the gradient of a block's output to the outputs of each of its matrices."""
    assert layout.down is not None
    assert layout.gate is not None
    for sums in parts.values():
        sums.has_estimate = True
    for rows in routed_rows(module, layout, args):
        with torch.enable_grad():
            outputs = [
                expert_linear(module, layout, name, rows.expert, rows.x_RH).requires_grad_() for name in layout.up
            ]
            h_RK = layout.gate(module, *outputs)
            y_RH = expert_linear(module, layout, layout.down, rows.expert, h_RK.detach()).requires_grad_()
            given_RH = y_RH if layout.post_norm is None else getattr(module, layout.post_norm)(y_RH)
            given_RH = given_RH if rows.weight_R1 is None else given_RH * rows.weight_R1
        (gradient_RH,) = torch.autograd.grad(given_RH, y_RH, gradient_TH[rows.token_R].to(given_RH.dtype))
        gradient_RK = parts[layout.down].add(rows.expert, h_RK, gradient_RH)
        for name, gradient_RN in zip(
            layout.up, torch.autograd.grad(h_RK, outputs, gradient_RK.to(h_RK.dtype)), strict=True
        ):
            parts[name].add(rows.expert, rows.x_RH, gradient_RN)


def _quantized_input(x_TK: Tensor, config: MXConfig) -> Tensor:
    """The input as the matmul rounds it: rotated, fake-quantized and rotated back."""
    assert config.activation_format is not None
    fmt = get_format(config.activation_format, activation=True)
    mode = config.activation_scale_mode or fmt.default_scale_mode
    given = x_TK if config.rotation is None else hadamard(x_TK, config.rotation)
    values, outer = fake_quantize(given, fmt, mode, None, torch.float32)
    values = values if outer is None else values * outer
    return values if config.rotation is None else hadamard(values, config.rotation)


def _require_gradient(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Let gradients reach a layer's output where no parameter before it requires any."""
    if not args or not isinstance(args[0], Tensor):
        return args
    first, *rest = args
    return (first if first.requires_grad else first.detach().requires_grad_(), *rest)
