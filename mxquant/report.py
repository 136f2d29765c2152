"""`Summary`: what is quantized in a model. Prints as text, renders as HTML in a notebook."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from mxquant.modules.linear import linear_k_axis
from mxquant.modules.sites import SKIP_REASON, join
from mxquant.tables import html_table, text_table
from mxquant.tensor import MXTensor
from mxquant.tensor.sqnr import sqnr_db

_Holder = tuple[str, nn.Module]
"""A parameter's name, and the module that holds it."""


@dataclass(frozen=True)
class QuantizedWeight:
    """One quantized parameter."""

    name: str
    kind: str
    """ "linear", "embedding", "moe" for stacked experts, or the class of the module that holds it."""
    format: str
    precision: str
    """ "W4A4", "W4A16", ..."""
    backend: str
    """The backend that computes its matmuls on its device."""
    shape: tuple[int, ...]
    nbytes: int
    """Real bytes, scales included."""
    bits_per_weight: float
    sqnr_db: float | None
    """Signal to quantization noise, 20 log10(|w| / |w - q|) with the original weight w; None without the original."""
    tied: tuple[str, ...] = ()
    """Its other names, for a tied weight."""
    rotation: int | None = None
    """Size of the block Hadamard rotation; None: not rotated."""
    output_sqnr_db: float | None = None
    """SQNR of its module's outputs on the same inputs; None without batches."""


@dataclass(frozen=True)
class SkippedWeight:
    """One parameter of two or more dimensions that is not quantized."""

    name: str
    reason: str
    shape: tuple[int, ...]
    nbytes: int
    tied: tuple[str, ...] = ()


@dataclass(frozen=True)
class Summary:
    """What is quantized in a model and what is not. Prints as text, renders as HTML in a notebook.

    The totals count each parameter once, tied or not, and no buffers.
    """

    quantized: list[QuantizedWeight]
    skipped: list[SkippedWeight]
    num_parameters: int
    nbytes: int
    """Bytes of all parameters."""
    nbytes_before: int
    """Bytes of all parameters before quantization, by their logical dtypes."""

    @property
    def bits_per_weight(self) -> float | None:
        """Mean bits per quantized weight, scales included; None if nothing is quantized."""
        weights = sum(math.prod(row.shape) for row in self.quantized)
        return 8 * sum(row.nbytes for row in self.quantized) / weights if weights else None

    def __str__(self) -> str:
        return "\n\n".join([*(text_table(headers, rows) for headers, rows in self._tables()), self._totals()])

    def plot(self) -> Any:
        """A matplotlib figure of the SQNR of each quantized weight, and of its outputs if known.

        Raises:
            ValueError: there is no SQNR: the summary was made without the original model.
            ModuleNotFoundError: matplotlib is not installed.
        """
        series = {
            "weights": [row.sqnr_db for row in self.quantized],
            "outputs": [row.output_sqnr_db for row in self.quantized],
        }
        series = {label: values for label, values in series.items() if any(value is not None for value in values)}
        if not series:
            raise ValueError("there is no SQNR to plot; make the summary with original=, the unquantized model")
        from matplotlib.figure import Figure

        figure = Figure(figsize=(max(6.0, 0.14 * len(self.quantized)), 4.5), layout="constrained")
        axes = figure.subplots()
        for label, values in series.items():
            axes.plot([math.nan if value is None else value for value in values], ".-", label=label)
        axes.set_xticks(range(len(self.quantized)), [row.name for row in self.quantized], rotation=90, fontsize=5)
        axes.set_ylabel("SQNR, dB")
        axes.legend()
        return figure

    def _repr_html_(self) -> str:
        tables = "".join(html_table(headers, rows) for headers, rows in self._tables())
        return f"<div>{tables}<p>{html.escape(self._totals())}</p></div>"

    def _tables(self) -> Iterator[tuple[list[str], list[list[str]]]]:
        if self.quantized:
            has_sqnr = any(row.sqnr_db is not None for row in self.quantized)
            has_outputs = any(row.output_sqnr_db is not None for row in self.quantized)
            headers = ["quantized", "kind", "format", "W/A", "backend", "shape", "bits", "bytes"]
            headers += ["SQNR dB"] * has_sqnr + ["output SQNR dB"] * has_outputs
            yield headers, [_cells(row, has_sqnr, has_outputs) for row in self.quantized]
        if self.skipped:
            rows = [[_tied_names(row), row.reason, _sizes(row.shape), f"{row.nbytes:,}"] for row in self.skipped]
            yield ["not quantized", "reason", "shape", "bytes"], rows

    def _totals(self) -> str:
        bits = self.bits_per_weight
        mean = "nothing is quantized" if bits is None else f"{bits:.2f} bits a quantized weight"
        return f"{self.num_parameters:,} parameters, {mean}; {self.nbytes_before:,} bytes before, {self.nbytes:,} now"


