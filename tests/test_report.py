"""summary: what it counts, what it says of each weight, and how it looks."""

import copy
import math
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from small_models import Picky, Tied, WithExperts, mlp, snapshot
from torch import nn

import mxquant
from mxquant import dequantize_, quantize_, summary
from mxquant.formats import WEIGHT_FORMATS, get_format
from mxquant.modules.experts_layouts import unknown_experts
from mxquant.report import SkippedWeight

pytestmark = pytest.mark.usefixtures("fixed_backends")


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.attn = nn.MultiheadAttention(32, 2)
        self.up = nn.Linear(32, 128)
        self.down = nn.Linear(128, 32)
        self.experts = nn.ParameterDict({"w1": torch.randn(2, 32, 64)})
        self.lm_head = nn.Linear(32, 64, bias=False)
        self.lm_head.weight = self.embed.weight


def mixed() -> tuple[nn.Module, nn.Module]:
    model = Mixed()
    original = copy.deepcopy(model)
    quantize_(model, {"linear": "mxfp4", "down": {"weight": "mxfp6", "activation": None}, "moe": None})
    return model, original


def test_summary_as_text() -> None:
    model, _ = mixed()
    assert_expected_inline(
        str(summary(model)),
        """\
| quantized            | kind   | format     | W/A   | backend   | shape    | bits | bytes |
|----------------------|--------|------------|-------|-----------|----------|------|-------|
| attn.out_proj.weight | linear | mxfp4      | W4A4  | emulation | 32 x 32  | 4.25 |   544 |
| up.weight            | linear | mxfp4      | W4A4  | emulation | 128 x 32 | 4.25 | 2,176 |
| down.weight          | linear | mxfp6_e2m3 | W6A16 | emulation | 32 x 128 | 6.25 | 3,200 |

| not quantized                 | reason                                                                | shape       |  bytes |
|-------------------------------|-----------------------------------------------------------------------|-------------|--------|
| embed.weight = lm_head.weight | embedding                                                             | 64 x 32     |  8,192 |
| attn.in_proj_weight           | a parameter of MultiheadAttention, neither nn.Linear nor nn.Embedding | 96 x 32     | 12,288 |
| experts.w1                    | the config says None for 'moe'                                        | 2 x 32 x 64 | 16,384 |

18,720 parameters, 5.14 bits a quantized weight; 74,880 bytes before, 43,936 now""",  # noqa: E501
    )


def test_summary_as_text_with_the_original() -> None:
    model, original = nn.Sequential(nn.Linear(32, 32)), nn.Sequential(nn.Linear(32, 32))
    with torch.no_grad():
        model[0].weight.copy_(1.0)
        original[0].weight.copy_(1.25)
    quantize_(model, "mxfp8")
    assert_expected_inline(
        str(summary(model, original)),
        """\
| quantized | kind   | format     | W/A  | backend   | shape   | bits | bytes | SQNR dB |
|-----------|--------|------------|------|-----------|---------|------|-------|---------|
| 0.weight  | linear | mxfp8_e4m3 | W8A8 | emulation | 32 x 32 | 8.25 | 1,056 |   13.98 |

1,056 parameters, 8.25 bits a quantized weight; 4,224 bytes before, 1,184 now""",
    )


def test_summary_as_text_before_anything_is_quantized() -> None:
    assert_expected_inline(
        str(summary(mlp())),
        """\
| not quantized | reason        | shape   |  bytes |
|---------------|---------------|---------|--------|
| 0.weight      | not quantized | 64 x 40 | 10,240 |
| 2.weight      | not quantized | 16 x 64 |  4,096 |

3,648 parameters, nothing is quantized; 14,592 bytes before, 14,592 now""",
    )


def test_summary_of_a_model_without_matrices() -> None:
    assert_expected_inline(
        str(summary(nn.LayerNorm(8))), """16 parameters, nothing is quantized; 64 bytes before, 64 now"""
    )


