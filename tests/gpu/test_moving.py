"""Weights that move between a CPU and a GPU, and models that are quantized there."""

import torch
from native_cases import needs_gpu
from torch import nn

from mxquant import EmulatedMXTensor, MXTensor, dequantize_, quantize_, summary

pytestmark = needs_gpu


def test_moving_there_and_back(device: torch.device) -> None:
    """The class is chosen anew on each device, and the bytes stay."""
    layer = nn.Linear(64, 48)
    quantize_(layer, "mxfp4")
    before = layer.weight.qdata.clone()
    layer.to(device)
    assert layer.weight.qdata.device == device
    assert isinstance(layer.weight, MXTensor)
    assert layer(torch.randn(3, 64, device=device)).device == device
    layer.cpu()
    assert isinstance(layer.weight, EmulatedMXTensor)
    assert torch.equal(layer.weight.qdata, before)


def test_quantize_there_and_leave_it_there(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
    quantize_(model, "nvfp4", device=device)
    assert {p.device for p in model.parameters()} == {device}
    assert model(torch.randn(2, 64, device=device)).shape == (2, 32)
    assert "nvfp4" in str(summary(model))
    dequantize_(model)
    assert model[0].weight.device == device
