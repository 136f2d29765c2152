"""What quantizing each weight alone adds to the loss, from gradients that hooks see during a backward.

For one matrix: half the sum of (gradient x error)^2, over the elements of the weight, token by token, and of its
inputs where activations are quantized. Experts have one matrix each, and the tokens that are routed to them. A block
of experts runs as its model says; what passes inside it is computed again in its backward, one expert after the other.

Legend: T tokens (of one expert: rows R), N output features, K input features, H width of a token.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mxquant.algorithms.calls import version_of
from mxquant.algorithms.matrices import is_computable, is_routed_call, matrix_of, multiply, rows_of_experts
from mxquant.config import _MXConfig
from mxquant.formats import get_format
from mxquant.modules.experts import ExpertsLayout
from mxquant.modules.quantize_target import Target
from mxquant.reference.fake_quantize import fake_quantize
from mxquant.reference.hadamard import hadamard
from mxquant.tensor import quantize


class Sums:
    """Of one weight: the squared gradients of its matrices, and the losses that their quantized inputs add."""

    def __init__(self, target: Target, configs: Sequence[_MXConfig]) -> None:
        self.target = target
        self.is_known = any(site.kind == "linear" for site in target.sites)
        """Whether its estimate means something. That of experts does when their block was seen to run."""
        self._configs = configs
        self._fisher: dict[int, Tensor] = {}
        self._input_losses = [0.0] * len(configs)

    def add(self, index: int, x_TK: Tensor, gradient_TN: Tensor) -> Tensor:
        """Rows that matrix `index` multiplies and the gradients of what comes out; those of the rows, fp32 [T, K]."""
        matrix_NK = matrix_of(self.target, index).float()
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
        """For each config, of the weight's and the inputs' errors together."""
        found = list(self._input_losses)
        for index, fisher_NK in self._fisher.items():
            matrix_NK = matrix_of(self.target, index).float()
            for position, config in enumerate(self._configs):
                q = quantize(matrix_NK, config.format, scale_mode=config.scale_mode, rotation=config.rotation)
                error_NK = q.dequantize() - matrix_NK
                found[position] += 0.5 * (fisher_NK * error_NK.square()).sum().item()
        return tuple(found)


def observe(sums: Sequence[Sums]) -> list[RemovableHandle]:
    """Hooks that add what forwards and backwards show, until their handles are removed."""
    handles = []
    blocks: dict[nn.Module, dict[str, Sums]] = {}
    kept = _Kept()
    for one in sums:
        for site in one.target.computing_sites:
            if site.kind == "experts":
                blocks.setdefault(site.module, {})[site.attribute] = one
                continue
            handles.append(site.module.register_forward_pre_hook(_require_gradient))
            handles.append(site.module.register_forward_hook(_linear_hook(one, kept)))
    for module, parts in blocks.items():
        layout = next(iter(parts.values())).target.sites[0].layout
        if layout is not None and is_computable(layout) and {*layout.up, layout.down} <= parts.keys():
            handles.append(module.register_forward_pre_hook(_require_gradient))
            handles.append(module.register_forward_hook(_experts_hook(layout, parts, kept)))
    return handles


class _Kept:
    """Copies of inputs, which the model may work on in place before the backward; one for layers that share one."""

    def __init__(self) -> None:
        self._last: tuple[weakref.ref[Tensor], int, weakref.ref[Tensor]] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self._last is not None:
            source, version, copy = self._last
            kept = copy()
            if kept is not None and source() is x and version == version_of(x):
                return kept
        kept = x.detach().clone()
        self._last = weakref.ref(x), version_of(x), weakref.ref(kept)
        return kept


def _linear_hook(sums: Sums, kept: _Kept) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        x = kept(args[0])
        output.register_hook(lambda gradient: _add_linear(sums, x.flatten(0, -2), gradient.flatten(0, -2)))

    return hook


def _add_linear(sums: Sums, x_TK: Tensor, gradient_TN: Tensor) -> None:
    sums.add(0, x_TK, gradient_TN)


def _experts_hook(layout: ExpertsLayout, parts: Mapping[str, Sums], kept: _Kept) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if is_routed_call(args) and isinstance(output, Tensor):
            given = tuple(kept(argument) for argument in args)
            output.register_hook(lambda gradient: _add_experts(module, layout, parts, given, gradient))

    return hook


def _add_experts(
    module: nn.Module,
    layout: ExpertsLayout,
    parts: Mapping[str, Sums],
    args: tuple[Any, ...],
    gradient_TH: Tensor,
) -> None:
    """From the gradient of a block's output, those of what each of its matrices gives."""
    assert layout.down is not None
    assert layout.gate is not None
    for sums in parts.values():
        sums.is_known = True
    for rows in rows_of_experts(module, layout, args):
        with torch.enable_grad():
            outputs = [multiply(module, layout, name, rows.expert, rows.x_RH).requires_grad_() for name in layout.up]
            h_RK = layout.gate(module, *outputs)
            y_RH = multiply(module, layout, layout.down, rows.expert, h_RK.detach()).requires_grad_()
            given_RH = y_RH if layout.post_norm is None else getattr(module, layout.post_norm)(y_RH)
            given_RH = given_RH if rows.weight_R1 is None else given_RH * rows.weight_R1
        (gradient_RH,) = torch.autograd.grad(given_RH, y_RH, gradient_TH[rows.token_R].to(given_RH.dtype))
        gradient_RK = parts[layout.down].add(rows.expert, h_RK, gradient_RH)
        for name, gradient_RN in zip(
            layout.up, torch.autograd.grad(h_RK, outputs, gradient_RK.to(h_RK.dtype)), strict=True
        ):
            parts[name].add(rows.expert, rows.x_RH, gradient_RN)


def _quantized_input(x_TK: Tensor, config: _MXConfig) -> Tensor:
    """What the matmul makes of its input, rotated back."""
    assert config.activation_format is not None
    fmt = get_format(config.activation_format, activation=True)
    mode = config.activation_scale_mode or fmt.default_scale_mode
    given = x_TK if config.rotation is None else hadamard(x_TK, config.rotation)
    values, outer = fake_quantize(given, fmt, mode, None, torch.float32)
    values = values if outer is None else values * outer
    return values if config.rotation is None else hadamard(values, config.rotation)


def _require_gradient(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Gradients reach a layer's output also where no parameter before it takes any."""
    if not args or not isinstance(args[0], Tensor):
        return args
    first, *rest = args
    return (first if first.requires_grad else first.detach().requires_grad_(), *rest)
