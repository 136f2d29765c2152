"""Slices of packed codes, on and off the borders of blocks."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from matmul_reference import BLOCK, FORMATS, activation64, assert_product, decode64, quantized, same_bytes

from mxquant import MXTensor, quantize


@pytest.mark.parametrize("format", FORMATS)
def test_every_column_slice_decodes_to_the_slice_of_the_whole(format: str) -> None:
    """Every start, many lengths: a slice off a border remembers where in its block it starts."""
    k = 72
    weight = quantize(torch.randn(3, k), format)
    plain = weight.dequantize()
    for start in range(k):
        for stop in {start, start + 1, start + 3, start + 16, start + 33, k}:
            part = weight[:, start:stop]
            assert part.shape == plain[:, start:stop].shape
            assert torch.equal(part.dequantize(), plain[:, start:stop]), (start, stop)


@pytest.mark.parametrize("format", FORMATS)
def test_block_offset_counts_from_the_border_of_the_block(format: str) -> None:
    weight = quantize(torch.randn(3, 72), format)
    for start in range(72):
        assert weight[:, start:].metadata.block_offset == start % BLOCK[format]


@pytest.mark.parametrize("format", FORMATS)
def test_slices_of_slices(format: str) -> None:
    weight = quantize(torch.randn(3, 100), format)
    plain = weight.dequantize()
    for a, b, c, d in [(5, 90, 3, 60), (31, 100, 1, 34), (32, 96, 17, 20), (1, 99, 15, 98), (40, 80, 24, 40)]:
        assert torch.equal(weight[:, a:b][:, c:d].dequantize(), plain[:, a:b][:, c:d])
    assert torch.equal(weight[1:, 7:][:, 9:].t()[4:].dequantize(), plain[1:, 7:][:, 9:].t()[4:])


@pytest.mark.parametrize("format", FORMATS)
def test_out_of_range_slices_clamp_as_in_torch(format: str) -> None:
    weight = quantize(torch.randn(3, 40), format)
    plain = weight.dequantize()
    for index in [slice(-8, None), slice(30, 200), slice(-300, 5), slice(50, 60), slice(20, 10)]:
        part = weight[:, index]
        assert part.shape == plain[:, index].shape
        assert torch.equal(part.dequantize(), plain[:, index])
        assert torch.equal(weight[index].dequantize(), plain[index])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("start", [1, 7, 16, 31, 33])
def test_weight_only_products_are_exact_off_a_border(format: str, start: int) -> None:
    weight = quantized(torch.randn(5, 100), format)
    x = torch.randn(3, 60)
    w64 = decode64(weight)[:, start : start + 60]
    assert_product(F.linear(x, weight[:, start : start + 60]), x.double(), w64)
    with pytest.raises(AssertionError):
        assert_product(F.linear(x, weight[:, start : start + 60]), x.double(), decode64(weight)[:, :60])


@pytest.mark.parametrize("format", FORMATS)
def test_quantized_activations_on_a_border(format: str) -> None:
    weight = quantized(torch.randn(5, 100), format, format)
    x = torch.randn(3, 68)
    assert_product(F.linear(x, weight[:, 32:]), activation64(x, format), decode64(weight)[:, 32:])


@pytest.mark.parametrize("format", FORMATS)
def test_quantized_activations_off_a_border_are_refused_with_the_sizes_that_work(format: str) -> None:
    """Blocks of the activations and of the weight would not coincide: refused, with the multiple that works."""
    weight = quantized(torch.randn(5, 100), format, format)
    part = weight[:, 7:47]
    with pytest.raises(ValueError, match=rf"(?s)7.*{BLOCK[format]}|{BLOCK[format]}.*7"):
        F.linear(torch.randn(3, 40), part)


@pytest.mark.parametrize("activation", ["fp8_e4m3", "fp8_e5m2"])
def test_row_scaled_activations_work_on_any_slice(activation: str) -> None:
    """One scale a row has no blocks to coincide with, so the product either is exact or is refused by name."""
    weight = quantized(torch.randn(5, 100), "mxfp4", activation)
    x = torch.randn(3, 40)
    try:
        y = F.linear(x, weight[:, 7:47])
    except ValueError as error:
        assert "32" in str(error)  # noqa: PT017
    else:
        assert_product(y, activation64(x, activation), decode64(weight)[:, 7:47])


@pytest.mark.parametrize("format", FORMATS)
def test_a_slice_off_a_border_can_be_saved_and_cloned(format: str) -> None:
    from mxquant import flatten_state_dict, unflatten_state_dict

    part = quantize(torch.randn(5, 100), format)[1:4, 7:60]
    assert torch.equal(part.clone().dequantize(), part.dequantize())
    back = unflatten_state_dict(*flatten_state_dict({"w": part}))["w"]
    assert same_bytes(back, part) or torch.equal(back.dequantize(), part.dequantize())
    assert back.metadata.block_offset == 7


@pytest.mark.parametrize("format", FORMATS)
def test_a_saved_slice_does_not_hold_the_whole_tensor(format: str) -> None:
    """Rows and whole blocks outside of the slice are not dragged along into a file."""
    from mxquant import flatten_state_dict

    part = quantize(torch.randn(64, 256), format)[:2, 32:64]
    tensors, _ = flatten_state_dict({"w": part})
    alone, _ = flatten_state_dict({"w": quantize(torch.randn(2, 32), format)})
    assert {n: t.shape for n, t in tensors.items()} == {n: t.shape for n, t in alone.items()}


@pytest.mark.parametrize("format", FORMATS)
def test_parts_off_a_border_cannot_be_joined_along_k(format: str) -> None:
    """Two halves of a block have no common scale byte to stand under, unless they come back to a whole block."""
    weight = quantize(torch.randn(3, 64), format)
    with pytest.raises((ValueError, NotImplementedError), match="dequantize"):
        torch.cat([weight[:, 7:20], weight[:, 3:9]], dim=1)


@pytest.mark.parametrize("format", FORMATS)
def test_tensors_of_different_schemes_are_not_joined(format: str) -> None:
    weight = quantize(torch.randn(3, 64), format)
    other = quantize(torch.randn(3, 64), "mxfp4" if format != "mxfp4" else "mxfp8_e4m3")
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=f"{format}.*{other.format}|dequantize"):
        torch.cat([weight, other])
    with pytest.raises((ValueError, TypeError, NotImplementedError), match="dequantize"):
        torch.cat([weight, torch.randn(3, 64)])


@pytest.mark.parametrize("join", [torch.cat, torch.stack])
def test_weights_with_different_static_activation_scales_are_not_joined(join: Callable[..., MXTensor]) -> None:
    """One of two scales would be lost: the second part's activations would be saturated or flushed by the first's."""
    weight = quantize(torch.randn(2, 32), "nvfp4")
    a, b = (weight.with_activation("nvfp4", scale=torch.tensor(s)) for s in (0.5, 4.0))
    assert join([a, a]).activation_scale.item() == 0.5
    with pytest.raises((ValueError, NotImplementedError), match="activation"):
        join([a, weight.with_activation("nvfp4")])
    with pytest.raises((ValueError, NotImplementedError), match="activation"):
        torch.cat([a, b])


def test_static_activation_scales_of_a_stack_follow_their_matrices() -> None:
    scales = torch.tensor([0.5, 1.0, 2.0])
    matrices = [quantize(torch.randn(2, 32), "nvfp4").with_activation("nvfp4", scale=scale) for scale in scales]
    stack = torch.stack(matrices)
    assert stack.activation_scale.shape == stack.per_tensor_scale.shape == (3, 1, 1)
    ids = torch.tensor([2, 0])
    for part, expected in (
        (stack[1], scales[1]),
        (stack[ids], scales[ids]),
        (stack[1:], scales[1:]),
        (stack.mT[:, :, 1:], scales),
        (stack.index_select(0, ids), scales[ids]),
        (torch.cat([stack[:1], stack[1:]]), scales),
        (torch.stack(stack.unbind()), scales),
        (copy.deepcopy(stack), scales),
        (torch.empty_like(stack).copy_(stack), scales),
        (stack.with_activation("nvfp4", scale=scales), scales),
    ):
        assert torch.equal(part.activation_scale.flatten(), expected.flatten())
    assert torch.equal(stack.dequantize(), torch.stack([matrix.dequantize() for matrix in matrices]))
    with pytest.raises(ValueError, match="has one element, or 3, one for each matrix"):
        stack.with_activation("nvfp4", scale=torch.ones(2))
    with pytest.raises(ValueError, match="positive and finite"):
        stack.with_activation("nvfp4", scale=torch.tensor([0.5, 0.0, 1.0]))


def test_nvfp4_with_different_per_tensor_scales_is_joined_right_or_refused() -> None:
    """Each tensor has its own per-tensor scale: joined either exactly, or refused."""
    a, b = quantize(torch.randn(2, 32), "nvfp4"), quantize(100 * torch.randn(2, 32), "nvfp4")
    try:
        whole = torch.cat([a, b])
    except (ValueError, NotImplementedError) as error:
        assert "per_tensor_scale" in str(error) or "per-tensor scale" in str(error)  # noqa: PT017
    else:
        assert torch.equal(whole.dequantize(), torch.cat([a.dequantize(), b.dequantize()]))
