"""GPTQ calibration of a model, one stage at a time: accumulate the stage's Hessians, then quantize its weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mxquant.algorithms.block_offload import BlockOffload
from mxquant.algorithms.blockwise import Batch, Stage, block_stages, calibration_mode, feed_next, model_stage
from mxquant.algorithms.expert_inputs import weight_matrix
from mxquant.algorithms.gptq import Grid, gptq, rotated_hessian
from mxquant.algorithms.hessians import HessianObserver, SharedInputs
from mxquant.algorithms.resume import SavedStages
from mxquant.backends.base import Operand
from mxquant.config import GPTQ, MXConfig
from mxquant.formats import get_format, nvfp4_per_tensor_scale
from mxquant.modules.quantize_target import Target, WeightQuantizer, round_to_nearest
from mxquant.reference.hadamard import hadamard
from mxquant.scheme import Scheme
from mxquant.tensor import Metadata, MXTensor

_logger = logging.getLogger("mxquant")

Replace = Callable[[Target, WeightQuantizer], None]
"""Quantizes a target's weight by a quantizer of single matrices, and swaps it in."""


def check_calibration(calibration: object, targets: list[Target]) -> list[Batch]:
    """The batches as a list, empty where no config needs any. Raises what `quantize_` says of calibration."""
    wanting = [target for target in targets if target.config.gptq is not None]
    if not wanting:
        if calibration is not None:
            raise ValueError(
                "calibration is given, but no config of this call has an algorithm that uses it; leave it out, or set "
                'algorithm="gptq"'
            )
        return []
    if calibration is None:
        raise ValueError(
            f'{wanting[0].name}: algorithm="gptq" needs calibration data; pass calibration=batches, an iterable of '
            "what the model is called with (tensors, tuples or dicts)"
        )
    if isinstance(calibration, (Tensor, Mapping, str)) or not isinstance(calibration, Iterable):
        raise TypeError(
            f"calibration is an iterable of batches, each a tensor, a tuple or a dict; got {type(calibration).__name__}"
            ". Put a single batch in a list"
        )
    batches = list(calibration)
    for batch in batches:
        if not isinstance(batch, (Tensor, tuple, list, Mapping)):
            raise TypeError(f"a calibration batch is a tensor, a tuple or a dict; got {type(batch).__name__}")
    if not batches:
        raise ValueError("calibration holds no batches; a generator that was used before is empty")
    if len({target.config.gptq.sequential for target in wanting if target.config.gptq}) > 1:
        raise ValueError("some configs say GPTQ(sequential=True), others False; all of one call are calibrated alike")
    return batches


def calibrate(
    model: torch.nn.Module,
    targets: list[Target],
    batches: Sequence[Batch],
    replace: Replace,
    saved: SavedStages | None = None,
    device: torch.device | None = None,
) -> None:
    """Quantize `targets` by GPTQ on calibration batches.

    Deterministic: the same model and batches give the same codes on the same machine.

    Args:
        targets: all with a GPTQ config. The list is emptied, so that each original weight is freed once it is replaced.
        replace: called once for each target.
        saved: finished stages are read from it instead of computed; others are written to it.
        device: where blocks run one at a time and quantized weights stay; None: the model's device.
    """
    offload = BlockOffload(model, device, targets)
    is_sequential = all(_settings(target.config).sequential for target in targets)
    calibration = _Calibration(replace, offload, saved, is_sequential)
    left = dict.fromkeys(targets)
    names = [target.name for target in targets]
    targets.clear()
    with calibration_mode(model), offload:
        whole = model_stage(model, batches, offload)
        stages = block_stages(model, whole, names)
        if stages:
            whole.units = [stage.module for stage in stages]
        outside = [target for target in left if not any(_is_inside(target, stage) for stage in stages)]
        if is_sequential and stages and (before := _targets_before(stages[0].module, whole, outside)):
            for target in before:
                del left[target]
            number = len(stages) + 1
            stages.clear()  # their captured inputs are those of the original weights
            calibration.quantize_or_resume(number, whole, before)
            stages = block_stages(model, whole, names)
        for index, stage in enumerate(stages):
            inside = [target for target in left if _is_inside(target, stage)]
            for target in inside:
                del left[target]
            wants_outputs = any(saved is None or number not in saved for number in range(index + 1, len(stages)))
            outputs = calibration.quantize_or_resume(index, stage, inside, wants_outputs=wants_outputs)
            if wants_outputs:
                feed_next(outputs, stages[index + 1])
            stage.calls.clear()
        if left:
            calibration.quantize_or_resume(len(stages), whole, list(left))
    calibration.warn_of_few_tokens()


