"""`quantize_`, `dequantize_` and `summary`: resolve the config, validate the whole model, then change it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from mxquant.algorithms.calibrate import calibrate
from mxquant.algorithms.quality import output_sqnr_db
from mxquant.algorithms.resume import SavedStages, open_stages
from mxquant.algorithms.stages import Batch
from mxquant.backends import select as select_backend
from mxquant.config import resolve_mapping
from mxquant.modules.experts_weight import dequantize_experts, quantize_experts
from mxquant.modules.linear import WeightQuantizer, dequantize_parameter, quantize_parameter, round_to_nearest
from mxquant.modules.registry import experts_layout
from mxquant.report import SKIP_REASON, Summary, summarize
from mxquant.select import FILTERED, FilterFn, Plan, Site, Skip, Target, select
from mxquant.tensor import MXTensor, describe, requested_backend
from mxquant.validate import check_calibration, check_movable, check_stack, check_weight

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

    What cannot be foreseen (memory runs out, a backend's own code fails) stops it between two weights: each weight is
    either quantized wherever it is registered or as it was, and a line in the log says where it stopped and how to go
    on. Earlier weights are not restored: each original is freed as soon as it is replaced.

    Every `nn.Linear` is quantized but MoE routers and output embeddings, and the stacked experts of every block whose
    layout is known (`register_experts_layout`), unless `config` says otherwise; the module `mxquant.select` explains
    the keys of a mapping. Experts of unknown layout stay as they are, with a warning. Quantized weights are frozen.
    Tied weights are quantized once and stay tied. `summary(model)` tells what is skipped, and why.

    Args:
        config: a config such as `MXFP4Config()`, a format's name such as "mxfp4", a dict such as
            `{"weight": "mxfp4", "activation": None}`, or a mapping to those from kinds ("linear", "moe"), names and
            patterns.
        filter_fn: `(module, name) -> bool`; a selected module for which it is false is skipped.
        device: move each selected weight and its layer's biases there, quantize there and leave them there. What else
            the model has stays where it is; `model.to(device)` moves that. A calibration runs there, one transformer
            block at a time: it and its inputs of one batch are there while it runs, and what is not quantized of it
            comes back. A model without a plain list of blocks is there as a whole meanwhile.
        calibration: for configs with `algorithm="gptq"`: batches, each what the model is called with: a tensor, a tuple
            of positional or a dict of keyword arguments. The model runs where it is, or on `device`.
        resume: a folder for what a calibration has finished, one file a transformer block. If the call is stopped, load
            the model anew and make the same call: finished blocks are read, the others computed, and the bytes are
            those of a call that was not stopped, on the same machine. It is yours to delete.

    Raises:
        ValueError: an unknown name in the config, a key without effect, a weight that is quantized already, empty or
            not finite, a rotation that does not divide it, a backend that is unknown or cannot compute the config,
            calibration that is missing or not used, a `resume` that no config uses, that is damaged or was made of
            another model, config or calibration.
        TypeError: arguments of the wrong type, integer or complex weights.
        NotImplementedError: experts of unknown layout that were asked for, weights without values (meta) or of another
            tensor subclass.
    """
    _check_model("quantize_", model)
    if filter_fn is not None and not callable(filter_fn):
        raise TypeError(f"filter_fn must be a function (module, name) -> bool, or None; got {filter_fn!r}")
    device = _usable_device(device)
    plan = select(model, resolve_mapping(config), filter_fn)
    for target in plan.targets:
        check_weight(target.name, target.parameter, target.config, device, target.k_axis, target.stack)
        if target.sites[0].kind == "experts":
            check_stack(target)
    batches = check_calibration(calibration, plan.targets)
    if batches and device is not None:
        check_movable(model)
    saved = None if resume is None else open_stages(resume, model, plan.targets, batches)
    _warn_of_experts(plan.skips)
    _warn_of_filter(plan)
    _swap(plan.targets, device, model, batches, saved)
    record_skips(plan)


def dequantize_(model: nn.Module) -> None:
    """Turn every quantized parameter back into an ordinary one of the dtype it stands for, in place.

    The values are those of the quantized weights; the original ones are gone. Parameters stay frozen, tied ones tied. A
    model without quantized parameters is left as it is. One of transformers is no longer marked as quantized: it can be
    cast, trained and saved as any other.
    """
    _check_model("dequantize_", model)
    ordinary: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        module.__dict__.pop(SKIP_REASON, None)
        _forget_quantizer(module)
        for attribute, parameter in module._parameters.items():
            if parameter is None or not _is_quantized(parameter):
                continue
            if parameter not in ordinary:
                layout = experts_layout(module)
                ordinary[parameter] = (
                    dequantize_parameter(parameter)
                    if layout is None
                    else dequantize_experts(parameter, layout.stack_of(module))
                )
            module.register_parameter(attribute, ordinary[parameter])


