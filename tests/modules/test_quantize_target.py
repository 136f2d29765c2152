"""What `check_target` refuses of one weight, with its values and without."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from small_models import mlp, snapshot
from torch import Tensor, nn

from mxquant import MXFP4Config, MXTensor, dequantize_, quantize_, register_backend, register_experts_layout
from mxquant.backends import Backend, Operand, Problem, unregister_backend
from mxquant.config import resolve_mapping
from mxquant.modules.quantize_target import Target, check_target, quantized_parameter, stand_in_for
from mxquant.select import select_weights


class Unrotated(Backend):
    """Computes everything but rotated weights."""

    name = "unrotated"

    def reject(self, problem: Problem) -> str | None:
        return "not rotated" if problem.rotation else None

    def matmul(self, x: Tensor, weight: Operand, bias: Tensor | None, problem: Problem) -> Tensor:
        return x.new_ones(x.shape[0], problem.out_features)


@pytest.fixture
def unrotated(fixed_backends: None) -> Iterator[None]:
    register_backend(Unrotated)
    yield
    unregister_backend("unrotated")


class Flat(nn.Module):
    """The matrices of three experts, one below the other."""

    def __init__(self, rows: int = 96) -> None:
        super().__init__()
        self.count = 3
        self.w = nn.Parameter(torch.randn(rows, 40))


def target_of(model: nn.Module, config: object) -> Target:
    (target,) = select_weights(model, resolve_mapping(config)).targets
    return target


def test_backend_is_asked_about_the_rotation_before_any_change(unrotated: None) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"1.weight \(64, 64\): backend 'unrotated' cannot .*: not rotated"):
        quantize_(model, {"0": "mxfp4", "1": MXFP4Config(backend="unrotated", rotation=32)})
    assert snapshot(model) == before
    quantize_(model, MXFP4Config(backend="unrotated"))


def test_rotation_is_checked_against_k_of_one_expert() -> None:
    register_experts_layout(Flat, {"w": -2}, num_experts="count")
    rotated = {"moe": {"weight": "mxfp4", "rotation": 32}}
    check_target(target_of(Flat(rows=96), rotated))
    with pytest.raises(ValueError, match=r"w \(48, 40\): rotation=32 needs .* this one has 16"):
        check_target(target_of(Flat(rows=48), rotated))


def test_3d_weight_of_a_layout_with_num_experts_is_refused() -> None:
    register_experts_layout(Flat, {"w": -1}, num_experts="count")
    module = Flat()
    module.w = nn.Parameter(torch.randn(3, 32, 40))
    with pytest.raises(ValueError, match=r"w: shape \(3, 32, 40\) is not 2-D, as its layout's num_experts says"):
        quantize_(module, "mxfp4")


def test_flat_experts_are_2d_again_after_dequantize() -> None:
    register_experts_layout(Flat, {"w": -1}, num_experts="count")
    module = Flat()
    quantize_(module, "mxfp4")
    assert module.w.shape == (3, 32, 40)
    values = module.w.dequantize()
    dequantize_(module)
    assert torch.equal(module.w, values.reshape(96, 40))


def test_sizes_and_dtypes_are_checked_without_values() -> None:
    with torch.device("meta"):
        model = nn.Linear(40, 8)
        empty = nn.Linear(40, 0)
    target = target_of(model, "mxfp4")
    check_target(target, has_values=False)
    with pytest.raises(NotImplementedError, match="on the meta device"):
        check_target(target)
    with pytest.raises(ValueError, match="is empty"):
        check_target(target_of(empty, "mxfp4"), has_values=False)
    with pytest.raises(ValueError, match="backend 'typo' is unknown"):
        check_target(target_of(model, MXFP4Config(backend="typo")), device=torch.device("cpu"), has_values=False)


@pytest.mark.parametrize("format", ["mxfp4", "mxfp6_e3m2", "nvfp4"])
def test_stand_in_describes_the_quantized_weight(format: str) -> None:
    register_experts_layout(Flat, {"w": -2}, num_experts="count")
    for model in (mlp()[0], Flat()):
        target = target_of(model, format)
        weight = quantized_parameter(target)
        stand_in = stand_in_for(target, torch.float32)
        assert isinstance(weight, MXTensor)
        assert (stand_in.shape, stand_in.metadata) == (weight.shape, weight.canonical().metadata)
        assert (stand_in.qdata.shape, stand_in.scale.shape) == (weight.qdata.shape, weight.scale.shape)
