"""torch.export takes quantized parameters as they are. TorchScript and ONNX are refused."""

import copy
import io

import pytest
import torch
from matmul_reference import quantized_linear, same_bytes
from torch import nn
from torch._functorch._aot_autograd.subclass_parametrization import unwrap_tensor_subclass_parameters

from mxquant import MXTensor, dequantize_, quantize_


@pytest.mark.parametrize("format, activation", [("mxfp4", None), ("mxfp4", "mxfp4"), ("nvfp4", "nvfp4")])
def test_exported_is_bit_equal_and_keeps_the_subclass(format: str, activation: str | None) -> None:
    model = nn.Sequential(
        quantized_linear(40, 64, format, activation, dtype=torch.float32),
        nn.ReLU(),
        quantized_linear(64, 8, format, activation, dtype=torch.float32),
    )
    x = torch.randn(3, 40)
    program = torch.export.export(model, (x,))
    assert torch.equal(program.module()(x), model(x))
    exported = program.state_dict["0.weight"]
    assert isinstance(exported, MXTensor)
    assert same_bytes(exported, model[0].weight)


def test_exported_with_a_dynamic_batch() -> None:
    model = quantized_linear(40, 8, "mxfp4", "mxfp4", dtype=torch.float32)
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(model, (torch.randn(3, 40),), dynamic_shapes=({0: batch},))
    for rows in (2, 5, 100):
        x = torch.randn(rows, 40)
        assert torch.equal(program.module()(x), model(x))


def test_export_survives_its_file() -> None:
    model = quantized_linear(40, 8, "mxfp4", "mxfp4", dtype=torch.float32)
    x = torch.randn(3, 40)
    file = io.BytesIO()
    torch.export.save(torch.export.export(model, (x,)), file)
    file.seek(0)
    assert torch.equal(torch.export.load(file).module()(x), model(x))


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
def test_unwrapped_parameters(format: str) -> None:
    """torch takes subclasses apart ahead of time for a C++ runtime, and users do to spare time on each call."""
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)), torch.randn(3, 64)
    quantize_(model, format)
    unwrapped, expected = unwrap_tensor_subclass_parameters(copy.deepcopy(model)), model(x)
    assert not any(isinstance(parameter, MXTensor) for parameter in unwrapped.parameters())
    assert torch.equal(unwrapped(x), expected)
    assert torch.equal(torch.compile(unwrapped, fullgraph=True, backend="aot_eager")(x), expected)
    for strict in (False, True):
        with pytest.raises(NotImplementedError, match=r"export the model as it is.*run_decompositions\(\)"):
            torch.export.export(unwrapped, (x,), strict=strict)
        program = torch.export.export(model, (x,), strict=strict).run_decompositions()
        assert not any(isinstance(parameter, MXTensor) for parameter in program.state_dict.values())
        assert torch.equal(program.module()(x), expected)


def test_cast_of_unwrapped_scales_is_refused() -> None:
    model = nn.Sequential(nn.Linear(64, 8))
    quantize_(model, "nvfp4")
    unwrap_tensor_subclass_parameters(model).bfloat16()
    with pytest.raises(TypeError, match="cast before unwrap_tensor_subclass_parameters"):
        model(torch.randn(3, 64).bfloat16())


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 64)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return x


IDS = torch.arange(6).view(2, 3)
REFUSED = {
    "script": (lambda model: torch.jit.script(model), r"torch\.jit\.script"),
    "trace": (lambda model: torch.jit.trace(model, IDS), r"torch\.jit\.trace"),
    "old ONNX": (lambda model: torch.onnx.export(model, (IDS,), io.BytesIO(), dynamo=False), "dynamo=False"),
}


@pytest.mark.parametrize("config", ["mxfp4", {"linear": "nvfp4"}, {"linear": None, "table": "mxfp8"}], ids=str)
@pytest.mark.parametrize("exporter", REFUSED)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_is_refused_at_the_first_quantized_weight(exporter: str, config: object) -> None:
    model = Nested()
    export, named = REFUSED[exporter]
    quantize_(model, config)
    expected = model(IDS)
    with pytest.raises(NotImplementedError, match=rf"{named}.*torch\.export\.export.*dequantize_\(model\)"):
        export(model)
    assert torch.equal(model(IDS), expected)
    dequantize_(model)
    if exporter != "old ONNX":  # which needs the package onnx
        torch.testing.assert_close(export(model)(IDS), model(IDS))


def test_onnx_is_refused_while_it_exports() -> None:
    """NOTE: the exporter itself needs the package onnxscript, which is not always there."""
    pytest.importorskip("onnxscript")
    model = Nested()
    quantize_(model, "mxfp4")
    with pytest.raises(Exception, match=r"ONNX has no operators for quantized weights.*dequantize_\(model\)"):
        torch.onnx.export(model, (IDS,), dynamo=True)
    dequantize_(model)
    torch.onnx.export(model, (IDS,), dynamo=True)


@pytest.mark.parametrize("strict", [False, True])
def test_export_for_onnx_is_refused(strict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch.onnx.export(dynamo=True) does first."""
    from torch.onnx._internal.exporter import _flags

    model = Nested()
    quantize_(model, "mxfp4")
    monkeypatch.setattr(_flags, "_is_onnx_exporting", True)
    with pytest.raises(Exception, match=r"ONNX has no operators for quantized weights.*dequantize_\(model\)"):
        torch.export.export(model, (IDS,), strict=strict)
