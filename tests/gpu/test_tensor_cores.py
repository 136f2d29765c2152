"""What is special to the kernels on tensor cores: which weights they take, their layout, their bounds."""

import pytest
import torch
import torch.nn.functional as F
from matmul_reference import activation64, decode64, operands
from native_cases import TENSOR_CORE_CASES, Case, needs_gpu

from mxquant import explain, quantize

pytestmark = needs_gpu


@pytest.mark.parametrize("case", TENSOR_CORE_CASES)
def test_chosen_where_it_was_not_named(case: Case, device: torch.device) -> None:
    for n, k in case.shapes:
        weight = case.weight(torch.randn(n, k, device=device).bfloat16(), "auto")
        assert explain(weight).chosen == case.backend


@pytest.mark.parametrize("case", TENSOR_CORE_CASES)
def test_shapes_that_are_no_whole_tiles_go_to_another_backend(case: Case, device: torch.device) -> None:
    for n, k in ((65, 256), (40, 256), (64, 128), (64, 96), (130, 232)):
        weight = case.weight(torch.randn(n, k, device=device).bfloat16(), "auto")
        assert explain(weight).chosen == "triton"
        x = torch.randn(5, k, device=device).bfloat16()
        case.check(F.linear(x, weight), x, weight)


@pytest.mark.parametrize("case", TENSOR_CORE_CASES)
def test_weights_that_do_not_fit_go_to_another_backend(case: Case, device: torch.device) -> None:
    w = torch.randn(128, 512)
    w[:, :32] *= 2.0**-20
    w = w.bfloat16().to(device)
    weight, x = case.weight(w, "auto"), torch.randn(5, 512, device=device).bfloat16()
    assert explain(weight).chosen == "triton"
    case.check(F.linear(x, weight), x, weight)
    with pytest.raises(ValueError, match="does not fit"):
        case.weight(w)


@pytest.mark.parametrize("case", TENSOR_CORE_CASES)
def test_prepared_weights_save_and_slice_as_canonical_bytes(case: Case, device: torch.device) -> None:
    w = torch.randn(128, 512, device=device).bfloat16()
    plain, weight = quantize(w, "mxfp4"), case.weight(w, "auto")
    assert weight.metadata.layout == "mxfp4_tiles"
    assert weight.nbytes == plain.nbytes
    for part in (weight.canonical(), weight.cpu().canonical()):
        assert torch.equal(part.qdata.cpu(), plain.qdata.cpu())
        assert torch.equal(part.scale.cpu(), plain.scale.cpu())
    assert torch.equal(weight[64:].dequantize(), plain[64:].dequantize())
    x = torch.randn(3, 512, device=device).bfloat16()
    case.check(F.linear(x, weight[64:]), x, weight[64:])


@pytest.mark.parametrize("case", TENSOR_CORE_CASES)
def test_a_row_does_not_depend_on_its_batch_mates(case: Case, device: torch.device) -> None:
    """Within one kernel's tile, bit by bit; a mate that has to be repaired changes the order of sums, no more."""
    x, w = torch.randn(16, 512, device=device).bfloat16(), torch.randn(64, 512, device=device).bfloat16()
    weight = case.weight(w)
    clean = F.linear(x, weight)
    assert torch.equal(clean[3], F.linear(x[3:4], weight)[0])
    x[5, :32] *= 2.0**-60
    others = [row for row in range(16) if row != 5]
    case.check(F.linear(x, weight)[others], x[others], weight)


@pytest.mark.parametrize("rows", [16, 64, 200, 700])
@pytest.mark.parametrize("case", TENSOR_CORE_CASES[:1])
def test_where_single_products_rule(case: Case, rows: int, device: torch.device) -> None:
    """Both operands over a uniform variable: tails without a mean. FP8 tensor cores align 32 products to the largest
    with 14 bits, which no promotion mends: 2.2e-3 of |x| |w|^T was the most seen, twice that is granted.
    """
    x, w = (t.bfloat16().to(device) for t in operands("heavy_tailed", rows, 768, 192))
    weight = case.weight(w)
    x64, w64 = activation64(x, "mxfp4"), decode64(weight.canonical())
    error = (F.linear(x, weight).double() - x64 @ w64.mT).abs() - 2**-8 * (x64 @ w64.mT).abs()
    assert (error <= 4.4e-3 * (x64.abs() @ w64.abs().mT)).all()
