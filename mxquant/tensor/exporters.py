"""TorchScript and ONNX have no operators for packed codes. Both are refused at the first quantized weight."""

from __future__ import annotations

import torch

REMEDY = (
    "use torch.export.export(model, inputs), which keeps quantized weights, or call mxquant.dequantize_(model) first, "
    "for ordinary weights of the same values"
)


def refuse_torchscript_trace() -> None:
    """Raise a NotImplementedError while `torch.jit.trace` or `torch.onnx.export(dynamo=False)` traces.

    NOTE: inside an aten operator that is traced, torch hides that it traces. Ask before.
    """
    if torch._C._get_tracing_state() is not None:
        raise NotImplementedError(
            f"torch.jit.trace and torch.onnx.export(dynamo=False) cannot record quantized weights; {REMEDY}"
        )


def refuse_onnx() -> None:
    """Raise a NotImplementedError while `torch.onnx.export` exports."""
    if torch.onnx.is_in_onnx_export():
        raise NotImplementedError(f"ONNX has no operators for quantized weights; {REMEDY}")
