"""What training loops and offloading do to weights: averages of models, moves under weak references, arrays."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from small_models import mlp
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from mxquant import MXTensor, quantize_

X = torch.ones(2, 40)


@pytest.mark.parametrize("average", [get_ema_multi_avg_fn(0.9), get_swa_multi_avg_fn()], ids=["ema", "swa"])
@pytest.mark.parametrize("use_buffers", [False, True])
def test_an_average_over_frozen_quantized_weights_follows_the_trained_ones(average: Any, use_buffers: bool) -> None:
    plain = mlp()
    quantized = copy.deepcopy(plain)
    quantize_(quantized, "mxfp4")
    codes = quantized[0].weight.qdata.clone()
    means = [AveragedModel(model, multi_avg_fn=average, use_buffers=use_buffers) for model in (plain, quantized)]
    for step in range(3):
        for model, mean in zip((plain, quantized), means):
            model[0].bias.data.fill_(step)
            mean.update_parameters(model)
    assert torch.equal(means[1].module[0].bias, means[0].module[0].bias)
    assert isinstance(means[1].module[0].weight, MXTensor)
    assert torch.equal(means[1].module[0].weight.qdata, codes)
    assert means[1](X).isfinite().all()


@pytest.mark.parametrize("options", [{}, {"avg_fn": get_ema_avg_fn(0.9)}], ids=["swa", "avg_fn"])
def test_other_averages_of_quantized_weights_are_refused(options: dict[str, Any]) -> None:
    model = mlp()
    quantize_(model, "mxfp4")
    mean = AveragedModel(model, **options)
    mean.update_parameters(model)
    with pytest.raises(NotImplementedError, match=r"\.dequantize\(\) first" + ("" if options else ".*multi_avg_fn=")):
        mean.update_parameters(model)


def test_an_average_of_other_codes_is_refused() -> None:
    models = [mlp(), mlp()]
    for model in models:
        quantize_(model, "mxfp4")
    mean = AveragedModel(models[0], multi_avg_fn=get_ema_multi_avg_fn(0.9))
    mean.update_parameters(models[0])
    with pytest.raises(NotImplementedError, match=r"differ and have no average .* quantize_ the average"):
        mean.update_parameters(models[1])


def test_an_average_is_quantized_like_any_model() -> None:
    model = mlp()
    mean = AveragedModel(model)
    mean.update_parameters(model)
    quantize_(mean, "mxfp4")
    assert isinstance(mean.module[0].weight, MXTensor)


def test_a_weak_reference_blocks_a_move_of_the_module_until_it_is_gone() -> None:
    """torch exchanges tensors of subclasses, and refuses that while others refer to them. What it moved stays moved."""
    model = mlp()
    quantize_(model, "mxfp4")
    reference = weakref.ref(model[0].weight)
    with pytest.raises(RuntimeError, match=r"Couldn't swap Linear\.weight"):
        model.to(torch.bfloat16)
    assert model[0].weight is reference()
    del reference
    model.to(torch.bfloat16)
    assert model[0].weight.dtype == torch.bfloat16


def test_a_compiled_model_moves() -> None:
    model = mlp()
    quantize_(model, "mxfp4")
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(X)
        model.to(torch.bfloat16)
        assert compiled(X.to(torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_arrays_are_refused(dtype: torch.dtype) -> None:
    model = mlp(dtype=dtype)
    quantize_(model, "mxfp4")
    with pytest.raises(NotImplementedError, match=r"no array of its values; call \.dequantize\(\)"):
        model[0].weight.detach().numpy()
    with pytest.raises(NotImplementedError, match=r"cannot be viewed as torch\.int16; call \.dequantize\(\)"):
        model[0].weight.view(torch.int16)
