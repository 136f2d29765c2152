"""Every kernel against its twin, bit by bit: all recorded inputs, exponents far apart, poisoned memory, any strides."""

from collections.abc import Callable

import pytest
import torch
from conformance.vectors import input_tensor, keys
from poison import POISONS, amid_poison, poisoned_workspaces
from torch import Tensor

from kernels.every_kernel import KERNELS, assert_same_bits, modes_of, takes
from mxquant.formats import FORMATS, dequantize_blocks, quantize_blocks
from mxquant.kernels.mxfp4_sm90.activation import rescale_activation
from mxquant.kernels.mxfp4_sm90.exact_fallback import fixup
from mxquant.kernels.mxfp4_sm90.layout import pack_weight
from mxquant.reference.rescale import E5M2_SPAN, Prologue

# Overflow and NaN are wanted here; NumPy, which Triton's interpreter computes with, warns of them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

ON_GPU = torch.cuda.is_available()


def run(kernel: str, x: Tensor, mode: str | None = None) -> None:
    for ours, expected in KERNELS[kernel](x, mode or modes_of(kernel)[0]):
        assert_same_bits(ours, expected)


# Recorded inputs


def suites_by_kind() -> dict[str, list[str]]:
    """The names of the suites of one dtype and width, whose rows a kernel takes at once: it is the call that costs."""
    kinds: dict[str, list[str]] = {}
    for suite in keys("inputs"):
        kinds.setdefault(f"{suite.rpartition('.')[2]} x {input_tensor(suite).shape[1]}", []).append(suite)
    return kinds


SUITES = suites_by_kind()


