"""`tune`: what is timed, what is chosen and kept, and what it says where there is nothing to time."""

from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from forked_backend import dense_problem
from small_models import Tied, mlp
from torch import Tensor, nn

import mxquant
from mxquant import quantize_, tune
from mxquant.backends import KernelChoice, Operand, Problem, TunableBackend, tuning_cache
from mxquant.backends.kernel_choice import select_kernel
from mxquant.tuning import Measurement, Product, TuningReport, find_products, keep, measure_all


@pytest.fixture
def products(forked: TunableBackend) -> list[Product]:
    """Two, which no weights are behind: `clock` looks at none."""
    weight = Operand(torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8))
    names = ["up", "gate", "down"]
    rotated = dense_problem(out_features=8192, rotation=32)
    return [
        Product(forked, dense_problem(), "W4A16", weight, names),
        Product(forked, rotated, "W4A16", weight, ["head"]),
    ]


TIMES = {
    "three": {1: 5.0, 64: 40.0},
    "one": {1: 9.0, 64: 39.5, 8192: 900.0},
    "two": {1: 7.0, 64: 60.0, 8192: 800.0},
}


def clock(choice: KernelChoice, x: Tensor, weight: Operand, problem: Problem) -> float:
    """In place of a GPU's: by the kernel and the rows; the larger product takes ten times as long, but for kernel 2."""
    assert x.shape[1] == problem.in_features
    assert x.dtype == problem.dtype
    time = TIMES[choice.name][x.shape[0]]
    return time if problem.out_features == 64 or choice.name == "two" else 10 * time


def test_the_fastest_is_chosen_unless_the_default_is_as_fast(products: list[Product]) -> None:
    measured = measure_all(products, [1, 64, 8192], clock)
    # 40.0 against 39.5 lies within the spread.
    assert [one.fastest for one in measured] == ["three", "three", "two", "two", "two", "two"]
    assert [one.default for one in measured] == ["three", "three", "one"] * 2
    assert measured[0].microseconds == {"three": 5.0, "one": 9.0, "two": 7.0}
    assert Measurement(products[0], 1, {"a": 10.21, "b": 10.0, "c": 12.0}).fastest == "b"
    assert Measurement(products[0], 1, {"a": 10.19, "b": 10.0, "c": 12.0}).fastest == "a"


def test_timing_does_not_change_the_random_state(products: list[Product]) -> None:
    before = torch.get_rng_state()
    measure_all(products, [1], clock)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_fastest_kernel_is_used_from_then_on(
    products: list[Product], forked: TunableBackend, empty_tuning_cache: None
) -> None:
    large = products[1].problem
    assert select_kernel(forked, large, 1).kernel.name == "three"
    (path,) = keep(measure_all(products, [1, 64], clock))
    assert path == tuning_cache.path_of("cpu")
    kernel, is_tuned = select_kernel(forked, large, 1)
    assert (kernel.name, is_tuned) == ("two", True)
    assert select_kernel(forked, products[0].problem, 64) == (forked.kernel_choices(large, 64)[0], True)
    assert keep([]) == []


def test_the_report(products: list[Product]) -> None:
    left = {"backend emulation has one kernel": ["embed", "proj", "out"]}
    report = TuningReport(measure_all(products, [1, 8192], clock), left, [Path("cache/routes-cpu.json")])
    assert_expected_inline(
        str(report),
        """\
| weights       | shape      | W/A                | backend |  rows | three us |  one us | two us | default | fastest |
|---------------|------------|--------------------|---------|-------|----------|---------|--------|---------|---------|
| up and 2 more | 64 x 256   | W4A16              | forked  |     1 |      5.0 |     9.0 |    7.0 | three   | three   |
| up and 2 more | 64 x 256   | W4A16              | forked  | 8,192 |          |   900.0 |  800.0 | one     | two     |
| head          | 8192 x 256 | W4A16, rotation 32 | forked  |     1 |     50.0 |    90.0 |    7.0 | three   | two     |
| head          | 8192 x 256 | W4A16, rotation 32 | forked  | 8,192 |          | 9,000.0 |  800.0 | one     | two     |

| not tuned        | reason                           |
|------------------|----------------------------------|
| embed and 2 more | backend emulation has one kernel |

written: cache/routes-cpu.json""",
    )
    assert_expected_inline(
        str(TuningReport([], left, [])),
        """\
| not tuned        | reason                           |
|------------------|----------------------------------|
| embed and 2 more | backend emulation has one kernel |

nothing was tuned""",
    )
    text = report._repr_html_()
    assert "<td>up and 2 more</td>" in text
    assert "<p>written: cache/routes-cpu.json</p>" in text


