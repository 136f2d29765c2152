"""SQNR of layers' outputs, as `summary` reports it."""

import copy
import math

import pytest
import torch
from torch import nn

from algorithms.calibration_models import Model, MoEBlock, batches
from mxquant import MXFP4Config, dequantize_, quantize_, summary
from mxquant.report import QuantizedWeight


def by_name(found: list[QuantizedWeight]) -> dict[str, QuantizedWeight]:
    return {row.name: row for row in found}


def test_output_sqnr_of_one_layer_is_its_definition() -> None:
    original, x = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32)), torch.randn(20, 64)
    model = copy.deepcopy(original)
    quantize_(model, "mxfp4")
    rows = by_name(summary(model, original, [x[:5], x[5:]]).quantized)
    with torch.no_grad():
        hidden = original[:2](x)  # the second layer is given what the original gives it
        for index, given in ((0, x), (2, hidden)):
            y = original[index](given)
            expected = 20 * math.log10(y.norm() / (y - model[index](given)).norm())
            assert rows[f"{index}.weight"].output_sqnr_db == pytest.approx(expected, abs=0.01)
    assert rows["0.weight"].sqnr_db != rows["0.weight"].output_sqnr_db


@pytest.mark.parametrize("make", [Model, lambda: Model(MoEBlock)])
def test_gptq_has_better_output_sqnr_and_worse_weight_sqnr(make: type[Model]) -> None:
    original, data = make().eval(), batches(4)
    found = []
    for algorithm in ("rtn", "gptq"):
        model = copy.deepcopy(original)
        config = MXFP4Config(activation=None, algorithm=algorithm)
        quantize_(model, config, calibration=data if algorithm == "gptq" else None)
        found.append(summary(model, original, data))
    name = "blocks.1.experts.down" if make is not Model else "blocks.1.down.weight"
    rounded, calibrated = (by_name(one.quantized)[name] for one in found)
    assert calibrated.output_sqnr_db > rounded.output_sqnr_db + 1  # type: ignore[operator]
    assert calibrated.sqnr_db < rounded.sqnr_db  # type: ignore[operator]
    assert "output SQNR dB" in str(found[0])
    assert "<th>output SQNR dB</th>" in found[0]._repr_html_()


def test_a_module_that_does_not_run_has_no_output_sqnr() -> None:
    original = Model()
    original.unused = nn.Linear(64, 64)
    model = copy.deepcopy(original)
    quantize_(model, "mxfp4")
    rows = by_name(summary(model, original, batches(1)).quantized)
    assert rows["unused.weight"].output_sqnr_db is None
    assert rows["unused.weight"].sqnr_db is not None
    assert rows["pooler.weight"].output_sqnr_db is not None
    assert not any(module._forward_hooks for module in original.modules())


def test_output_sqnr_against_the_dequantized_model() -> None:
    model = Model()
    quantize_(model, MXFP4Config(activation=None))
    ordinary = copy.deepcopy(model)
    dequantize_(ordinary)
    rows = summary(model, ordinary, batches(1)).quantized
    assert all(row.output_sqnr_db is not None and row.output_sqnr_db > 100 for row in rows)  # fp32's own rounding


def test_plot_shows_weights_and_outputs() -> None:
    pytest.importorskip("matplotlib")
    original = Model()
    model = copy.deepcopy(original)
    quantize_(model, "mxfp4")
    (axes,) = summary(model, original, batches(1)).plot().axes
    assert [line.get_label() for line in axes.lines] == ["weights", "outputs"]
    assert len(axes.lines[0].get_ydata()) == 10
    (axes,) = summary(model, original).plot().axes
    assert [line.get_label() for line in axes.lines] == ["weights"]
    with pytest.raises(ValueError, match="original="):
        summary(model).plot()


def test_batches_need_the_original_model() -> None:
    original = Model()
    model = copy.deepcopy(original)
    quantize_(model, "mxfp4")
    with pytest.raises(ValueError, match="pass it as original"):
        summary(model, None, batches(1))
    with pytest.raises(ValueError, match="pass it as original"):
        summary(model, original.state_dict(), batches(1))
    with pytest.raises(ValueError, match=r"no module 'blocks.2"):
        summary(model, Model(blocks=2), batches(1))