def _is_inside(target: Target, stage: Stage) -> bool:
    """Whether all layers that multiply with the weight are in the stage."""
    names = [site.name for site in target.sites if site.kind != "embedding"]
    return bool(names) and all(name.startswith(f"{stage.name}.") for name in names)


def _targets_before(block: torch.nn.Module, whole: Stage, targets: Sequence[Target]) -> list[Target]:
    """The targets whose layers run before the block in the first batch, and only once."""
    if not targets:
        return []
    observer, first = HessianObserver(targets), []
    observer.accumulates = False
    handle = block.register_forward_pre_hook(lambda module, args: first.extend(observer.groups))
    try:
        whole.first_batch().run(observer.after_batch)
    finally:
        handle.remove()
        observer.close()
    return [target for inputs in first if not inputs.runs_again for target in inputs.targets]


def _saved_quantizer(weight: MXTensor, target: Target, device: torch.device) -> WeightQuantizer:
    """A quantizer that looks up the matrices of a saved weight, on `device` and weight-only."""
    operand = weight.operand.map(lambda inner: inner.to(device))
    there = MXTensor(operand, weight.metadata, weight.shape).with_activation(None)
    matrices = dict(enumerate(there)) if target.is_experts else {0: there}
    return lambda matrix, config, k_axis, index: matrices[index]


def _find_shared_inputs(stage: Stage, observer: HessianObserver, targets: Sequence[Target]) -> None:
    """Find out which layers share their inputs: by the first batch, or by all if it does not reach every layer."""
    observer.accumulates = False
    stage.first_batch().run(observer.after_batch)
    if sum(len(inputs.targets) for inputs in observer.groups) < len(targets):
        stage.run(observer.after_batch)
    observer.accumulates = True


def _gptq_stacked(targets: Sequence[Target], index: int, hessian: Tensor) -> list[MXTensor]:
    """Quantize one matrix of each target, all with the same inputs and config, stacked to one tall matrix."""
    config = targets[0].config
    fmt = get_format(config.format)
    what = ", ".join(target.name for target in targets)
    if targets[0].is_experts:
        what += f" (matrix {index})"
    if not hessian.isfinite().all():
        raise ValueError(
            f"{what}: calibration gives it inputs that are NaN, infinite or too large for sums of squares in fp32; "
            "find the batch by running the model on each, and leave it out"
        )
    matrices = [weight_matrix(target, index).to(hessian.device) for target in targets]
    w = [
        matrix.float() if config.rotation is None else hadamard(matrix, config.rotation).float() for matrix in matrices
    ]
    scales = [nvfp4_per_tensor_scale(one, config.scale_mode) for one in w] if fmt.per_tensor else [None] * len(w)
    rows = [one.shape[0] for one in w]
    row_scales = [scale.expand(n, 1) for scale, n in zip(scales, rows, strict=True) if scale is not None]
    grid = Grid(fmt, config.scale_mode, torch.cat(row_scales) if row_scales else None)
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
    found: list[MXTensor] = []
    for target, *operand in zip(targets, qdata.split(rows), scale.split(rows), scales, strict=True):
        metadata = Metadata(Scheme(fmt.name, rotation=config.rotation), target.k_axis, target.parameter.dtype)
        n, k = w[len(found)].shape
        shape = (n, k) if target.k_axis == -1 else (k, n)
        found.append(MXTensor(Operand(*operand), metadata, shape))
    return found


