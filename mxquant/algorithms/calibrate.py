"""Quantizing the weights of a model by GPTQ, stage by stage, with the Hessians of one stage held at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mxquant.algorithms.block_offload import Placement
from mxquant.algorithms.gptq import Grid, gptq, rotated_hessian
from mxquant.algorithms.hessians import Inputs, Observer
from mxquant.algorithms.matrices import matrix_of
from mxquant.algorithms.resume import SavedStages
from mxquant.algorithms.stages import Batch, Stage, block_stages, calibrating, model_stage, pass_on
from mxquant.backends.base import Operand
from mxquant.config import GPTQ, _MXConfig
from mxquant.formats import get_format, nvfp4_per_tensor_scale
from mxquant.modules.quantize_target import Target, WeightQuantizer, round_to_nearest
from mxquant.reference.hadamard import hadamard
from mxquant.scheme import Scheme
from mxquant.tensor import Metadata, MXTensor

_logger = logging.getLogger("mxquant")

Replace = Callable[[Target, WeightQuantizer], None]


def calibrate(
    model: torch.nn.Module,
    targets: list[Target],
    batches: Sequence[Batch],
    replace: Replace,
    saved: SavedStages | None = None,
    device: torch.device | None = None,
) -> None:
    """Quantize `targets`, all of whose configs ask for GPTQ, by what the model computes on `batches`.

    Nothing in it is random: the same model and batches give the same codes on the same machine.

    Args:
        targets: emptied, so that what is replaced is freed.
        batches: each what the model is called with: a tensor, a tuple of positional or a dict of keyword arguments.
        replace: puts a quantized weight in a target's place, given what finds the codes of its matrices.
        saved: stages that are there are taken from it instead of computed, others are added to it when finished.
        device: where blocks run, one at a time, their weights are found and stay; None: where the model is.
    """
    sequential = all(_settings(target.config).sequential for target in targets)
    placement = Placement(model, device, targets)
    replacing = _Replacing(replace, placement)
    left = dict.fromkeys(targets)
    names = [target.name for target in targets]
    targets.clear()
    with calibrating(model), placement:
        whole = model_stage(model, batches, placement)
        stages = block_stages(model, whole, names)
        if stages:
            whole.parts = [stage.module for stage in stages]
        outside = [target for target in left if not any(_is_inside(target, stage) for stage in stages)]
        if sequential and stages and (before := _seen_before(stages[0].module, whole, outside)):
            for target in before:
                del left[target]
            number = len(stages) + 1
            stages.clear()  # what they were given was of the weights as they were
            _finish(number, whole, before, sequential, replacing, saved, wants_outputs=False)
            stages = block_stages(model, whole, names)
        for index, stage in enumerate(stages):
            inside = [target for target in left if _is_inside(target, stage)]
            for target in inside:
                del left[target]
            wants_outputs = any(saved is None or number not in saved for number in range(index + 1, len(stages)))
            outputs = _finish(index, stage, inside, sequential, replacing, saved, wants_outputs=wants_outputs)
            if wants_outputs:
                pass_on(outputs, stages[index + 1])
            stage.calls.clear()
        if left:
            _finish(len(stages), whole, list(left), sequential, replacing, saved, wants_outputs=False)
    replacing.warn_of_few()


def _is_inside(target: Target, stage: Stage) -> bool:
    """Whether the stage shows all that a weight multiplies."""
    names = [site.name for site in target.sites if site.kind != "embedding"]
    return bool(names) and all(name.startswith(f"{stage.name}.") for name in names)


def _seen_before(block: torch.nn.Module, whole: Stage, targets: Sequence[Target]) -> list[Target]:
    """Those that run before the block in the first batch, and once only."""
    if not targets:
        return []
    observer, first = Observer(targets), []
    observer.sums = False
    handle = block.register_forward_pre_hook(lambda module, args: first.extend(observer.found))
    try:
        whole.first().run(observer.after_batch)
    finally:
        handle.remove()
        observer.close()
    return [target for inputs in first if not inputs.runs_again for target in inputs.targets]


def _finish(
    number: int,
    stage: Stage,
    targets: Sequence[Target],
    sequential: bool,
    replace: _Replacing,
    saved: SavedStages | None,
    *,
    wants_outputs: bool,
) -> list[Any]:
    """Quantize the weights of one stage, or take them from where they are saved; its outputs as `_quantize_stage`'s."""
    if saved is None or not targets:
        return _quantize_stage(stage, targets, sequential, replace, wants_outputs=wants_outputs)
    if number not in saved:
        outputs = _quantize_stage(stage, targets, sequential, replace, wants_outputs=wants_outputs)
        saved.write(number, {target.name: _current(target) for target in targets})
        return outputs
    before = stage.run(lambda: None, wants_outputs=True) if wants_outputs and not sequential else []
    weights = saved.read(number)
    for target in targets:
        device = stage.placement.device or target.parameter.device
        replace(target, _among(_matrices_of(weights.pop(target.name), target, device)))
    return stage.run(lambda: None, wants_outputs=True) if wants_outputs and sequential else before


