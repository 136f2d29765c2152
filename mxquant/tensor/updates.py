"""What others do to weights in place: averages of models, merged adapters, arrays on the disk.

Codes cannot hold the results. Each refusal names the way that works. An average of equal codes is those codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from mxquant.tensor.dispatch import FUNCTIONS, implements
from mxquant.tensor.mxtensor import MXTensor

aten = torch.ops.aten

_DEQUANTIZE = "call .dequantize() first for an ordinary tensor, or mxquant.dequantize_(model)"
_AVERAGE = (
    "to average models while they are trained, average the unquantized ones and quantize_ the average; frozen "
    "quantized weights under trained ones (LoRA) are taken by "
    "AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(decay))"
)
_DISK = (
    "for accelerate's offload to the disk, use accelerate.cpu_offload, or mxquant.from_pretrained, whose weights stay "
    "in the mapped files of a checkpoint"
)


@implements(aten.add_.Tensor, aten.sub_.Tensor)
def add_(tensor: Any, other: Any, *, alpha: float = 1) -> NoReturn:
    """peft merges adapters so."""
    raise NotImplementedError(
        f"an update cannot be added in place to packed codes ({tensor!r}); {_DEQUANTIZE}. To merge adapters of peft "
        "into a quantized model, call mxquant.integrations.peft.merge_adapter(model), which dequantizes, adds and "
        "quantizes again"
    )


@implements(aten.sub.Tensor, aten.lerp.Scalar, aten.lerp_.Scalar)
def difference(tensor: Any, other: Any, *rest: Any, **options: Any) -> NoReturn:
    """The running averages of `AveragedModel` without `multi_avg_fn`."""
    raise NotImplementedError(f"{tensor!r} and {other!r} are not subtracted as packed codes; {_DEQUANTIZE}; {_AVERAGE}")


@implements(aten._foreach_lerp_.Scalar)
def foreach_lerp_(averages: Sequence[Tensor], others: Sequence[Tensor], weight: float) -> None:
    """The running averages of `AveragedModel` with `multi_avg_fn`: frozen quantized weights stay.

    Raises:
        NotImplementedError: the codes of a quantized weight differ.
    """
    pairs = list(zip(averages, others, strict=True))
    ordinary = [pair for pair in pairs if not any(isinstance(tensor, MXTensor) for tensor in pair)]
    for average, other in pairs:
        quantized = isinstance(average, MXTensor), isinstance(other, MXTensor)
        if any(quantized) and not (all(quantized) and torch.equal(average, other)):
            raise NotImplementedError(f"{average!r} and {other!r} differ and have no average in codes; {_AVERAGE}")
    if ordinary:
        torch._foreach_lerp_([average for average, _ in ordinary], [other for _, other in ordinary], weight)


@implements(aten.view.dtype)
def view_dtype(tensor: MXTensor, dtype: torch.dtype) -> NoReturn:
    """accelerate writes bf16 weights to the disk as int16."""
    raise NotImplementedError(f"the bits of {tensor!r} cannot be viewed as {dtype}; {_DEQUANTIZE}; {_DISK}")


@implements(torch.Tensor.numpy, table=FUNCTIONS)
def numpy(tensor: MXTensor, **options: Any) -> NoReturn:
    raise NotImplementedError(f"{tensor!r} is no array of its values; {_DEQUANTIZE}; {_DISK}")