# Without a GPU


def test_backends_with_one_kernel_are_not_tuned(empty_tuning_cache: None, tmp_path: Path) -> None:
    model = mlp()
    quantize_(model, "mxfp4")
    model.register_parameter("vector", nn.Parameter(mxquant.quantize(torch.randn(32), "mxfp4"), False))
    model.register_parameter("experts", nn.Parameter(mxquant.quantize(torch.randn(2, 8, 32), "mxfp4"), False))
    assert_expected_inline(
        str(tune(model)),
        """\
| not tuned           | reason                                                     |
|---------------------|------------------------------------------------------------|
| vector              | has one axis, and is no matrix to multiply with            |
| experts             | experts are multiplied in groups, with no kernel to choose |
| 0.weight and 1 more | backend emulation has one kernel                           |

nothing was tuned""",
    )
    assert not (tmp_path / "cache").exists()


def test_other_devices_than_cuda_are_not_timed(forked: TunableBackend, empty_tuning_cache: None) -> None:
    model = mlp(dtype=torch.bfloat16)
    quantize_(model, mxquant.mxfp4(activation=None))
    report = tune(model)
    assert report.left == {"lies on cpu, and only CUDA devices are timed": ["0.weight", "2.weight"]}
    assert (report.measured, report.paths) == ([], [])


@pytest.mark.usefixtures("fixed_backends")
def test_a_tied_weight_is_reported_once() -> None:
    model = Tied()
    quantize_(model, {"linear": "mxfp4", "lm_head": "mxfp4", "embed": mxquant.mxfp4()})
    assert find_products(model)[1] == {"backend emulation has one kernel": ["fc.weight", "lm_head.weight"]}


@pytest.mark.usefixtures("fixed_backends")
def test_a_single_layer_is_a_model() -> None:
    layer = nn.Linear(32, 16)
    quantize_(layer, "nvfp4")
    assert tune(layer).left == {"backend emulation has one kernel": ["weight"]}


# What is refused


@pytest.mark.parametrize("rows", [(), [0, 4], (-1,)])
def test_rows_below_one_are_refused(rows: list[int]) -> None:
    with pytest.raises(ValueError, match=r"rows holds numbers from 1 on, at least one; got"):
        tune(mlp(), rows)


@pytest.mark.parametrize("rows", [16, (1.0,), ("1",), (True,), {1, 2}, b"ab", ""])
def test_rows_that_are_no_ints_are_refused(rows: object) -> None:
    with pytest.raises(TypeError, match=r"rows is a sequence of numbers such as \(1, 64\); got"):
        tune(mlp(), rows)  # type: ignore[arg-type]


def test_models_that_cannot_be_tuned_are_refused() -> None:
    with pytest.raises(ValueError, match="Sequential has no quantized weight but those of embeddings; quantize"):
        tune(mlp())
    with pytest.raises(TypeError, match=r"tune takes an nn\.Module; got Tensor"):
        tune(torch.ones(2))  # type: ignore[arg-type]


def test_nothing_is_timed_if_the_file_cannot_be_written(
    products: list[Product], empty_tuning_cache: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MXQUANT_CACHE", str(tmp_path / "file"))

    def never(*_: object) -> float:
        raise AssertionError("timed")

    with pytest.raises(OSError, match="set MXQUANT_CACHE to a folder on a local disk"):
        measure_all(products, [1], never)
