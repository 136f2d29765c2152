"""Calibration that cannot be used is refused by name, and nothing is changed."""

from typing import Any

import pytest
import torch
from torch import nn

from algorithms.calibration_models import Model, MoEBlock, batches
from mxquant import GPTQ, MXFP4Config, MXTensor, quantize_

PARALLEL = GPTQ(sequential=False)
ROTATED = MXFP4Config(rotation=32, algorithm="gptq")


@pytest.mark.parametrize(
    "calibration, kind, message",
    [
        (None, ValueError, "needs calibration data; pass calibration=batches"),
        ([], ValueError, "holds no batches"),
        (torch.zeros(4, 16), TypeError, "Put a single batch in a list"),
        ({"ids": torch.zeros(4)}, TypeError, "Put a single batch in a list"),
        (7, TypeError, "got int"),
        (["text"], TypeError, "a calibration batch is a tensor, a tuple or a dict; got str"),
    ],
)
def test_wrong_calibration_is_refused_before_anything_changes(
    calibration: Any, kind: type[Exception], message: str
) -> None:
    model = Model()
    with pytest.raises(kind, match=message):
        quantize_(model, {"linear": "mxfp8", "blocks.0": ROTATED}, calibration=calibration)
    assert not any(isinstance(p, MXTensor) for p in model.parameters())


def test_calibration_that_nobody_uses_is_refused() -> None:
    with pytest.raises(ValueError, match="no config of this call has an algorithm that uses it"):
        quantize_(Model(), "mxfp4", calibration=batches())


def test_configs_that_disagree_on_the_mode_are_refused() -> None:
    with pytest.raises(ValueError, match="sequential"):
        quantize_(Model(), {"linear": ROTATED, "pooler": MXFP4Config(algorithm=PARALLEL)}, calibration=batches())


def test_a_batch_that_fails_changes_nothing_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    with pytest.raises(IndexError):
        quantize_(model, ROTATED, calibration=[torch.full((8, 16), 1000)])
    assert "stopped at calibration: 0 of 10 weights are quantized, the model is as it was" in caplog.text
    assert "To go on" not in caplog.text
    assert not any(isinstance(p, MXTensor) for p in model.parameters())
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e20])
def test_inputs_that_give_no_finite_hessian_are_refused_by_name(value: float) -> None:
    """1e20 is finite, and its square is not."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    x = torch.randn(256, 64)
    x[7, 3] = value
    with pytest.raises(
        ValueError, match=r"^0\.weight: calibration gives it inputs that are NaN, infinite or too large"
    ):
        quantize_(model, MXFP4Config(algorithm="gptq"), calibration=[torch.randn(256, 64), x])
    assert not any(isinstance(p, MXTensor) for p in model.parameters())
    experts = Model(MoEBlock, 1)
    with torch.no_grad():
        experts.blocks[0].norm.bias[5] = value
    with pytest.raises(ValueError, match=r"^blocks\.0\.experts\.up \(matrix 0\): calibration gives it inputs"):
        quantize_(experts, {"moe": MXFP4Config(algorithm=GPTQ(min_tokens=1))}, calibration=batches())


def test_too_little_damping_is_refused_by_name() -> None:
    x = torch.randn(4, 64).repeat(64, 1)  # of rank 4
    config = MXFP4Config(algorithm=GPTQ(damping=1e-30))
    with pytest.raises(ValueError, match=r"^weight: the Hessian of its inputs has no .* damping=1e-30 .*give GPTQ\("):
        quantize_(nn.Linear(64, 64), config, calibration=[x])


def test_torchao_has_no_calibration() -> None:
    torchao = pytest.importorskip("torchao.quantization")
    with pytest.raises(ValueError, match=r"call mxquant.quantize_ with calibration=batches"):
        torchao.quantize_(nn.Sequential(nn.Linear(64, 64)), ROTATED)