def summarize(
    model: nn.Module,
    original: nn.Module | Mapping[str, Tensor] | None,
    backend_of: Callable[[MXTensor], str],
    output_sqnr_db: Mapping[str, float] | None = None,
) -> Summary:
    """The `Summary` of `model`; see `mxquant.summary`.

    Args:
        backend_of: the name of the backend that computes a weight.
        output_sqnr_db: SQNR of the outputs by module name.
    """
    originals = _tensors_by_name(original)
    quantized, skipped = [], []
    num_parameters = nbytes = nbytes_before = 0
    for parameter, holders in _holders(model):
        nbytes += parameter.nbytes
        nbytes_before += parameter.numel() * parameter.dtype.itemsize
        num_parameters += parameter.numel()
        if isinstance(parameter, MXTensor):
            sqnr = None if originals is None else sqnr_db(_original_of(parameter, holders, originals), parameter)
            row = _quantized_row(parameter, holders, backend_of(parameter), sqnr)
            outputs = (output_sqnr_db or {}).get(row.name.rpartition(".")[0])
            quantized.append(replace(row, output_sqnr_db=outputs))
        elif parameter.ndim >= 2:
            (name, module), *others = holders
            reason = getattr(module, SKIP_REASON, {}).get(name.rpartition(".")[2], "not quantized")
            tied = tuple(other for other, _ in others)
            skipped.append(SkippedWeight(name, reason, tuple(parameter.shape), parameter.nbytes, tied))
    return Summary(quantized, skipped, num_parameters, nbytes, nbytes_before)


def _holders(model: nn.Module) -> list[tuple[Tensor, list[_Holder]]]:
    """Each parameter once, with everything that holds it."""
    found: dict[int, tuple[Tensor, list[_Holder]]] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        for attribute, parameter in module._parameters.items():
            if parameter is not None and not is_lazy(parameter):
                found.setdefault(id(parameter), (parameter, []))[1].append((join(module_name, attribute), module))
    return list(found.values())


def _quantized_row(weight: MXTensor, holders: list[_Holder], backend: str, sqnr_db: float | None) -> QuantizedWeight:
    (name, module), *others = holders
    if any(linear_k_axis(holder) is not None for _, holder in holders):
        kind = "linear"
    else:
        kind = "embedding" if any(isinstance(holder, nn.Embedding) for _, holder in holders) else type(module).__name__
    if weight.dim() == 3:
        kind = "moe"
    bits = 8 * weight.nbytes / weight.numel()
    wa, shape = weight.metadata.scheme.precision, tuple(weight.shape)
    tied = tuple(other for other, _ in others)
    rotation = weight.metadata.scheme.rotation
    return QuantizedWeight(name, kind, weight.format, wa, backend, shape, weight.nbytes, bits, sqnr_db, tied, rotation)


def _tied_names(row: QuantizedWeight | SkippedWeight) -> str:
    return " = ".join((row.name, *row.tied))


def _tensors_by_name(original: nn.Module | Mapping[str, Tensor] | None) -> Mapping[str, Tensor] | None:
    if original is None or isinstance(original, Mapping):
        return original
    if isinstance(original, nn.Module):
        return dict(original.named_parameters(remove_duplicate=False))
    raise TypeError(f"original must be the unquantized model, its state_dict or None; got {type(original).__name__}")


def _original_of(weight: MXTensor, holders: list[_Holder], originals: Mapping[str, Tensor]) -> Tensor:
    names = [name for name, _ in holders]
    original = next((originals[name] for name in names if name in originals), None)
    if original is None:
        raise ValueError(f"original has no tensor called {' or '.join(names)}; pass the same model, unquantized")
    if original.dim() == 2 and weight.dim() == 3 and original.shape[0] == weight.shape[0] * weight.shape[1]:
        original = original.unflatten(0, weight.shape[:2])  # experts stacked along the rows
    if isinstance(original, MXTensor) or original.is_meta or original.shape != weight.shape:
        raise ValueError(
            f"original's {names[0]} must be an ordinary tensor of shape {tuple(weight.shape)}; got a "
            f"{type(original).__name__} of shape {tuple(original.shape)} on {original.device}; "
            "pass the same model, unquantized"
        )
    return original.detach()


def _cells(row: QuantizedWeight, has_sqnr: bool, has_outputs: bool) -> list[str]:
    rotation = f", rotation {row.rotation}" if row.rotation else ""
    cells = [_tied_names(row), row.kind, row.format, row.precision + rotation, row.backend, _sizes(row.shape)]
    cells += [f"{row.bits_per_weight:.2f}", f"{row.nbytes:,}"]
    decibels = [row.sqnr_db] * has_sqnr + [row.output_sqnr_db] * has_outputs
    return [*cells, *("" if value is None else f"{value:.2f}" for value in decibels)]


def _sizes(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