def _current(target: Target) -> Tensor:
    """What has taken the place of a target's parameter."""
    site = target.sites[0]
    weight = site.module._parameters[site.attribute]
    assert weight is not None
    return weight


def _matrices_of(weight: MXTensor, target: Target, device: torch.device) -> dict[int, MXTensor]:
    """A saved weight by the indices of its matrices, on a device, with no rule for activations."""
    parts = (None if inner is None else inner.to(device) for inner in weight.operand)
    operand = Operand(*parts)  # type: ignore[arg-type]
    there = MXTensor(operand, weight.metadata, weight.shape).with_activation(None)
    return dict(enumerate(there)) if target.sites[0].kind == "experts" else {0: there}


def _quantize_stage(
    stage: Stage, targets: Sequence[Target], sequential: bool, replace: _Replacing, *, wants_outputs: bool
) -> list[Any]:
    """Quantize the weights of one stage. Its outputs are those of the stage as it was, or, sequential, as it is now."""
    observer, outputs = Observer(targets), list[Any]()
    try:
        if not sequential:
            outputs = stage.run(observer.after_batch, wants_outputs=wants_outputs)
            for inputs in observer.found:
                _replace_all(inputs, replace)
        else:
            _discover(stage, observer, targets)
            for inputs in observer.found:
                observer.only = inputs
                stage.run(observer.after_batch)
                _replace_all(inputs, replace)
    finally:
        observer.close()
    observed = {target for inputs in observer.found for target in inputs.targets}
    for target in targets:
        if target not in observed:
            _logger.warning("%s: no input was seen, so it is rounded to nearest", target.name)
            replace(target, round_to_nearest)
    if sequential and wants_outputs:
        return stage.run(lambda: None, wants_outputs=True)
    return outputs


def _discover(stage: Stage, observer: Observer, targets: Sequence[Target]) -> None:
    """Find out which layers share their inputs: from one batch, or, if some are not reached by it, from all."""
    observer.sums = False
    stage.first().run(observer.after_batch)
    if sum(len(inputs.targets) for inputs in observer.found) < len(targets):
        stage.run(observer.after_batch)
    observer.sums = True


def _replace_all(inputs: Inputs, replace: _Replacing) -> None:
    """Quantize the weights that share these inputs, and forget the sums."""
    alike: dict[tuple[object, ...], list[Target]] = {}
    for target in inputs.targets:
        config = target.config
        key = (config.format, config.scale_mode, config.rotation, config.gptq)
        alike.setdefault(key, []).append(target)
    for targets in alike.values():
        solved = {
            index: _solve(targets, index, hessian)
            for index, hessian in inputs.hessians.items()
            if inputs.tokens[index] >= _settings(targets[0].config).min_tokens
        }
        for position, target in enumerate(targets):
            matrices = {index: found[position] for index, found in solved.items()}
            replace(target, replace.solved(target, matrices, inputs.tokens))
    inputs.clear()


