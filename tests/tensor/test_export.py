"""torch.export takes quantized parameters as they are."""

import io

import pytest
import torch
from matmul_reference import quantized_linear, same_bytes
from torch import nn

from mxquant import MXTensor


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
