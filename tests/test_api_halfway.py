"""quantize_ where what could not be foreseen fails: each weight is quantized or as it was, and the log says so."""

import logging
import textwrap
from collections.abc import Callable, Iterator

import pytest
import torch
from expecttest import assert_expected_inline
from small_models import Tied, mlp, snapshot
from torch import Tensor, nn

import mxquant
from mxquant import MXTensor, quantize_, register_backend
from mxquant.backends import FORWARD, Backend, Layout, Operand, Problem, unregister_backend
from mxquant.formats.spec import Format


class Failing(Layout):
    """Packs the weights it is asked for until `left` is used up."""

    name = "failing"
    left = 0
    error: BaseException = RuntimeError("pack failed")

    def pack(self, qdata: Tensor, scale: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
        if Failing.left == 0:
            raise Failing.error
        Failing.left -= 1
        return qdata, scale

    def unpack(self, qdata: Tensor, scale: Tensor, fmt: Format, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        return qdata, scale


class Packing(Backend):
    name = "packing"
    layout = Failing()

    def reject(self, problem: Problem) -> str | None:
        return None if problem.contraction == FORWARD else "along K only"

    def matmul(self, x: Tensor, weight: Operand, bias: Tensor | None, problem: Problem) -> Tensor:
        return x.new_ones(x.shape[0], problem.out_features)


@pytest.fixture(autouse=True)
def packing(fixed_backends: None) -> Iterator[None]:
    register_backend(Packing)
    yield
    unregister_backend("packing")


def fail_after(count: int, error: BaseException) -> None:
    Failing.left, Failing.error = count, error


def three_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(40, 64), mlp()[2], nn.Linear(16, 8), nn.LayerNorm(8))


def quantized_names(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if isinstance(parameter, MXTensor)]


def others(model: nn.Module) -> dict[str, tuple[object, ...]]:
    """The snapshot without quantized parameters."""
    return {name: entry for name, entry in snapshot(model).items() if MXTensor not in entry}


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("a kernel failed"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        ValueError("a bug in a backend"),
        KeyboardInterrupt(),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("count", [0, 1, 2])
def test_each_weight_is_quantized_or_as_it_was(count: int, error: BaseException) -> None:
    model, names = three_layers(), ["0.weight", "1.weight", "2.weight"]
    before = snapshot(model)
    fail_after(count, error)
    with pytest.raises(type(error)) as caught:
        quantize_(model, "mxfp4")
    assert caught.value is error
    assert quantized_names(model) == names[:count]
    assert others(model) == {name: entry for name, entry in before.items() if name not in names[:count]}
    # What is quantized is whole, and the model works.
    assert model(torch.randn(2, 40)).shape == (2, 8)


def test_nothing_changes_where_the_first_weight_fails() -> None:
    """Not even the reasons that skipped layers are given."""
    model = Tied()
    before = snapshot(model)
    fail_after(0, RuntimeError("pack failed"))
    with pytest.raises(RuntimeError, match="pack failed"):
        quantize_(model, "mxfp4")
    assert snapshot(model) == before


@pytest.mark.parametrize("name", ["embed", "lm_head"])
def test_tied_weights_are_replaced_everywhere_or_nowhere(name: str) -> None:
    model = Tied()
    original = model.embed.weight
    fail_after(1, RuntimeError("pack failed"))
    with pytest.raises(RuntimeError, match="pack failed"):
        quantize_(model, {"linear": "mxfp4", name: "mxfp4"})
    assert model.embed.weight is model.lm_head.weight
    assert isinstance(model.embed.weight, MXTensor) == (model.embed.weight is not original)
    assert isinstance(model.embed.weight, MXTensor) != isinstance(model.fc.weight, MXTensor)


def test_a_bias_that_cannot_move_leaves_its_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    model = three_layers()
    before = snapshot(model)
    move: Callable[..., Tensor] = Tensor.to

    def to(tensor: Tensor, *arguments: object, **options: object) -> Tensor:
        if tensor.shape == model[2].bias.shape:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return move(tensor, *arguments, **options)

    fail_after(9, RuntimeError())
    monkeypatch.setattr(Tensor, "to", to)
    with pytest.raises(torch.OutOfMemoryError):
        quantize_(model, "mxfp4", device="cpu")
    monkeypatch.undo()
    assert quantized_names(model) == ["0.weight", "1.weight"]
    assert others(model) == {name: entry for name, entry in before.items() if name not in ("0.weight", "1.weight")}


def test_the_log_says_where_and_how_to_go_on(caplog: pytest.LogCaptureFixture) -> None:
    model = three_layers()
    fail_after(1, RuntimeError("pack failed"))
    with pytest.raises(RuntimeError, match="pack failed"):
        quantize_(model, "mxfp4")
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("mxquant", logging.ERROR)
    assert_expected_inline(
        textwrap.fill(record.getMessage(), 100),
        """\
quantize_ stopped at 1.weight: 1 of 3 weights are quantized, the others are as they were. To go on
with those: filter_fn=lambda module, name: not any(isinstance(p, mxquant.MXTensor) for p in
module.parameters(recurse=False))""",
    )
    fail_after(9, RuntimeError())
    first = model[0].weight
    quantize_(
        model,
        "mxfp4",
        filter_fn=lambda module, name: (
            not any(isinstance(p, mxquant.MXTensor) for p in module.parameters(recurse=False))
        ),
    )
    assert model[0].weight is first
    assert quantized_names(model) == ["0.weight", "1.weight", "2.weight"]
