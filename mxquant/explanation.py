"""`explain`: which backend computes a quantized layer, and why the others do not."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from mxquant.backends import Problem, TunableBackend, candidates, get_backend
from mxquant.backends.kernel_choice import select_kernel
from mxquant.tables import html_table, text_table
from mxquant.tensor import MXTensor, describe, requested_backend


@dataclass(frozen=True)
class Explanation:
    """Which backend computes a layer, and why not the others. Prints as text, renders as HTML in a notebook."""

    matmul: str
    """The matmul in words: precision, formats, shapes and device."""
    requested: str
    """The backend that the config names, or "auto"."""
    chosen: str | None
    """The backend that computes the matmul; None if the requested one cannot."""
    backends: list[tuple[str, str]]
    """Each backend in the order of selection: its name, and "chosen" or the reason against it."""
    others: tuple[Explanation, ...] = ()
    """For a block of experts: the explanations of its other weights."""

    def __str__(self) -> str:
        own = f"{self._title()}\n{text_table(['backend', 'verdict'], self.backends)}"
        return "\n\n".join([own, *map(str, self.others)])

    def _repr_html_(self) -> str:
        own = f"<p>{html.escape(self._title())}</p>{html_table(['backend', 'verdict'], self.backends)}"
        return f"<div>{own}{''.join(other._repr_html_() for other in self.others)}</div>"

    def _title(self) -> str:
        return f"{self.matmul}; requested backend: {self.requested}"


def explain(
    module_or_tensor: nn.Module | Tensor,
    input_shape: Sequence[int] | None = None,
    device: torch.device | str | None = None,
) -> Explanation:
    """Which backend computes a quantized layer, and why the others do not.

    Args:
        module_or_tensor: a layer with a quantized weight, a block with quantized experts, or such a weight.
        input_shape: shape [..., in_features] of an input. The answer then includes the kernel that a backend with
            several kernels uses for this number of rows, and whether `mxquant.tune` chose it.
        device: answer as if the layer were on this device; None: its own.

    Returns:
        the explanation of the layer's weight; for a block of experts that of the first weight, with `others`.

    Raises:
        ValueError: no quantized weight, or `input_shape` does not fit the (first) weight.
        TypeError: `module_or_tensor` is neither a module nor a tensor, or `input_shape` not a sequence of integers.
    """
    first, *others = _quantized_weights(module_or_tensor)
    if input_shape is not None and not (isinstance(input_shape, Sequence) and all(type(n) is int for n in input_shape)):
        raise TypeError(f"input_shape is a sequence of sizes such as (4, 4096); got {input_shape!r}")
    device = None if device is None else _parsed_device(device)
    in_features = describe(first).in_features
    if input_shape is not None and (not input_shape or input_shape[-1] != in_features or min(input_shape) < 0):
        raise ValueError(
            f"input_shape {tuple(input_shape)} does not fit a weight of shape {tuple(first.shape)}: "
            f"no size is negative, and the last is its in_features, {in_features}"
        )
    explained = _explain(first, input_shape, device)
    return replace(explained, others=tuple(_explain(weight, None, device) for weight in others))


def _explain(weight: MXTensor, input_shape: Sequence[int] | None, device: torch.device | None) -> Explanation:
    problem = describe(weight, device=device)
    # A move to another device selects again, by the requested backend.
    serving = requested_backend(weight) if problem.device == weight.device else weight.backend
    answers = candidates(problem)
    chosen = next((name for name, reason in answers if reason is None and serving in ("auto", name)), None)
    taken = "chosen" + _kernel(chosen, problem, input_shape)
    verdicts = [(name, taken if name == chosen else reason or "could compute it too") for name, reason in answers]
    rows = "M" if input_shape is None else " x ".join(map(str, input_shape[:-1])) or "1"
    activation = problem.activation or str(problem.dtype).removeprefix("torch.")
    times = f", each row times one of {problem.experts}" if problem.experts else " times"
    rotated = f", rotated in blocks of {problem.rotation}," if problem.rotation else ""
    sizes = f"[{problem.out_features}, {problem.in_features}]"
    absent = ", which is not here" if problem.device.type == "cuda" and problem.capability is None else ""
    matmul = (
        f"{weight.metadata.scheme.precision}: {activation} input [{rows}, {problem.in_features}]{rotated}{times} "
        f"{problem.weight} weight{'s' * (problem.experts > 0)} {sizes} on {problem.device}{absent}"
    )
    return Explanation(matmul, weight.backend, chosen, verdicts)


def _kernel(backend: str | None, problem: Problem, input_shape: Sequence[int] | None) -> str:
    """The kernel that a tunable backend uses for this number of rows, in words; empty for other backends."""
    if backend is None or input_shape is None or problem.experts:
        return ""
    chosen, rows = get_backend(backend), math.prod(input_shape[:-1])
    if not isinstance(chosen, TunableBackend) or rows == 0:
        return ""
    kernel, is_tuned = select_kernel(chosen, problem, rows)
    return f"; {rows} rows use kernel {kernel.name}, {'tuned' if is_tuned else 'by default'}"


def _quantized_weights(module_or_tensor: nn.Module | Tensor) -> list[MXTensor]:
    """The quantized weights of one layer, in the order of its parameters. There is at least one."""
    if isinstance(module_or_tensor, nn.Module):
        parameters: list[object] = list(module_or_tensor._parameters.values())
        weights = [weight for weight in parameters if isinstance(weight, MXTensor) and weight.dim() >= 2]
        if weights:
            return weights
        inside = [name.rpartition(".")[0] for name, p in module_or_tensor.named_parameters() if isinstance(p, MXTensor)]
        layer = f"pass one of its layers, such as model.get_submodule({inside[0]!r})" if inside else ""
        remedy = layer or "quantize it with quantize_ first"
        raise ValueError(f"{type(module_or_tensor).__name__} has no quantized weight of its own; {remedy}")
    if isinstance(module_or_tensor, MXTensor) and module_or_tensor.dim() >= 2:
        return [module_or_tensor]
    if isinstance(module_or_tensor, Tensor):
        shape = tuple(module_or_tensor.shape)
        raise ValueError(
            f"a {type(module_or_tensor).__name__} of shape {shape} is no quantized weight; "
            "pass a matrix that mxquant.quantize made"
        )
    raise TypeError(f"explain takes a module or a tensor; got {type(module_or_tensor).__name__}")


def _parsed_device(device: torch.device | str) -> torch.device:
    """`device`, which need not exist on this machine."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={device!r} is no device; name one such as 'cpu' or 'cuda:0' ({error})") from None
