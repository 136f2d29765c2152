"""One small case a kernel, for compute-sanitizer: tiles that are not full, rows that end inside a block, last rows.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 1 \
        python -m pytest tests/gpu -m sanitize

Without its cache torch gives each tensor an allocation of its own size, so that one byte too far is seen. The results
are compared as everywhere, so the tests mean something without the sanitizer, too.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from matmul_reference import FORMATS
from native_cases import TENSOR_CORE_CASES, TRITON_CASES, Case, needs_gpu

from mxquant import ops, quantize
from mxquant.backends import Groups
from mxquant.formats import ACTIVATION_FORMATS, get_format, resolve_scale_mode
from mxquant.formats.block import dequantize_blocks
from mxquant.formats.block import quantize_blocks as quantize_twin
from mxquant.kernels import has_triton
from mxquant.ops import route
from mxquant.reference.fake_quantize import fake_quantize as fake_quantize_twin
from mxquant.reference.gated_activation import GatedActivation
from mxquant.reference.hadamard import hadamard
from mxquant.reference.rescale import Prologue
from mxquant.tensor import as_weight, grouped_product

pytestmark = [
    *needs_gpu,
    pytest.mark.sanitize,
    pytest.mark.skipif(not has_triton(), reason="needs triton"),
]


@pytest.mark.parametrize("format", FORMATS)
def test_quantize(format: str, device: torch.device) -> None:
    from mxquant.kernels.quantize.strided import quantize_blocks

    fmt = get_format(format)
    for x in (torch.randn(3, 32), torch.randn(5, 33).bfloat16(), torch.randn(70, 40).t(), torch.randn(3, 1100)):
        for ours, expected in zip(quantize_blocks(x.to(device), fmt), quantize_twin(x, fmt)):
            assert torch.equal(ours.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("format", FORMATS)
def test_quantize_whole_blocks(format: str, dtype: torch.dtype, device: torch.device) -> None:
    """Rotated and not, in programs that are not full."""
    from mxquant.kernels.quantize.strided import quantize_blocks

    fmt = get_format(format)
    one = {"per_tensor_scale": torch.ones((), device=device)} if fmt.per_tensor else {}
    for rows in (1, 3, 130):
        x = torch.randn(rows, 96).to(dtype)
        for rotation, expected in ((None, x), (fmt.block_size, hadamard(x, fmt.block_size or 0))):
            ours = quantize_blocks(x.to(device), fmt, rotation=rotation, **one)
            for mine, twin in zip(ours, quantize_twin(expected.to(device), fmt, **one)):
                assert torch.equal(mine, twin)


@pytest.mark.parametrize("columns", [32, 96, 416])
def test_prologue_with_a_rotation(columns: int, device: torch.device) -> None:
    from mxquant.kernels.mxfp4_sm90.activation import rescale_activation
    from mxquant.reference.rescale import rescale_to_fp8

    x = torch.randn(5, columns).bfloat16()
    x[3, 0] = torch.nan
    expected = hadamard(x, 32).bfloat16()
    assert torch.equal(ops.hadamard(x[:3].to(device), 32, torch.bfloat16).cpu(), expected[:3])
    for permute in (False, True):
        prologue = Prologue("even", rotated=True)
        values, scales, x_pre_quant = rescale_activation(x.to(device), prologue, permute=permute)
        twin, twin_scales = rescale_to_fp8(x, "even", permute=permute, rotated=True)
        assert torch.equal(values.cpu()[:3].float(), twin[:3].float())
        assert torch.equal(scales.cpu().nan_to_num(), twin_scales.nan_to_num())
        assert torch.equal(x_pre_quant.cpu()[3].nan_to_num(), expected[3].nan_to_num())


@pytest.mark.parametrize("columns", [32, 96, 416, 16640])
def test_prologue_with_a_gate(columns: int, device: torch.device) -> None:
    from mxquant.kernels.moe.gated_activation import gated_activation
    from mxquant.kernels.mxfp4_sm90.activation import rescale_activation

    for known, mode, turned in itertools.product(
        (GatedActivation(False), GatedActivation(True, 7.0, 1.702)), ("even", None), (False, True)
    ):
        if mode is None and turned:
            continue
        both = torch.randn(5, 2 * columns, device=device).bfloat16()
        both[3, 0] = torch.nan
        gated = gated_activation(both, known)
        values, scales, x_pre_quant = rescale_activation(both, Prologue(mode, turned, known), permute=True)
        expected, expected_scales, _ = rescale_activation(gated, Prologue(mode, turned), permute=True)
        assert torch.equal(values[:3].float(), expected[:3].float())
        assert torch.equal(scales.nan_to_num(), expected_scales.nan_to_num())
        kept = ops.hadamard(gated[3:4], 32, torch.bfloat16)[0] if turned else gated[3]
        assert torch.equal(x_pre_quant[3].nan_to_num(), kept.nan_to_num())


@pytest.mark.parametrize("format", FORMATS)
def test_expand(format: str, device: torch.device) -> None:
    from mxquant.kernels.quantize.dequantize import dequantize

    fmt = get_format(format)
    for rows, length, offset in ((1, 8, 0), (3, 35, 0), (5, 100, 7), (2, 4200, 0)):
        one = {"per_tensor_scale": torch.ones(())} if fmt.per_tensor else {}
        qdata, scale = quantize_twin(torch.randn(rows, offset + length), fmt, **one)
        expected = dequantize_blocks(qdata, scale, fmt, length, block_offset=offset, dtype=torch.bfloat16)
        ours = dequantize(qdata.to(device), scale.to(device), fmt, length, block_offset=offset, dtype=torch.bfloat16)
        assert torch.equal(ours.cpu(), expected)


@pytest.mark.parametrize("name", ACTIVATION_FORMATS)
def test_fake_quantize(name: str, device: torch.device) -> None:
    from mxquant.kernels.quantize.fake_quantize import fake_quantize

    fmt = get_format(name, activation=True)
    mode = resolve_scale_mode(fmt, None)
    static = None if fmt.scale_format == "e8m0" else torch.tensor(0.3)
    for shape in ((1, 8), (3, 35), (5, 1100), (1, 17000)):
        for scale in {None, static}:
            x = torch.randn(shape).bfloat16()
            ours = fake_quantize(x.to(device), fmt, mode, None if scale is None else scale.to(device), torch.bfloat16)
            for mine, expected in zip(ours, fake_quantize_twin(x, fmt, mode, scale, torch.bfloat16)):
                assert mine is None or torch.equal(mine.cpu(), expected)


@pytest.mark.parametrize("rows", [1, 17, 33, 65, 130, 257])
@pytest.mark.parametrize("case", [*TENSOR_CORE_CASES, *TRITON_CASES[:2]])
def test_products(case: Case, rows: int, device: torch.device) -> None:
    """Every way of every backend, K split and not, with a row to repair, x in the last rows of its allocation."""
    for n, k in ((64, 288), (128, 768)) if case.is_tiled else ((40, 96),):
        wide = torch.randn(rows + 1, k).bfloat16()
        wide[1, :32] *= 2.0**-60
        x, w = wide.to(device)[1:], torch.randn(n, k).bfloat16().to(device)
        weight, bias = case.weight(w), torch.randn(n).bfloat16().to(device)
        case.check(F.linear(x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("kernel", ["rescale mxfp4", "rescale bfloat16"])
def test_prologue(kernel: str, device: torch.device) -> None:
    from kernels.every_kernel import KERNELS, assert_same_bits

    for length in (96, 128, 384, 16384 + 96):
        for ours, expected in KERNELS[kernel](torch.randn(3, length).bfloat16().to(device), None):
            assert_same_bits(ours, expected)


@pytest.mark.parametrize("case", TENSOR_CORE_CASES)
def test_groups(case: Case, device: torch.device) -> None:
    """Few rows and many of each expert, rows of none, sums divided among programs, a rest of 256 columns."""
    for n, k, tokens in ((64, 288, 3), (192, 768, 70)):
        w = torch.randn(3, n, k, device=device).bfloat16()
        weights = as_weight(quantize(w, "mxfp4").with_activation(case.activation))
        x, ids = torch.randn(tokens, k).bfloat16().to(device), torch.randint(0, 4, (tokens, 2), device=device)
        routing = route(ids, 3)
        groups = Groups(routing.offsets_E, routing.token_S)
        y = grouped_product(x, weights, -1, groups, torch.randn(3, n).bfloat16().to(device))
        assert y.isfinite().all()
        assert not y[int(groups.offsets[-1]) :].any()


def test_to_the_experts_and_back(device: torch.device) -> None:
    from kernels.moe.test_routing import test_gates_are_those_of_the_twin, test_sums_are_those_of_the_twin

    test_sums_are_those_of_the_twin(40, torch.bfloat16, torch.float32, device)
    test_gates_are_those_of_the_twin(40, torch.bfloat16, GatedActivation(True, 7.0, 1.702), device)


def test_columns_in_turn(device: torch.device) -> None:
    from kernels.quantize.test_gptq_columns import test_bits_of_the_twin

    for size, rows in ((5, 33), (32, 1061), (1, 7)):
        test_bits_of_the_twin("nvfp4", size, rows, True, device)