@pytest.mark.parametrize("kind", SUITES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_recorded_inputs(kernel: str, kind: str, device: torch.device) -> None:
    """In every mode on a GPU; in the interpreter, which takes its time, ties and edges are, and a quarter of the rows
    of the longest suite.
    """
    suites = [input_tensor(suite) for suite in SUITES[kind]]
    x = torch.cat([rows if ON_GPU or len(rows) < 384 else rows[::4] for rows in suites]).to(device)
    if not takes(kernel, x):
        pytest.skip("a kernel for half-precision activations")
    modes = modes_of(kernel)
    for mode in modes if ON_GPU or kind == "bf16 x 32" else modes[1:2] or modes[:1]:
        run(kernel, x, mode)


def test_ties_and_edges_are_run_in_every_mode() -> None:
    assert not SUITES or {"ties.bf16", "edges.bf16"} <= set(SUITES["bf16 x 32"])


# Exponents


def spread(per: str, dtype: torch.dtype) -> Tensor:
    """[8, 128] with exponents up to 250 apart, between the elements of a block, its blocks, or the rows."""
    shape = {"element": (8, 128), "block": (8, 4), "row": (8, 1)}[per]
    exponents = torch.randint(-125, 126, shape)
    exponents[:, 0] = torch.where(torch.arange(8) % 2 == 0, -125, 125)
    exponents[:, -1] = -exponents[:, 0]
    if per == "block":
        exponents = exponents.repeat_interleave(32, 1)
    x = (1 + torch.rand(8, 128)) * torch.randn(8, 128).sign() * torch.exp2(exponents.float())
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kernel", KERNELS)
def test_exponents_up_to_250_apart(kernel: str, dtype: torch.dtype, device: torch.device) -> None:
    x = torch.cat([spread(per, dtype) for per in ("element", "block", "row")])
    assert x.isfinite().all()
    if not takes(kernel, x):
        pytest.skip("a kernel for half-precision activations")
    for mode in modes_of(kernel):
        run(kernel, x.to(device), mode)


@pytest.mark.parametrize("mode", FORMATS["mxfp4"].scale_modes)
def test_the_prologue_marks_exactly_the_rows_out_of_range(mode: str, device: torch.device) -> None:
    """One block far up and one `span` below it, the others zero."""
    spans = torch.tensor([0, 1, 14, 15, E5M2_SPAN - 1, E5M2_SPAN, E5M2_SPAN + 1, 32, 40, 122, 250])
    x = torch.zeros(len(spans), 128)
    x[:, 0], x[:, 64] = 2.0**125, torch.exp2(125 - spans.double()).float()
    x = x.bfloat16().to(device)
    values, scales, _ = rescale_activation(x, Prologue(mode), permute=False)
    in_range = spans <= E5M2_SPAN
    assert torch.equal(~scales.cpu().squeeze(1).isnan(), in_range)
    assert torch.equal(values.cpu()[in_range].double() * scales.cpu()[in_range].double(), x.cpu()[in_range].double())


@pytest.mark.parametrize("span", [29, 60, 122, 250])
def test_fixup_of_rows_of_any_span_is_exact(span: int, device: torch.device) -> None:
    """Half of the weight's rows see only the small block, so that each is measured by itself."""
    x, w = torch.randn(33, 256), torch.randn(64, 256)
    x[:, :32] *= 2.0 ** -min(span, 125)
    x[:, 32:] *= 2.0 ** max(0, span - 125)
    w[::2, 32:] = 0
    w[1::2, :32] = 0
    w[1::2] *= 2.0**-10
    x = x.bfloat16()
    packed = pack_weight(*quantize_blocks(w, FORMATS["mxfp4"]))
    assert packed is not None
    _, scales, _ = rescale_activation(x.to(device), Prologue("even"), permute=False)
    assert scales.isnan().all()
    y = torch.full((33, 64), torch.nan, device=device)
    fixup(y, amid_poison(x.to(device)), *(t.to(device) for t in packed), None, scales, "even")
    x64, w64 = (
        dequantize_blocks(*quantize_blocks(t, FORMATS["mxfp4"]), FORMATS["mxfp4"], 256, dtype=torch.float64)
        for t in (x, w)
    )
    # 8 exact block sums, each scaled and added in fp32; at 2^-125 a product's last bits may be subnormal.
    bound = 12 * 2.0**-24 * (x64.abs() @ w64.abs().mT) + 2.0**-148
    assert ((y.cpu().double() - x64 @ w64.mT).abs() <= bound).all()


# Memory and strides


@pytest.mark.parametrize("byte", POISONS, ids=hex)
@pytest.mark.parametrize("kernel", KERNELS)
def test_poisoned_workspaces_do_not_show(kernel: str, byte: int, device: torch.device) -> None:
    for rows, columns in ((5, 128), (3, 96), (3, 35), (1, 1100)):
        x = torch.randn(rows, columns).bfloat16().to(device)
        if takes(kernel, x):
            with poisoned_workspaces(byte) as made:
                pairs = list(KERNELS[kernel](x, modes_of(kernel)[0]))
            assert made, "no workspace was made by the means that poison it"
            for ours, expected in pairs:
                assert_same_bits(ours, expected)


def test_an_unwritten_byte_would_show(device: torch.device) -> None:
    """The control: what is made without values holds the poison, whoever makes it."""
    with poisoned_workspaces(0x7F):
        made = torch.empty(3, dtype=torch.uint8, device=device), torch.ones(2, device=device).new_empty(4)
        alike = torch.empty_like(made[0])
    assert made[0].tolist() == alike.tolist() == [0x7F] * 3
    assert made[1].view(torch.int32).tolist() == [0x7F7F7F7F] * 4
    assert torch.ones(2).new_empty(4).shape == (4,)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "NaN around": lambda x: amid_poison(x),
    "large numbers around": lambda x: amid_poison(x, 0x7F),
    "every third row": lambda x: x.repeat_interleave(3, 0)[::3],
    "one row expanded": lambda x: x[:1].expand(5, -1),
    "off the alignment": lambda x: torch.cat([x.new_full((x.shape[0], 1), torch.nan), x], 1)[:, 1:],
    "transposed": lambda x: x.t().contiguous().t(),
    "every second column": lambda x: x.repeat_interleave(2, 1)[:, ::2],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_any_strides_amid_anything(kernel: str, view: str, device: torch.device) -> None:
    """Rows that end inside a block, tiles that are not full, and NaN beyond both."""
    for rows, columns in ((5, 128), (3, 35), (3, 1100)):
        x = VIEWS[view](torch.randn(rows, columns).bfloat16().to(device))
        if takes(kernel, x) and not (kernel.startswith("rescale") and x.stride(1) != 1):
            run(kernel, x)


@pytest.mark.parametrize("kernel", KERNELS)
def test_another_input_is_noticed(kernel: str, device: torch.device) -> None:
    """The control of all the above: one element twice as large as its block's largest."""
    x = torch.randn(4, 128).bfloat16()
    other = x.clone()
    other[2, 40] = 2 * x[2].abs().max()
    ours, expected = (list(KERNELS[kernel](t, modes_of(kernel)[0])) for t in (x.to(device), other))
    assert not all(torch.equal(mine.cpu(), theirs) for (mine, _), (_, theirs) in zip(ours, expected))
