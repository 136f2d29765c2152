"""Kernel choices: the defaults that were measured on an H200, and that what was tuned is used."""

import itertools

import pytest
import torch
from forked_backend import ONE, THREE, TWO, Forked, dense_problem

from mxquant import explain, quantize
from mxquant.backends import Operand, Problem, TunableBackend, get_backend, tuning_cache
from mxquant.backends.base import DGRAD, FORWARD
from mxquant.backends.kernel_choice import forget_selected, select_kernel
from mxquant.tensor import as_weight

HOPPER = {"device": torch.device("cuda", 0), "capability": (9, 0), "layout": "mxfp4_tiles"}
SIZES = [64, 128, 256, 640, 2880, 4096, 8192, 28672]
ROWS = [1, 2, 16, 17, 32, 33, 64, 65, 128, 129, 300, 512, 513, 1024, 1025, 2048, 2049, 8192]


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of 132 multiprocessors, which nothing is launched on."""
    persistent_gemm = pytest.importorskip("mxquant.kernels.mxfp4_sm90.persistent_gemm")
    monkeypatch.setattr(persistent_gemm, "multiprocessors", lambda device: 132)


def names(backend: str, asked: Problem, rows: int) -> list[str]:
    tunable = get_backend(backend)
    assert isinstance(tunable, TunableBackend)
    return [choice.name for choice in tunable.kernel_choices(asked, rows)]


def default_of(backend: str, n: int, k: int, rows: int) -> str:
    """The rule, written out: 132 multiprocessors, tiles of 256 weight rows by 32, 64 or 128 rows."""
    tile = 32 if rows <= 32 else 64 if rows <= 64 else 128
    busy = -(-rows // tile) * -(-n // 256) >= 99
    least, most = {"fp8": (33, 2048), "fp16": (17, 2048)}[backend]
    if k % 256 == 0 and busy and least <= rows <= most:
        return "warp_specialized"
    return "split_k" if rows <= 512 else "dequantize"


@pytest.mark.parametrize("backend, activation", [("fp8", "mxfp4"), ("fp16", None)])
def test_the_default_is_what_was_measured_to_be_fastest(backend: str, activation: str | None, h200: None) -> None:
    seen = set()
    for n, k, rows in itertools.product(SIZES, [256, 288, 2880, 8192, 14336], ROWS):
        asked = dense_problem(activation=activation, out_features=n, in_features=k, **HOPPER)
        default, *others = names(backend, asked, rows)
        assert default == default_of(backend, n, k, rows)
        every = {"split_k", "warp_specialized", "dequantize"} if k % 256 == 0 else {"split_k", "dequantize"}
        assert sorted([default, *others]) == sorted(every)
        seen.add(default)
    assert seen == {"split_k", "warp_specialized", "dequantize"}


def test_dgrad_has_one_kernel(h200: None) -> None:
    assert names("fp16", dense_problem(contraction=DGRAD, **HOPPER), 64) == ["dequantize"]


@pytest.mark.parametrize("contraction, width", [(FORWARD, 64), (DGRAD, 256)])
def test_no_rows_use_no_kernel(contraction: str, width: int) -> None:
    empty = torch.empty(0, dtype=torch.uint8)
    asked = dense_problem(contraction=contraction, dtype=torch.float16)
    y = Forked().matmul(torch.empty(0, 256, dtype=torch.float16), Operand(empty, empty), None, asked)
    assert (y.shape, y.dtype) == ((0, width), torch.float16)


def answers(backend: TunableBackend, *numbers_of_rows: int) -> list[float]:
    """What matmuls with a weight [64, 256] give, which tells their kernels."""
    weight = as_weight(quantize(torch.randn(64, 256).bfloat16(), "mxfp4"))
    inputs = (torch.randn(rows, 256).bfloat16() for rows in numbers_of_rows)
    return [torch.nn.functional.linear(x, weight)[0, 0].item() for x in inputs]


def record(measured: dict[int, str], **changes: object) -> None:
    tuning_cache.record("cpu", {tuning_cache.product_key("forked", dense_problem(**changes)): measured})
    forget_selected()


def test_without_a_file_the_default_is_used(forked: TunableBackend, empty_tuning_cache: None) -> None:
    assert answers(forked, 1, 64, 65, 5000) == [3, 3, 1, 1]


def test_the_next_larger_measured_number_of_rows_counts(forked: TunableBackend, empty_tuning_cache: None) -> None:
    record({4: ONE.name, 32: TWO.name, 256: TWO.name})
    assert answers(forked, 1, 4, 5, 32, 33, 256) == [1, 1, 2, 2, 2, 2]
    # Beyond the largest nothing was measured.
    assert answers(forked, 257, 5000) == [1, 1]
    # A kernel that does not take so many rows, though it was the fastest for a number nearby.
    record({4: TWO.name, 8192: THREE.name})
    assert answers(forked, 4, 256, 257, 8192) == [2, 2, 1, 1]


@pytest.mark.parametrize("changes", [{"out_features": 128}, {"in_features": 288}, {"rotation": 32}, {"weight": "nvfp4"},
                                     {"dtype": torch.float16}, {"contraction": DGRAD}], ids=str)  # fmt: skip
def test_another_product_does_not_count(
    changes: dict[str, object], forked: TunableBackend, empty_tuning_cache: None
) -> None:
    record({64: TWO.name}, **changes)
    assert answers(forked, 1) == [3]
    record({64: TWO.name})
    assert answers(forked, 1) == [2]


def test_a_choice_is_cached(forked: TunableBackend, empty_tuning_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call neither asks the backend again nor reads the file."""
    record({64: TWO.name})
    assert answers(forked, 7) == [2]
    monkeypatch.setattr(Forked, "kernel_choices", None)
    monkeypatch.setattr(tuning_cache, "_read", None)
    assert answers(forked, 7) == [2]
    with pytest.raises(TypeError):
        answers(forked, 8)


def test_a_traced_graph_uses_what_is_tuned_later(forked: TunableBackend, empty_tuning_cache: None) -> None:
    """The kernel is no part of a graph, so that nothing is compiled again."""
    layer = torch.nn.Linear(256, 64, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    layer.weight = torch.nn.Parameter(as_weight(quantize(layer.weight, "mxfp4")), requires_grad=False)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(5, 256).bfloat16()
    assert compiled(x)[0, 0] == 3
    record({64: TWO.name})
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert compiled(x)[0, 0] == 2


def test_explain_tells_the_kernel(forked: TunableBackend, empty_tuning_cache: None) -> None:
    weight = as_weight(quantize(torch.randn(64, 256).bfloat16(), "mxfp4"))
    assert dict(explain(weight).backends)["forked"] == "chosen"
    assert dict(explain(weight, (0, 256)).backends)["forked"] == "chosen"
    by_default = dict(explain(weight, (2, 3, 256)).backends)["forked"]
    assert by_default == "chosen; 6 rows use kernel three, by default"
    record({64: TWO.name})
    assert dict(explain(weight, (2, 3, 256)).backends)["forked"] == "chosen; 6 rows use kernel two, tuned"
    assert select_kernel(forked, dense_problem(), 6) == (TWO, True)
