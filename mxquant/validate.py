"""What `quantize_` refuses of a calibration, before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from mxquant.modules.quantize_target import Target


def check_calibration(calibration: object, targets: list[Target]) -> list[Any]:
    """The calibration's batches as a list; an empty one where no config needs any.

    Raises:
        ValueError: batches are missing or none, or no config uses them.
        TypeError: it is no iterable of batches.
    """
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


def check_movable(model: nn.Module) -> None:
    """Refuse a model whose blocks cannot move to another device.

    Raises:
        ValueError: it has accelerate's hooks, which place its modules.
    """
    hooked = next((name for name, module in model.named_modules() if hasattr(module, "_hf_hook")), None)
    if hooked is not None:
        raise ValueError(
            f"{hooked or 'the model'} has a hook of accelerate's that says where it computes, so that GPTQ cannot run "
            "it on another device: load the model without device_map, or leave device out"
        )
