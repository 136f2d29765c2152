"""compressed-tensors stores the reciprocals of NVFP4's fp32 scales: exact, or refused."""

from __future__ import annotations

import pytest
import torch

from mxquant import MXTensor, quantize
from mxquant.checkpoints import get_producer

EXACT = torch.tensor(0.0625)
# 2 - 2^-23: its reciprocal lies midway between two fp32 numbers, whose own reciprocals are 2 and 2 - 2^-22.
WITHOUT = torch.nextafter(torch.tensor(2.0), torch.tensor(0.0))
PRODUCER = get_producer("compressed-tensors")


def weight(scale: torch.Tensor, static: torch.Tensor | None = None, dtype: torch.dtype = torch.bfloat16) -> MXTensor:
    plain = quantize(torch.randn(4, 64).to(dtype), "nvfp4", per_tensor_scale=scale)
    return plain if static is None else plain.with_activation("nvfp4", "even", static)


def test_inexact_divisor_is_written_if_bf16_values_stay_equal() -> None:
    near = 1 / WITHOUT
    around = [near, torch.nextafter(near, torch.tensor(0.0)), torch.nextafter(near, torch.tensor(1.0))]
    assert all(1 / divisor != WITHOUT for divisor in around)
    a = weight(WITHOUT)
    divisor = PRODUCER.encode("a.weight", a, {})["a.weight_global_scale"]
    assert 1 / divisor.item() != WITHOUT.item()
    b = a.rewrap(a.operand._replace(per_tensor_scale=(1 / divisor).reshape(())))
    assert torch.equal(a.dequantize(), b.dequantize())


@pytest.mark.parametrize(
    "scale, static, kind", [(WITHOUT, None, "per-tensor"), (EXACT, WITHOUT, "activations'")], ids=["weight", "input"]
)
def test_scale_without_an_exact_divisor_is_refused(scale: torch.Tensor, static: torch.Tensor | None, kind: str) -> None:
    with pytest.raises(NotImplementedError, match=f"last bit of its {kind} scale 1.99999"):
        PRODUCER.encode("a.weight", weight(scale, static, torch.float32), {})


def test_scales_are_written_as_exact_divisors() -> None:
    tensors = PRODUCER.encode("a.weight", weight(EXACT, EXACT), {})
    assert tensors["a.weight_global_scale"].item() == tensors["a.input_global_scale"].item() == 16


def test_prepare_moves_scales_to_the_nearest_reciprocal() -> None:
    scales = torch.cat([WITHOUT[None], EXACT[None], torch.rand(4000, generator=torch.manual_seed(0)) * 2e-3])
    moved = 0
    for scale in scales:
        before = MXTensor.from_qdata(
            torch.zeros(1, 8, dtype=torch.uint8), torch.ones(1, 1, dtype=torch.uint8), "nvfp4", per_tensor_scale=scale
        )
        after = PRODUCER.prepare(before)
        assert torch.equal(after.qdata, before.qdata)
        given = after.per_tensor_scale
        assert given in (scale, scale.nextafter(torch.tensor(0.0)), scale.nextafter(torch.tensor(9.0)))
        moved += int(given != scale)
        divisor = PRODUCER.encode("a.weight", after, {})["a.weight_global_scale"]
        assert 1 / divisor.item() == pytest.approx(given.item(), rel=2**-23)
        assert torch.equal((1 / divisor).reshape(()), given.reshape(()))
    assert 0 < moved < len(scales)
