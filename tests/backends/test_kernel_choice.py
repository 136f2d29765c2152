"""Routes: which there are, in the order of the rule that was measured on an H200, and that what was tuned is taken."""

import itertools

import pytest
import torch
from forked_backend import ONE, THREE, TWO, Forked, dense_problem

from mxquant import explain, quantize
from mxquant.backends import Operand, Problem, TunableBackend, get_backend
from mxquant.backends import tuning_cache as tuned
from mxquant.backends.kernel_choice import choose_route, forget_choices
from mxquant.tensor import as_weight

HOPPER = {"device": torch.device("cuda", 0), "capability": (9, 0), "layout": "mxfp4_tiles"}
SIZES = [64, 128, 256, 640, 2880, 4096, 8192, 28672]
ROWS = [1, 2, 16, 17, 32, 33, 64, 65, 128, 129, 300, 512, 513, 1024, 1025, 2048, 2049, 8192]


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of 132 multiprocessors, which nothing is launched on."""
    specialized = pytest.importorskip("mxquant.kernels.mxfp4_sm90.persistent_gemm")
    monkeypatch.setattr(specialized, "multiprocessors", lambda device: 132)


def names(backend: str, asked: Problem, rows: int) -> list[str]:
    routed = get_backend(backend)
    assert isinstance(routed, TunableBackend)
    return [route.name for route in routed.routes(asked, rows)]


def first_of(backend: str, n: int, k: int, rows: int) -> str:
    """The rule, written out: 132 multiprocessors, tiles of 256 weight rows by 32, 64 or 128 rows."""
    tile = 32 if rows <= 32 else 64 if rows <= 64 else 128
    busy = -(-rows // tile) * -(-n // 256) >= 99
    least, most = {"fp8": (33, 2048), "fp16": (17, 2048)}[backend]
    if k % 256 == 0 and busy and least <= rows <= most:
        return "specialized"
    return "few" if rows <= 512 else "expand"


@pytest.mark.parametrize("backend, activation", [("fp8", "mxfp4"), ("fp16", None)])
def test_the_first_route_is_what_was_measured_to_be_best(backend: str, activation: str | None, h200: None) -> None:
    seen = set()
    for n, k, rows in itertools.product(SIZES, [256, 288, 2880, 8192, 14336], ROWS):
        asked = dense_problem(activation=activation, out_features=n, in_features=k, **HOPPER)
        first, *others = names(backend, asked, rows)
        assert first == first_of(backend, n, k, rows)
        every = {"few", "specialized", "expand"} if k % 256 == 0 else {"few", "expand"}
        assert sorted([first, *others]) == sorted(every)
        seen.add(first)
    assert seen == {"few", "specialized", "expand"}


def test_across_the_blocks_there_is_one_route(h200: None) -> None:
    assert names("fp16", dense_problem(contraction="unblocked", **HOPPER), 64) == ["expand"]


@pytest.mark.parametrize("contraction, width", [("blocked", 64), ("unblocked", 256)])
def test_no_rows_take_no_route(contraction: str, width: int) -> None:
    """Of a backend that would launch kernels for any."""
    empty = torch.empty(0, dtype=torch.uint8)
    asked = dense_problem(contraction=contraction, dtype=torch.float16)
    y = Forked().matmul(torch.empty(0, 256, dtype=torch.float16), Operand(empty, empty), None, asked)
    assert (y.shape, y.dtype) == ((0, width), torch.float16)


def answers(backend: TunableBackend, *numbers_of_rows: int) -> list[float]:
    """What matmuls with a weight [64, 256] give, which tells their routes."""
    weight = as_weight(quantize(torch.randn(64, 256).bfloat16(), "mxfp4"))
    inputs = (torch.randn(rows, 256).bfloat16() for rows in numbers_of_rows)
    return [torch.nn.functional.linear(x, weight)[0, 0].item() for x in inputs]


def record(measured: dict[int, str], **changes: object) -> None:
    tuned.record("cpu", {tuned.product_key("forked", dense_problem(**changes)): measured})
    forget_choices()


def test_without_a_file_the_first_route_is_taken(forked: TunableBackend, routes_cache: None) -> None:
    assert answers(forked, 1, 64, 65, 5000) == [3, 3, 1, 1]


def test_the_nearest_number_from_above_tells_the_route(forked: TunableBackend, routes_cache: None) -> None:
    record({4: ONE.name, 32: TWO.name, 256: TWO.name})
    assert answers(forked, 1, 4, 5, 32, 33, 256) == [1, 1, 2, 2, 2, 2]
    # Beyond the largest nothing was measured.
    assert answers(forked, 257, 5000) == [1, 1]
    # A route that does not take so many rows, though a number nearby was measured with it.
    record({4: TWO.name, 8192: THREE.name})
    assert answers(forked, 4, 256, 257, 8192) == [2, 2, 1, 1]


@pytest.mark.parametrize("changes", [{"out_features": 128}, {"in_features": 288}, {"rotation": 32}, {"weight": "nvfp4"},
                                     {"dtype": torch.float16}, {"contraction": "unblocked"}], ids=str)  # fmt: skip
def test_what_was_measured_of_another_product_says_nothing(
    changes: dict[str, object], forked: TunableBackend, routes_cache: None
) -> None:
    record({64: TWO.name}, **changes)
    assert answers(forked, 1) == [3]
    record({64: TWO.name})
    assert answers(forked, 1) == [2]


def test_a_choice_is_kept(forked: TunableBackend, routes_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call neither asks for the routes again nor reads the file."""
    record({64: TWO.name})
    assert answers(forked, 7) == [2]
    monkeypatch.setattr(Forked, "routes", None)
    monkeypatch.setattr(tuned, "_read", None)
    assert answers(forked, 7) == [2]
    with pytest.raises(TypeError):
        answers(forked, 8)


def test_a_traced_graph_takes_what_is_tuned_later(forked: TunableBackend, routes_cache: None) -> None:
    """The route is no part of a graph, so that nothing is compiled again."""
    layer = torch.nn.Linear(256, 64, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    layer.weight = torch.nn.Parameter(as_weight(quantize(layer.weight, "mxfp4")), requires_grad=False)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(5, 256).bfloat16()
    assert compiled(x)[0, 0] == 3
    record({64: TWO.name})
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert compiled(x)[0, 0] == 2


def test_explain_tells_the_route(forked: TunableBackend, routes_cache: None) -> None:
    weight = as_weight(quantize(torch.randn(64, 256).bfloat16(), "mxfp4"))
    assert dict(explain(weight).backends)["forked"] == "chosen"
    assert dict(explain(weight, (0, 256)).backends)["forked"] == "chosen"
    by_default = dict(explain(weight, (2, 3, 256)).backends)["forked"]
    assert by_default == "chosen; 6 rows take route three, by default"
    record({64: TWO.name})
    assert dict(explain(weight, (2, 3, 256)).backends)["forked"] == "chosen; 6 rows take route two, tuned"
    assert choose_route(forked, dense_problem(), 6) == (TWO, True)