class _Cells(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.cells: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.cells.append(data)


def test_summary_as_html() -> None:
    model, original = mixed()
    text = summary(model, original)._repr_html_()
    parsed = _Cells()
    parsed.feed(text)
    assert set(parsed.tags) == {"div", "table", "tr", "th", "td", "p"}
    start = parsed.cells.index("up.weight")
    assert parsed.cells[start : start + 6] == ["up.weight", "linear", "mxfp4", "W4A4", "emulation", "128 x 32"]
    assert parsed.cells[-1].startswith("18,720 parameters")


def test_html_is_escaped() -> None:
    model = nn.Module()
    model.add_module("<b>", nn.Linear(32, 32))
    quantize_(model, "mxfp4", filter_fn=lambda module, name: False)
    text = summary(model)._repr_html_()
    assert "&lt;b&gt;.weight" in text
    assert "<b>" not in text
    assert "| <b>.weight " in str(summary(model))


def test_brackets_in_names_are_not_markup() -> None:
    model = nn.Module()
    model.add_module("[red]", nn.Linear(32, 32))
    assert "[red].weight" in str(summary(model))


@pytest.mark.parametrize("format", WEIGHT_FORMATS)
def test_bits_are_counted_from_bytes(format: str) -> None:
    model = nn.Sequential(nn.Linear(256, 512, dtype=torch.bfloat16))
    quantize_(model, format)
    result = summary(model)
    (row,) = result.quantized
    weight = model[0].weight
    inner = sum(t.nbytes for t in weight.operand if t is not None)
    assert row.nbytes == inner
    assert row.bits_per_weight == result.bits_per_weight == 8 * inner / weight.numel()
    assert abs(row.bits_per_weight - get_format(format).bits_per_weight) < 0.001
    assert (result.nbytes_before, result.nbytes) == (2 * (256 * 512 + 512), inner + 2 * 512)
    assert result.num_parameters == 256 * 512 + 512


@pytest.mark.parametrize("format", WEIGHT_FORMATS)
@pytest.mark.parametrize("from_state_dict", [False, True])
def test_sqnr_is_its_definition(format: str, from_state_dict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mxquant.tensor.sqnr._CHUNK_ELEMENTS", 500)  # so that a weight is read in several chunks
    model = mlp(dtype=torch.bfloat16)
    original = copy.deepcopy(model)
    quantize_(model, format)
    result = summary(model, original.state_dict() if from_state_dict else original)
    for row in result.quantized:
        w = original.get_parameter(row.name).detach().double()
        noise = w - model.get_parameter(row.name).dequantize(torch.float64)
        assert row.sqnr_db == pytest.approx(20 * math.log10(w.norm() / noise.norm()), abs=1e-6)
        assert row.sqnr_db > 15


def test_sqnr_without_noise_or_signal() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    nn.init.ones_(model[0].weight)
    nn.init.ones_(model[1].weight)
    original = copy.deepcopy(model)
    nn.init.zeros_(original[1].weight)
    quantize_(model, "mxfp4")
    assert [row.sqnr_db for row in summary(model, original).quantized] == [math.inf, -math.inf]


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda model: {}, ValueError, "original has no tensor called 0.weight; pass the same model, unquantized"),
        (
            lambda model: {"0.weight": torch.zeros(3, 3)},
            ValueError,
            r"must be .* \(64, 40\); got a Tensor .* \(3, 3\)",
        ),
        (lambda model: model, ValueError, "0.weight must be an ordinary tensor .* got a EmulatedMXTensor"),
        (lambda model: {"0.weight": torch.zeros(64, 40).to("meta")}, ValueError, "0.weight must be .* on meta; pass"),
        (lambda model: [model], TypeError, "original must be the unquantized model, its state_dict or None; got list"),
    ],
)
def test_a_wrong_original_is_refused(make: Any, error: type[Exception], message: str) -> None:
    model = mlp()
    quantize_(model, "mxfp4")
    with pytest.raises(error, match=message):
        summary(model, make(model))


def test_tied_weights_are_counted_once() -> None:
    model = Tied()
    quantize_(model, {"lm_head": "mxfp8"})
    result = summary(model, Tied())
    (row,) = result.quantized
    assert (row.name, row.tied, row.kind) == ("embed.weight", ("lm_head.weight",), "linear")
    assert "| embed.weight = lm_head.weight | linear" in str(result)
    assert result.num_parameters == sum(parameter.numel() for parameter in model.parameters())


def test_skipped_weights_have_their_reasons() -> None:
    model = WithExperts()
    quantize_(model, "mxfp4")
    assert summary(model).skipped == [
        SkippedWeight(f"experts.{name}", unknown_experts(model.experts), (2, 32, 32), 8192) for name in ("w1", "w2")
    ]
    dequantize_(model)
    assert {row.reason for row in summary(model).skipped} == {"not quantized"}


def test_the_backend_is_the_one_that_computes() -> None:
    mxquant.register_backend(Picky)
    model = mlp()
    quantize_(model, {"0": mxquant.mxfp4(activation=None), "2": mxquant.mxfp4()})
    assert [row.backend for row in summary(model).quantized] == ["picky", "emulation"]


def test_summary_changes_nothing() -> None:
    model, original = mlp(), mlp()
    quantize_(model, "mxfp4", filter_fn=lambda module, name: name == "0")
    before = [(name, id(parameter)) for name, parameter in model.named_parameters()], snapshot(original)
    summary(model, original)
    assert ([(name, id(parameter)) for name, parameter in model.named_parameters()], snapshot(original)) == before


def test_uninitialized_parameters_are_not_listed() -> None:
    assert summary(nn.Sequential(nn.LazyLinear(8))).skipped == []