def _solve(targets: Sequence[Target], index: int, hessian: Tensor) -> list[MXTensor]:
    """One matrix of each target, all with the same inputs and config, as one tall matrix.

    Raises:
        ValueError: inputs whose Hessian is not finite, or cannot be factored.
    """
    config = targets[0].config
    fmt = get_format(config.format)
    what = ", ".join(target.name for target in targets)
    if targets[0].sites[0].kind == "experts":
        what += f" (matrix {index})"
    if not hessian.isfinite().all():
        raise ValueError(
            f"{what}: calibration gives it inputs that are NaN, infinite or too large for sums of squares in fp32; "
            "find the batch by running the model on each, and leave it out"
        )
    matrices = [matrix_of(target, index).to(hessian.device) for target in targets]
    w = [
        matrix.float() if config.rotation is None else hadamard(matrix, config.rotation).float() for matrix in matrices
    ]
    scales = [nvfp4_per_tensor_scale(one, config.scale_mode) for one in w] if fmt.per_tensor else [None] * len(w)
    grid = Grid(fmt, config.scale_mode, _one_a_row(scales, w))
    if config.rotation is not None:
        hessian = rotated_hessian(hessian, config.rotation)
    try:
        qdata, scale = gptq(torch.cat(w), hessian, grid, _settings(config))
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        damping = _settings(config).damping
        raise ValueError(
            f"{what}: the Hessian of its inputs has no Cholesky factor with damping={damping} ({error}); give "
            "GPTQ(damping=...) more, such as 0.1, or more tokens"
        ) from error
    rows = [one.shape[0] for one in w]
    found: list[MXTensor] = []
    for target, *operand in zip(targets, qdata.split(rows), scale.split(rows), scales, strict=True):
        metadata = Metadata(Scheme(fmt.name, rotation=config.rotation), target.k_axis, target.parameter.dtype)
        n, k = w[len(found)].shape
        shape = (n, k) if target.k_axis == -1 else (k, n)
        found.append(MXTensor(Operand(*operand), metadata, shape))
    return found


def _one_a_row(scales: Sequence[Tensor | None], matrices: Sequence[Tensor]) -> Tensor | None:
    """The per-tensor scales of matrices one below the other: [rows, 1]."""
    columns = [
        scale.expand(matrix.shape[0], 1) for scale, matrix in zip(scales, matrices, strict=True) if scale is not None
    ]
    return torch.cat(columns) if columns else None


class _Replacing:
    """`Replace`, and a record of the matrices that saw too few tokens, for one warning about all of them."""

    def __init__(self, replace: Replace, placement: Placement) -> None:
        self._replace = replace
        self._placement = placement
        self._few: list[str] = []

    def __call__(self, target: Target, quantizer: WeightQuantizer) -> None:
        self._replace(target, quantizer)
        self._placement.keep(target)

    def solved(self, target: Target, found: dict[int, MXTensor], tokens: dict[int, int]) -> WeightQuantizer:
        """The quantizer that knows the answers; what has none is rounded to nearest, and noted."""

        def quantizer(weight: Tensor, config: _MXConfig, k_axis: int, index: int) -> MXTensor:
            if index in found:
                return found[index]
            matrix = f" matrix {index} of its stack" if target.sites[0].kind == "experts" else ""
            needed = _settings(target.config).min_tokens
            self._few.append(f"{target.name}{matrix} ({tokens.get(index, 0)} of {needed})")
            return round_to_nearest(weight, config, k_axis, index)

        return quantizer

    def warn_of_few(self) -> None:
        if self._few:
            _logger.warning(
                "%d matrices saw fewer tokens than GPTQ's min_tokens, so they are rounded to nearest; calibrate on "
                "more: %s%s",
                len(self._few),
                ", ".join(self._few[:8]),
                ", ..." if len(self._few) > 8 else "",
            )


def _among(matrices: dict[int, MXTensor]) -> WeightQuantizer:
    """The quantizer that knows every answer."""
    return lambda weight, config, k_axis, index: matrices[index]


def _settings(config: _MXConfig) -> GPTQ:
    settings = config.gptq
    assert settings is not None
    return settings
