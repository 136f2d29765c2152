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


def refuse_unwrapped_export(error: RuntimeError) -> None:
    """Raise a NotImplementedError in place of torch's own for `torch.export` of a model whose parameters are unwrapped.

    NOTE: torch.export keeps operators whole by a stand-in that returns NotImplemented. Nothing comes after it for a
    tensor subclass that is made inside the graph.
    """
    if "cast NotImplemented" in str(error):
        raise NotImplementedError(
            "torch.export cannot trace quantized weights that unwrap_tensor_subclass_parameters took apart; export the "
            "model as it is: torch.export.export(model, inputs).run_decompositions() takes them apart by itself"
        ) from error