@dataclass(eq=False)
class _Calibration:
    """Quantizes stages, and collects the matrices with too few tokens for one warning."""

    replace_weight: Replace
    offload: BlockOffload
    saved: SavedStages | None
    is_sequential: bool
    few_tokens: list[str] = field(default_factory=list)

    def quantize_or_resume(
        self, number: int, stage: Stage, targets: Sequence[Target], *, wants_outputs: bool = False
    ) -> list[Any]:
        """Quantize the weights of one stage, or read them from its file.

        Returns:
            the stage's outputs: before quantization, or after it if sequential; empty without `wants_outputs`.
        """
        if self.saved is None or not targets:
            return self._quantize_stage(stage, targets, wants_outputs)
        if number not in self.saved:
            outputs = self._quantize_stage(stage, targets, wants_outputs)
            sites = [target.sites[0] for target in targets]
            self.saved.write(number, {site.name: site.module.get_parameter(site.attribute) for site in sites})
            return outputs
        before = stage.run(lambda: None, wants_outputs=True) if wants_outputs and not self.is_sequential else []
        weights = self.saved.read(number)
        for target in targets:
            device = self.offload.device or target.parameter.device
            self._replace(target, _saved_quantizer(weights.pop(target.name), target, device))
        return stage.run(lambda: None, wants_outputs=True) if wants_outputs and self.is_sequential else before

    def _quantize_stage(self, stage: Stage, targets: Sequence[Target], wants_outputs: bool) -> list[Any]:
        observer, outputs = HessianObserver(targets), list[Any]()
        try:
            if not self.is_sequential:
                outputs = stage.run(observer.after_batch, wants_outputs=wants_outputs)
                for inputs in observer.groups:
                    self._replace_all(inputs)
            else:
                _find_shared_inputs(stage, observer, targets)
                for inputs in observer.groups:
                    observer.only = inputs
                    stage.run(observer.after_batch)
                    self._replace_all(inputs)
        finally:
            observer.close()
        observed = {target for inputs in observer.groups for target in inputs.targets}
        for target in targets:
            if target not in observed:
                _logger.warning("%s: no input was seen, so it is rounded to nearest", target.name)
                self._replace(target, round_to_nearest)
        if self.is_sequential and wants_outputs:
            return stage.run(lambda: None, wants_outputs=True)
        return outputs

    def _replace_all(self, inputs: SharedInputs) -> None:
        """Quantize the weights that share these inputs, and free their Hessians."""
        by_config: dict[tuple[object, ...], list[Target]] = {}
        for target in inputs.targets:
            config = target.config
            key = (config.format, config.scale_mode, config.rotation, config.gptq)
            by_config.setdefault(key, []).append(target)
        for targets in by_config.values():
            quantized = {
                index: _gptq_stacked(targets, index, hessian)
                for index, hessian in inputs.hessians.items()
                if inputs.tokens[index] >= _settings(targets[0].config).min_tokens
            }
            for position, target in enumerate(targets):
                matrices = {index: found[position] for index, found in quantized.items()}
                self._replace(target, self._quantizer_from(target, matrices, inputs.tokens))
        inputs.hessians.clear()

    def _replace(self, target: Target, quantizer: WeightQuantizer) -> None:
        self.replace_weight(target, quantizer)
        self.offload.keep_on_device(target)

    def _quantizer_from(self, target: Target, found: dict[int, MXTensor], tokens: dict[int, int]) -> WeightQuantizer:
        """A quantizer that looks GPTQ's results up. A matrix without one is rounded to nearest and recorded."""

        def quantizer(weight: Tensor, config: MXConfig, k_axis: int, index: int) -> MXTensor:
            if index in found:
                return found[index]
            matrix = f" matrix {index} of its stack" if target.is_experts else ""
            needed = _settings(target.config).min_tokens
            self.few_tokens.append(f"{target.name}{matrix} ({tokens.get(index, 0)} of {needed})")
            return round_to_nearest(weight, config, k_axis, index)

        return quantizer

    def warn_of_few_tokens(self) -> None:
        if self.few_tokens:
            _logger.warning(
                "%d matrices saw fewer tokens than GPTQ's min_tokens, so they are rounded to nearest; calibrate on "
                "more: %s%s",
                len(self.few_tokens),
                ", ".join(self.few_tokens[:8]),
                ", ..." if len(self.few_tokens) > 8 else "",
            )


def _settings(config: MXConfig) -> GPTQ:
    settings = config.gptq
    assert settings is not None
    return settings
