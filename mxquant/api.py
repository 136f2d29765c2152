"""`quantize_`, `dequantize_` and `summary`: resolve the config, validate the whole model, then change it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from mxquant.algorithms.block_offload import check_movable
from mxquant.algorithms.blockwise import Batch
from mxquant.algorithms.calibrate import calibrate, check_calibration
from mxquant.algorithms.output_sqnr import output_sqnr_db
from mxquant.algorithms.resume import SavedStages, open_stages
from mxquant.backends import select_backend
from mxquant.config import resolve_mapping
from mxquant.modules.experts_layouts import experts_layout
from mxquant.modules.quantize_target import (
    Target,
    WeightQuantizer,
    check_target,
    dequantized_parameter,
    quantize_target,
    round_to_nearest,
)
from mxquant.modules.sites import SKIP_REASON
from mxquant.report import Summary, summarize
from mxquant.select import FILTERED, FilterFn, Selection, Skip, select_weights
from mxquant.tensor import MXTensor, describe, requested_backend

_logger = logging.getLogger("mxquant")


def quantize_(
    model: nn.Module,
    config: object,
    filter_fn: FilterFn | None = None,
    device: torch.device | str | None = None,
    calibration: Iterable[Batch] | None = None,
    resume: str | os.PathLike[str] | None = None,
) -> None:
    """Quantize the weights of a model in place. The whole model is validated before anything changes.

    An error that cannot be foreseen (memory runs out, a backend's code fails) stops it between two weights. Each weight
    is then either quantized wherever it is registered or as it was, and the log says where it stopped and how to go on.
    Earlier weights are not restored: each original is freed as soon as it is replaced.

    By default every `nn.Linear` (and `Conv1D` of transformers) is quantized except MoE routers and output embeddings,
    and so are the stacked experts of every block whose layout is known (`register_experts_layout`). The module
    `mxquant.select` explains the keys of a mapping. Experts of unknown layout stay, with a warning. Quantized weights
    are frozen. Tied weights are quantized once and stay tied. `summary(model)` tells what is skipped, and why.

    Args:
        config: a config such as `MXFP4Config()`, a format's name such as "mxfp4", a dict such as
            `{"weight": "mxfp4", "activation": None}`, or a mapping to those from kinds ("linear", "moe"), names and
            patterns.
        filter_fn: `(module, name) -> bool`; a selected module for which it is false is skipped.
        device: each selected weight and its layer's biases move there, are quantized there and stay there. The rest of
            the model stays where it is; `model.to(device)` moves it. A calibration runs there, one transformer block at
            a time. Each block and one batch of its inputs move to `device` while it runs; unquantized tensors move
            back. A model without a plain list of blocks moves as a whole.
        calibration: batches for configs with `algorithm="gptq"`. A batch is what the model is called with: a tensor, a
            tuple of positional or a dict of keyword arguments. The model runs where it is, or on `device`.
        resume: a folder for the finished part of a calibration, one file a transformer block. If the call is stopped,
            load the model anew and make the same call: finished blocks are read, the others computed. On the same
            machine the bytes are those of a call that was not stopped. You delete the folder.

    Raises:
        ValueError: an unknown name in the config, or a key without effect; a weight that is quantized already, empty
            or not finite, or no multiple of its rotation; a backend that is unknown or cannot compute the config;
            calibration that is missing or not used; a `resume` folder that no config uses, that is damaged, or that was
            made of another model, config or calibration.
        TypeError: arguments of the wrong type, integer or complex weights.
        NotImplementedError: experts of unknown layout that were asked for, weights without values (meta) or of another
            tensor subclass.
    """
    _check_model("quantize_", model)
    if filter_fn is not None and not callable(filter_fn):
        raise TypeError(f"filter_fn must be a function (module, name) -> bool, or None; got {filter_fn!r}")
    device = _usable_device(device)
    selection = select_weights(model, resolve_mapping(config), filter_fn)
    _refuse_after_stop(model, selection.targets)
    for target in selection.targets:
        check_target(target, device=device)
    batches = check_calibration(calibration, selection.targets)
    if batches and device is not None:
        check_movable(model)
    saved = None if resume is None else open_stages(resume, model, selection.targets, batches)
    _warn_of_experts(selection.skips)
    _warn_of_filter(selection)
    _quantize_all(selection.targets, device, model, batches, saved)
    model.__dict__.pop(_STOPPED, None)
    record_skips(selection)


def dequantize_(model: nn.Module) -> None:
    """Turn every quantized parameter back into an ordinary one of the dtype it stands for, in place.

    The values are those of the quantized weights; the original values are gone. Parameters stay frozen, tied ones tied.
    A model without quantized parameters is left as it is. A model of transformers is no longer marked as quantized: it
    can be cast, trained and saved as any other.
    """
    _check_model("dequantize_", model)
    model.__dict__.pop(_STOPPED, None)
    ordinary: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        module.__dict__.pop(SKIP_REASON, None)
        _forget_quantizer(module)
        for attribute, parameter in module._parameters.items():
            if parameter is None or not _is_quantized(parameter):
                continue
            if parameter not in ordinary:
                ordinary[parameter] = dequantized_parameter(parameter, experts_layout(module))
            module.register_parameter(attribute, ordinary[parameter])


def _forget_quantizer(module: nn.Module) -> None:
    """Remove transformers' marks of a quantized model: with them it refuses to cast and to train the model, and would
    save a quantization config.
    """
    quantizer = module.__dict__.get("hf_quantizer")
    if quantizer is not None and quantizer.quantization_config.quant_method == "mxquant":
        quantizer.remove_quantization_config(module)


def summary(
    model: nn.Module,
    original: nn.Module | Mapping[str, Tensor] | None = None,
    batches: Iterable[Batch] | None = None,
) -> Summary:
    """What is quantized in a model, to which format and at what size, and what is not, and why.

    Args:
        original: the model before quantization, or its state dict; with it, each weight's SQNR is computed.
        batches: what the model is called with. The original model runs on them, each quantized module runs on the
            inputs that its original is given, and the SQNR of its outputs is computed.

    Raises:
        ValueError: `original` lacks a weight, or has one of another shape; `batches` without an original model.
        TypeError: `model` is not a module, or `original` neither a module nor a mapping.
    """
    _check_model("summary", model)
    outputs = None
    if batches is not None:
        if not isinstance(original, nn.Module):
            raise ValueError("batches are for comparing outputs with the original model; pass it as original")
        outputs = output_sqnr_db(model, original, list(batches))
    return summarize(
        model, original, lambda weight: select_backend(describe(weight), requested_backend(weight)).name, outputs
    )


_STOPPED = "_mxquant_stopped"
"""The attribute of a model on which GPTQ was stopped: at which weight, and the folder of finished stages or None."""
_LEAVE_OUT_QUANTIZED = (
    "filter_fn=lambda module, name: not any(isinstance(p, mxquant.MXTensor) for p in module.parameters(recurse=False))"
)


def _quantize_all(
    targets: list[Target],
    device: torch.device | None,
    model: nn.Module,
    batches: list[Batch],
    saved: SavedStages | None,
) -> None:
    """Quantize the targets one by one. Each is dropped when it is done, so that its original is freed at once.

    Sequential GPTQ calibrates on the quantized layers before: what is rounded to nearest is quantized first. Else it
    calibrates on the original model: what is rounded to nearest is quantized last.
    """
    from tqdm.auto import tqdm

    calibrated = [target for target in targets if target.config.gptq is not None]
    uses_gptq = bool(calibrated)
    is_sequential = any(target.config.gptq.sequential for target in calibrated if target.config.gptq)
    rounded = [target for target in reversed(targets) if target.config.gptq is None]
    targets.clear()
    name, done, total = "calibration", 0, len(calibrated) + len(rounded)
    with tqdm(total=total, desc="quantizing", unit="weight", delay=1, leave=False) as progress:

        def replace(target: Target, quantizer: WeightQuantizer) -> None:
            nonlocal name, done
            name = target.name
            quantize_target(target, device, quantizer)
            done += 1
            progress.update()

        def round_all() -> None:
            while rounded:
                replace(rounded.pop(), round_to_nearest)

        try:
            if is_sequential:
                round_all()
            if calibrated:
                calibrate(model, calibrated, batches, replace, saved, device)
            round_all()
        except BaseException:
            _log_stop(name, done, total, saved)
            if done and uses_gptq:
                model.__dict__[_STOPPED] = name, None if saved is None else str(saved.folder)
            raise


def _refuse_after_stop(model: nn.Module, targets: list[Target]) -> None:
    """Refuse to quantize the finished part of a stopped GPTQ anew, with the ways to go on.

    Raises:
        ValueError: GPTQ was stopped on this model, and a target is quantized.
    """
    stopped = model.__dict__.get(_STOPPED)
    done = [target.name for target in targets if _is_quantized(target.parameter)]
    if stopped is None or not done:
        return
    where, folder = stopped
    resumed = "" if folder is None else f" with resume={folder!r}, which reads the finished part"
    raise ValueError(
        f"{done[0]} is quantized already, one of {len(done)}: GPTQ was stopped at {where}. Load the original weights "
        f"and make the same call{resumed}; or go on with the others: {_LEAVE_OUT_QUANTIZED}. (dequantize_ leaves "
        "rounded values, which would be rounded twice)"
    )


def _log_stop(name: str, done: int, total: int, saved: SavedStages | None) -> None:
    if done == 0 and saved is None:
        _logger.error("quantize_ stopped at %s: 0 of %d weights are quantized, the model is as it was", name, total)
        return
    _logger.error(
        "quantize_ stopped at %s: %d of %d weights are quantized, the others are as they were. To go on with those: %s",
        name,
        done,
        total,
        _LEAVE_OUT_QUANTIZED if saved is None else saved.resume_hint,
    )


def record_skips(selection: Selection) -> None:
    """Leave with each module why parameters of its own are not quantized, for `summary`."""
    for skip in selection.skips:
        if not _is_quantized(skip.parameter):
            for site in skip.sites:
                site.record_skip(skip.reason)


def _warn_of_experts(skips: list[Skip]) -> None:
    experts = [skip for skip in skips if skip.is_overlooked_experts and not _is_quantized(skip.parameter)]
    if experts:
        listed = ", ".join(f"{skip.name} {tuple(skip.parameter.shape)}" for skip in experts[:3])
        _logger.warning(
            "%d expert parameters (%s bytes) stay as they are (%s): %s%s. summary(model) lists all; "
            "map 'moe' to None to leave them out without this warning",
            len(experts),
            f"{sum(skip.parameter.nbytes for skip in experts):,}",
            experts[0].reason,
            listed,
            ", ..." if len(experts) > 3 else "",
        )


def _warn_of_filter(selection: Selection) -> None:
    """Warn where the filter leaves nothing, unless all that it skips is quantized already."""
    filtered = [skip.name for skip in selection.skips if skip.reason == FILTERED and not _is_quantized(skip.parameter)]
    if filtered and not selection.targets:
        _logger.warning(
            "nothing is quantized: filter_fn is false for all %d weights that the config selects, such as %s. It is "
            "given (module, name), with names such as %r",
            len(filtered),
            filtered[0],
            filtered[0].rpartition(".")[0],
        )


def _is_quantized(parameter: Tensor) -> bool:
    return isinstance(parameter, MXTensor)


def _check_model(function: str, model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{function} takes an nn.Module; got {type(model).__name__}. For a tensor, use mxquant.quantize"
        )


def _usable_device(device: torch.device | str | None) -> torch.device | None:
    """`device`, once a tensor could be made there; else a ValueError."""
    if device is None:
        return None
    try:
        usable = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ValueError(f"device={device!r} cannot be used here: {error}") from None
    if usable.type == "meta":
        raise ValueError(
            "device='meta' holds no values; name a real one, or leave it out to quantize where the weights are"
        )
    return usable