def _forget_quantizer(module: nn.Module) -> None:
    """Take away transformers' marks of a model that it loaded with our quantizer: under them it refuses to cast and to
    train the model, and would write the config of what is no longer there.
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
        batches: what the model is called with; the original model is run on them, and the SQNR of each quantized
            module's outputs on the inputs that its original has is computed.

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


def replace_weight(
    target: Target, device: torch.device | None = None, quantizer: WeightQuantizer = round_to_nearest
) -> None:
    """Quantize one checked weight, wherever it is registered; with `device`, the biases beside it move there too.

    Whatever can fail comes before the first change.
    """
    parameter, config = target.parameter, target.config
    if target.sites[0].kind == "experts":
        quantized = quantize_experts(
            parameter, config, target.k_axis, stack=target.stack, device=device, quantizer=quantizer
        )
    else:
        multiplies = any(site.kind != "embedding" for site in target.sites)
        quantized = quantize_parameter(parameter, config, device, weight_only=not multiplies, quantizer=quantizer)
    biases = [bias for site in target.sites for bias in site.biases]
    moved = [] if device is None else [(bias, bias.data.to(device)) for bias in biases]
    for site in target.sites:
        site.module.register_parameter(site.attribute, quantized)
        _forget_skip(site)
    for bias, data in moved:
        bias.data = data


_LEAVE_OUT_QUANTIZED = (
    "filter_fn=lambda module, name: not any(isinstance(p, mxquant.MXTensor) for p in module.parameters(recurse=False))"
)


def _swap(
    targets: list[Target],
    device: torch.device | None,
    model: nn.Module,
    batches: list[Batch],
    saved: SavedStages | None,
) -> None:
    """Replace the weights one by one, each target dropped as it is done: what is replaced is freed at once.

    Those that are rounded to nearest come first where layers are calibrated one after the other, so that all see what
    will be; else last, so that none does.
    """
    from tqdm.auto import tqdm

    calibrated = [target for target in targets if target.config.gptq is not None]
    is_sequential = any(target.config.gptq.sequential for target in calibrated if target.config.gptq)
    rounded = [target for target in reversed(targets) if target.config.gptq is None]
    targets.clear()
    name, done, total = "calibration", 0, len(calibrated) + len(rounded)
    with tqdm(total=total, desc="quantizing", unit="weight", delay=1, leave=False) as progress:

        def replace(target: Target, quantizer: WeightQuantizer) -> None:
            nonlocal name, done
            name = target.name
            replace_weight(target, device, quantizer)
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
            raise


def _log_stop(name: str, done: int, total: int, saved: SavedStages | None) -> None:
    if done == 0 and saved is None:
        _logger.error("quantize_ stopped at %s: 0 of %d weights are quantized, the model is as it was", name, total)
        return
    _logger.error(
        "quantize_ stopped at %s: %d of %d weights are quantized, the others are as they were. To go on with those: %s",
        name,
        done,
        total,
        _LEAVE_OUT_QUANTIZED if saved is None else saved.how_to_go_on,
    )


def _forget_skip(site: Site) -> None:
    reasons = site.module.__dict__.get(SKIP_REASON, {})
    reasons.pop(site.attribute, None)
    if not reasons:
        site.module.__dict__.pop(SKIP_REASON, None)


def record_skips(plan: Plan) -> None:
    """Leave with each module why parameters of its own are not quantized, for `summary`."""
    for skip in plan.skips:
        if not _is_quantized(skip.parameter):
            for site in skip.sites:
                site.module.__dict__.setdefault(SKIP_REASON, {})[site.attribute] = skip.reason


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


def _warn_of_filter(plan: Plan) -> None:
    """A filter that leaves nothing is hardly meant, unless all it leaves out is quantized already."""
    filtered = [skip.name for skip in plan.skips if skip.reason == FILTERED and not _is_quantized(skip.parameter)]
    if filtered and not plan.targets:
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
    """`device`, once a tensor could be made there.

    Raises:
        ValueError: there is no such device here, or it holds no values (meta).
    """
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
