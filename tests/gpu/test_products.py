"""Products of the native backends against float64: every kind of data, shape, number of rows and stride."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from matmul_reference import ACTIVATIONS, DATA, FORMATS, activation64, assert_product, decode64, operands, quantized
from native_cases import ANY_SHAPE, CASES, TENSOR_CORE_CASES, Case, needs_gpu
from poison import POISONS, amid_poison, poisoned_workspaces, weight_amid_poison
from torch import Tensor

from mxquant import MXTensor, explain

pytestmark = needs_gpu

# Up to 65 each, then around the borders of tiles (128), of the kernels for few rows (256) and of repairs (512).
MANY_ROWS = [*range(66), 100, 127, 128, 129, 200, 255, 256, 257, 511, 512, 513, 700, 1025]
# One of each way that a tensor-core backend has: tiles of 16, 32, 64 and 128 rows, two of those, and expansion.
WAYS = [1, 17, 33, 65, 200, 300]


def bf16_operands(kind: str, rows: int, k: int, n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    if kind == "student_t":
        x, w = torch.distributions.StudentT(2.0).sample((rows, k)), torch.randn(n, k)
    else:
        x, w = operands(kind, rows, k, n)
    return x.bfloat16().to(device), w.bfloat16().to(device)


# Data


@pytest.mark.parametrize("kind", [*DATA, "student_t"])
@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_data(case: Case, kind: str, device: torch.device) -> None:
    if case.backend == "fp8" and kind == "heavy_tailed":
        pytest.skip("has a bound of its own: test_tensor_cores.test_where_single_products_rule")
    n, k = case.shape
    for rows in WAYS if case.is_tiled else (1, 37):
        x, w = bf16_operands(kind, rows, k, n, device)
        weight, bias = case.weight(w), torch.randn(n, device=device).bfloat16()
        case.check(F.linear(x, weight), x, weight)
        case.check(F.linear(x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("span", [20, 28, 29, 32, 33, 60, 122, 250])
@pytest.mark.parametrize("case", CASES)
def test_blocks_far_below_the_rest_of_their_row(case: Case, span: int, device: torch.device) -> None:
    """The first 32 columns are `span` binades below the others. Half of the weight's rows see only the former, half
    only the latter, so that neither can be dropped or clamped: each is measured by itself.
    """
    n, k = case.shape
    x, w = torch.randn(300, k), torch.randn(n, k)
    x[:, :32] *= 2.0 ** -min(span, 125)
    x[:, 32:] *= 2.0 ** max(0, span - 125)
    w[::2, 32:] = 0
    w[1::2, :32] = 0
    w[::2] *= 2.0**10  # sums stay in the range of bf16, at both ends
    w[1::2] *= 2.0**-10
    x, w = x.bfloat16().to(device), w.bfloat16().to(device)
    weight = case.weight(w)
    for rows in WAYS if case.is_tiled else (40,):
        case.check(F.linear(x[:rows], weight), x[:rows], weight)


@pytest.mark.parametrize("widest", [0, 4, 20, 100])
@pytest.mark.parametrize("case", CASES)
def test_each_column_by_itself(case: Case, widest: int, device: torch.device) -> None:
    """Each row of the weight has one element that is not zero: nothing hides what became of one element of x, however
    far below its neighbours it lies. Without factors after the sum the result is exact: 4 times 8 bits, rounded once.
    """
    size = 512 if case.is_tiled else 130
    w = torch.diag(torch.tensor([1.0, -1.5, 3.0, -6.0])[torch.randint(4, (size,))])[torch.randperm(size)]
    w = w * torch.exp2(torch.randint(-3, 4, (size, 1)).float())
    x = torch.randn(300, size) * torch.exp2(torch.randint(-widest, widest + 1, (300, size)).float())
    x, w = x.bfloat16().to(device), w.bfloat16().to(device)
    weight = case.weight(w)
    for rows in WAYS if case.is_tiled else (40,):
        y = F.linear(x[:rows], weight)
        case.check(y, x[:rows], weight)
        if not case.has_factors:
            exact = activation64(x[:rows], case.activation) @ decode64(weight.canonical()).mT
            assert torch.equal(y, exact.bfloat16())


@pytest.mark.parametrize("rows", [40, 300])
@pytest.mark.parametrize("case", CASES)
def test_rows_of_zeros_nan_inf_and_every_magnitude(case: Case, rows: int, device: torch.device) -> None:
    """What is wrong with a row stays in it, and is what IEEE arithmetic makes of it."""
    n, k = case.shape
    x, w = torch.randn(rows, k), torch.randn(n, k).bfloat16().to(device)
    x[3], x[4] = 0.0, -0.0
    x[5, 7], x[8, k - 1], x[9, 0] = torch.nan, torch.inf, -torch.inf
    x[10, 0], x[10, k - 1] = torch.inf, -torch.inf
    # Before the per-tensor scale NVFP4's sums are up to 2^11 times as large; 2^119 would leave the range of fp32 there.
    largest = 107 if case.format == "nvfp4" else 119
    for row, exponent in enumerate((-133, -127, -126, -120, -64, -24, -15, -14, 14, 15, 16, 17, 64, 100, largest), 16):
        x[row] *= 2.0**exponent
    x = x.bfloat16().to(device)
    weight, bias = case.weight(w), torch.randn(n, device=device).bfloat16()
    y, biased = F.linear(x, weight), F.linear(x, weight, bias)
    assert (y[3:5] == 0).all()
    assert torch.equal(biased[3:5], bias.expand(2, n))
    bad = [5, 8, 9, 10]
    good = [row for row in range(rows) if row not in bad]
    case.check(y[good], x[good], weight)
    case.check(biased[good], x[good], weight, bias)
    expected = activation64(x[bad], case.activation) @ decode64(weight.canonical()).mT
    assert torch.equal(y[bad].isnan(), expected.isnan())
    assert torch.equal(y[bad].double().nan_to_num(0, 1, -1), expected.nan_to_num(0, 1, -1))


# Shapes and rows


@pytest.mark.parametrize("case", CASES)
def test_every_number_of_rows(case: Case, device: torch.device) -> None:
    n, k = case.shape
    x, w = bf16_operands("gaussian", max(MANY_ROWS), k, n, device)
    weight, bias = case.weight(w), torch.randn(n, device=device).bfloat16()
    y = [F.linear(x[:rows], weight, bias) for rows in MANY_ROWS]
    assert [part.shape[0] for part in y] == MANY_ROWS
    # Judged all at once: the same rows in every batch.
    x64 = activation64(x, case.activation)
    stacked = torch.cat([x64[:rows] for rows in MANY_ROWS])
    assert_product(torch.cat(y), stacked, decode64(weight.canonical()), bias)


EVERY_SHAPE = [
    pytest.param(case.values[0], n, k, id=f"{case.id}-{n}x{k}", marks=case.marks)
    for case in TENSOR_CORE_CASES
    for n, k in case.values[0].shapes
]


@pytest.mark.parametrize("case, n, k", EVERY_SHAPE)
def test_every_shape(case: Case, n: int, k: int, device: torch.device) -> None:
    for kind in ("gaussian", "loud_channels"):
        x, w = bf16_operands(kind, 300, k, n, device)
        weight, bias = case.weight(w), torch.randn(n, device=device).bfloat16()
        for rows in WAYS:
            case.check(F.linear(x[:rows], weight, bias), x[:rows], weight, bias)


@pytest.mark.parametrize("n, k", ANY_SHAPE)
@pytest.mark.parametrize("format", FORMATS)
def test_every_shape_of_every_format(format: str, n: int, k: int, device: torch.device) -> None:
    """Each weight format in each shape; the activation formats take turns, so that each meets each shape, too."""
    turn = FORMATS.index(format) + ANY_SHAPE.index((n, k))
    activation = ACTIVATIONS[turn % len(ACTIVATIONS)]
    rows = (1, 2, 5, 37, 65, 130)[turn % 6]
    x, w = bf16_operands("loud_channels", rows, k, n, device)
    case = Case("triton", format, activation, ((n, k),))
    weight, bias = case.weight(w), torch.randn(n, device=device).bfloat16()
    case.check(F.linear(x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("format", FORMATS)
def test_every_pair_of_formats(format: str, activation: str | None, device: torch.device) -> None:
    case = Case("triton", format, activation, ((130, 232),))
    for kind in ("gaussian", "loud_channels"):
        x, w = bf16_operands(kind, 37, 232, 130, device)
        weight, bias = quantized(w, format, activation), torch.randn(130, device=device).bfloat16()
        assert explain(weight).chosen == "triton"
        case.check(F.linear(x, weight, bias), x, weight, bias)
        if activation is not None and kind == "gaussian":  # whose results fp16 holds
            case.check(F.linear(x.half(), weight), x.half(), weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", [None, "mxfp4", "nvfp4", "fp8_e4m3"])
@pytest.mark.parametrize("format", FORMATS)
def test_every_dtype_by_whichever_backend(
    format: str, activation: str | None, dtype: torch.dtype, device: torch.device
) -> None:
    for kind in DATA:
        x, w = operands(kind, 5, 256, 48)
        if dtype == torch.float16:
            w = w * 2**-14  # the sums of loud channels would leave fp16's range
        x, w = x.to(device, dtype), w.to(device, dtype)
        weight = quantized(w, format, activation)
        assert_product(F.linear(x, weight), activation64(x, activation), decode64(weight))


def test_the_reference_is_the_same_on_both_devices(device: torch.device) -> None:
    """What the tests here compare with is computed on the GPU; on a CPU it is the same, bit by bit."""
    x = torch.randn(40, 100) * torch.exp2(torch.randint(-100, 100, (40, 1)).float())
    for activation in ACTIVATIONS:
        assert torch.equal(activation64(x.to(device), activation).cpu(), activation64(x, activation))
    for format in FORMATS:
        weight = MXTensor.from_qdata(*_random_bytes(format), format, per_tensor_scale=_per_tensor_scale(format))
        moved = weight.to(device)
        assert torch.equal(decode64(moved.canonical()).cpu().nan_to_num(7), decode64(weight).nan_to_num(7))


def _random_bytes(format: str) -> tuple[Tensor, Tensor]:
    width, blocks = {"mxfp4": (64, 4), "nvfp4": (64, 8)}.get(format, (96, 4) if "mxfp6" in format else (128, 4))
    return tuple(torch.randint(0, 256, (256, columns), dtype=torch.uint8) for columns in (width, blocks))  # type: ignore


def _per_tensor_scale(format: str) -> Tensor | None:
    return torch.tensor(0.01) if format == "nvfp4" else None


# Strides and memory

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.mT.contiguous().mT,
    "every second column": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "every third row": lambda x: x.repeat_interleave(3, 0)[::3],
    "one row expanded": lambda x: x[:1].expand(5, -1),
    "columns of NaN around": lambda x: amid_poison(x),
    "off the alignment": lambda x: torch.cat([x.new_full((x.shape[0], 1), torch.nan), x], 1)[:, 1:],
    "last tokens": lambda x: torch.stack([x + 1, x], 1)[:, -1],
    "a vector": lambda x: x[0],
    "three axes": lambda x: x.view(2, -1, x.shape[1]).transpose(0, 1),
    "four axes": lambda x: x.view(2, 1, -1, x.shape[1]),
    "no rows": lambda x: x[:0],
    "no rows of three axes": lambda x: x[:0].view(2, 0, x.shape[1]),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("case", CASES)
def test_any_strides(case: Case, view: str, device: torch.device) -> None:
    n, k = case.shape
    x, w = bf16_operands("gaussian", 300, k, n, device)
    weight, bias = case.weight(w), torch.randn(n, device=device).bfloat16()
    for rows in (6, 300):
        seen = VIEWS[view](x[:rows])
        y = F.linear(seen, weight, bias)
        assert y.shape == (*seen.shape[:-1], n)
        case.check(y.reshape(-1, n), seen.reshape(-1, k), weight, bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", CASES)
def test_a_bias_of_any_stride_and_dtype(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    n, k = case.shape
    x, w = bf16_operands("gaussian", 300, k, n, device)
    weight, wide = case.weight(w), 30 * torch.randn(2 * n, device=device).to(dtype)
    for bias in (wide[::2], wide[:1].expand(n), amid_poison(wide[:n])):
        for rows in (6, 300):
            case.check(F.linear(x[:rows], weight, bias), x[:rows], weight, bias)


@pytest.mark.parametrize("byte", POISONS, ids=hex)
@pytest.mark.parametrize("case", CASES)
def test_poisoned_workspaces_do_not_show(case: Case, byte: int, device: torch.device) -> None:
    n, k = case.shape
    x, w = bf16_operands("gaussian", 300, k, n, device)
    weight, bias = case.weight(w), torch.randn(n, device=device).bfloat16()
    x[1, :32] *= 2.0**-60  # one row is repaired where there are repairs
    for rows in WAYS:
        expected = F.linear(x[:rows], weight, bias)
        with poisoned_workspaces(byte) as made:
            y = F.linear(x[:rows], weight, bias)
        assert torch.equal(y, expected)
        assert made, "no workspace was made by the means that poison it"


@pytest.mark.parametrize("byte", POISONS, ids=hex)
@pytest.mark.parametrize("case", CASES)
def test_what_surrounds_an_operand_is_not_read(case: Case, byte: int, device: torch.device) -> None:
    """And in rows that end inside a block, a byte or a group of three bytes, what the rest of it holds."""
    n = case.shape[0]
    for k in [case.shape[1]] if case.is_tiled else [232, 101, 35]:
        x, w = bf16_operands("gaussian", 300, k, n, device)
        weight, bias = case.weight(w), torch.randn(n, device=device).bfloat16()
        hidden = weight_amid_poison(weight, byte)
        for rows in WAYS if case.is_tiled else (17,):
            y = F.linear(amid_poison(x[:rows], byte), hidden, amid_poison(bias, byte))
            case.check(y, x[:rows], weight, bias)


@pytest.mark.parametrize("format", FORMATS)
def test_slices_and_products_across_the_blocks(format: str, device: torch.device) -> None:
    case = Case("triton", format, None, ((48, 200),))
    w = torch.randn(48, 200, device=device).bfloat16()
    weight = case.weight(w)
    for part in (weight[5:30], weight[:, 64:], weight[:, 7:150]):
        x = torch.randn(4, part.shape[1], device=device).bfloat16()
        case.check(F.linear(x, part), x, part)
    grad = torch.randn(4, 48, device=device).bfloat16()
    assert_product(grad @ weight, grad.double(), decode64(weight).mT)


@pytest.mark.parametrize("case", CASES)
def test_gradients_pass(case: Case, device: torch.device) -> None:
    """To the input, across the blocks: by another backend, where this one was not named but chosen."""
    n, k = case.shape
    x, w = bf16_operands("gaussian", 9, k, n, device)
    weight, grad = case.weight(w, "auto"), torch.randn(9, n, device=device).bfloat16()
    x.requires_grad_()
    F.linear(x, weight).backward(grad)
    assert x.grad is not None
    assert_product(x.grad, grad.double(), decode64(weight.canonical()).mT)


# The controls: each of these faults in what a backend is given fails the check

FAULTS: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor | None]]] = {
    "the bias dropped": lambda x, w, bias: (x, w, None),
    "an element of x dropped": lambda x, w, bias: (_changed(x, slice(5, 6), 0), w, bias),
    "a block dropped": lambda x, w, bias: (x, _changed(w, slice(32, 64), 0), bias),
    "a scale of the weight off by one": lambda x, w, bias: (x, _changed(w, slice(32, 64), 2), bias),
    "another order of rows": lambda x, w, bias: (x.roll(1, 0), w, bias),
    "another order of columns": lambda x, w, bias: (x.roll(1, 1), w, bias),
    "an unwritten row": lambda x, w, bias: (x.index_fill(0, x.new_tensor([2], dtype=torch.long), torch.nan), w, bias),
}


def _changed(x: Tensor, columns: slice, factor: float) -> Tensor:
    x = x.clone()
    x[:, columns] *= factor
    return x


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("case", CASES)
def test_the_check_notices(case: Case, fault: str, device: torch.device) -> None:
    n, k = case.shape
    for rows in (5, 65, 300):
        x, w = bf16_operands("gaussian", rows, k, n, device)
        bias = torch.randn(n, device=device).bfloat16()
        faulty_x, faulty_w, faulty_bias = FAULTS[fault](x, w, bias)
        y = F.linear(faulty_x, case.weight(faulty_w), faulty_bias)
        with pytest.raises(AssertionError, match="times what is allowed"):
            case.check(y, x, case.weight(w), bias)


@pytest.mark.parametrize("case", [case for case in CASES if case.values[0].activation is not None])
def test_the_check_notices_activations_that_were_not_quantized(case: Case, device: torch.device) -> None:
    n, k = case.shape
    x, w = bf16_operands("gaussian", 65, k, n, device)
    weight = case.weight(w)
    with pytest.raises(AssertionError, match="times what is allowed"):
        case.check(F.linear(x, quantized(w, case.format)), x, weight)
