"""Shape operations on packed codes: each equals the same operation on the dequantized tensor, and tells the truth."""

from collections.abc import Callable

import pytest
import torch
from matmul_reference import FORMATS, dense, quantized, same_bytes
from torch import Tensor

from mxquant import MXTensor, quantize

View = Callable[[Tensor], Tensor]

# K = 72 is two whole blocks and a partial one of every format.
MATRIX_VIEWS: dict[str, View] = {
    "t()": lambda w: w.t(),
    "T": lambda w: w.T,
    "mT": lambda w: w.mT,
    "t().t()": lambda w: w.t().t(),
    "transpose": lambda w: w.transpose(0, 1),
    "transpose, negative": lambda w: w.transpose(-1, -2),
    "permute": lambda w: w.permute(1, 0),
    "permute, identity": lambda w: w.permute(0, 1),
    "swapaxes": lambda w: w.swapaxes(0, 1),
    "row slice": lambda w: w[2:5],
    "row slice with a step": lambda w: w[::2],
    "one row, kept": lambda w: w[3:4],
    "narrow rows": lambda w: w.narrow(0, 1, 4),
    "one row": lambda w: w[3],
    "select": lambda w: w.select(0, -1),
    "rows by index": lambda w: w[torch.tensor([4, 0, 4])],
    "index_select": lambda w: w.index_select(0, torch.tensor([5, 1])),
    "rows by mask": lambda w: w[torch.tensor([True, False, True, False, False, True])],
    "unsqueeze": lambda w: w.unsqueeze(0),
    "unsqueeze in the middle": lambda w: w.unsqueeze(1),
    "unsqueeze and squeeze": lambda w: w.unsqueeze(1).squeeze(1),
    "expand": lambda w: w.unsqueeze(0).expand(3, -1, -1),
    "expand, no change": lambda w: w.expand(-1, -1),
    "view, same shape": lambda w: w.view(6, 72),
    "view with -1": lambda w: w.view(-1, 72),
    "split rows by view": lambda w: w.view(2, 3, 72),
    "split rows by reshape": lambda w: w.reshape(3, 2, -1),
    "unflatten": lambda w: w.unflatten(0, (2, 3)),
    "unflatten and flatten": lambda w: w.unflatten(0, (2, 3)).flatten(0, 1),
    "column slice of t()": lambda w: w.t()[:, 1:3],
    "row slice of t()": lambda w: w.t()[32:64],
    "slice on block borders": lambda w: w[:, 32:64],
    "slice to the partial block": lambda w: w[:, 32:],
    "contiguous": lambda w: w.contiguous(),
    "clone": lambda w: w.clone(),
    "detach": lambda w: w.detach(),
    "alias": lambda w: w[...],
    "full slice": lambda w: w[:],
    "t() made contiguous": lambda w: w.t().contiguous(),
    "rows by a list": lambda w: w[[0, 2]],
    "rows by a matrix of indices": lambda w: w[torch.tensor([[0, 1], [2, 3]])],
    "columns of one row": lambda w: w[0, 3:50],
    "new axis": lambda w: w[None],
    "vstack": lambda w: torch.vstack([w, w]),
    "broadcast_to": lambda w: torch.broadcast_to(w, (2, 6, 72)),
}

STACK_VIEWS: dict[str, View] = {
    "one expert": lambda w: w[1],
    "last expert": lambda w: w[-1],
    "experts by index": lambda w: w[torch.tensor([2, 0])],
    "expert slice": lambda w: w[1:],
    "rows of every expert": lambda w: w[:, 1:3],
    "columns of every expert": lambda w: w[..., 32:64],
    "mT": lambda w: w.mT,
    "transpose(1, 2)": lambda w: w.transpose(1, 2),
    "transpose(0, 1)": lambda w: w.transpose(0, 1),
    "permute": lambda w: w.permute(2, 0, 1),
    "permute and back": lambda w: w.permute(2, 0, 1).permute(1, 2, 0),
    "flatten experts": lambda w: w.flatten(0, 1),
    "reshape": lambda w: w.reshape(12, 72),
    "flatten and view": lambda w: w.view(12, 72).view(3, 4, 72),
    "one expert transposed": lambda w: w.mT[2],
    "index_select": lambda w: w.index_select(1, torch.tensor([3, 3])),
    "one row of one expert": lambda w: w[2, 1],
    "rows of one expert by index": lambda w: w[1, torch.tensor([2, 0])],
    "rows of every expert by index": lambda w: w[:, torch.tensor([2, 0])],
    "movedim": lambda w: w.movedim(0, 1),
    "narrow, squeeze": lambda w: w.narrow(0, 1, 1).squeeze(0),
    "transpose, reshape, unflatten": lambda w: w.transpose(0, 1).reshape(-1, 72).unflatten(0, (4, 3)),
}


def check_view(view: View, weight: MXTensor) -> None:
    plain = weight.dequantize()
    expected, result = view(plain), view(weight)
    assert isinstance(result, MXTensor)
    assert type(result) is type(weight)
    assert result.shape == expected.shape
    assert torch.equal(result.dequantize(), expected)
    assert result.dtype == plain.dtype
    assert (result.activation, result.format) == (weight.activation, weight.format)
    assert result.numel() == expected.numel()
    # Strides are those of a dense tensor with the blocked axis innermost, and contiguity agrees with them.
    axis = result.axis
    laid_out = expected.movedim(axis, -1).contiguous().movedim(-1, axis)
    assert result.stride() == laid_out.stride()
    assert result.is_contiguous() == laid_out.is_contiguous()


@pytest.mark.parametrize("view", MATRIX_VIEWS)
@pytest.mark.parametrize("format", FORMATS)
def test_matrix_views(format: str, view: str) -> None:
    check_view(MATRIX_VIEWS[view], quantized(torch.randn(6, 72), format, format))


@pytest.mark.parametrize("view", STACK_VIEWS)
@pytest.mark.parametrize("format", FORMATS)
def test_views_of_stacked_weights(format: str, view: str) -> None:
    check_view(STACK_VIEWS[view], quantized(torch.randn(3, 4, 72), format, format))


@pytest.mark.parametrize("format", FORMATS)
def test_chunk_split_and_unbind(format: str) -> None:
    weight = quantized(torch.randn(6, 72), format)
    plain = weight.dequantize()
    pairs = {
        "chunk": (weight.chunk(3), plain.chunk(3)),
        "split": (weight.split(4), plain.split(4)),
        "split by sizes": (weight.split([1, 2, 3]), plain.split([1, 2, 3])),
        "tensor_split": (weight.tensor_split(4), plain.tensor_split(4)),
        "chunk columns": (weight.chunk(2, dim=1), plain.chunk(2, dim=1)),
        "split columns": (weight.split(32, dim=-1), plain.split(32, dim=-1)),
        "unbind": (weight.unbind(), plain.unbind()),
        "unpacking": (tuple(weight), tuple(plain)),
    }
    for name, (parts, expected) in pairs.items():
        assert len(parts) == len(expected), name
        for part, other in zip(parts, expected):
            assert isinstance(part, MXTensor), name
            assert torch.equal(part.dequantize(), other), name


@pytest.mark.parametrize("format", FORMATS)
def test_cat_and_stack_of_parts_give_the_whole(format: str) -> None:
    """cat and stack copy codes: the whole comes back byte for byte, from rows and from whole blocks of columns."""
    weight = quantize(torch.randn(6, 72), format)
    assert same_bytes(torch.cat(weight.chunk(3)), weight)
    assert same_bytes(torch.cat(weight.split([1, 5])), weight)
    assert same_bytes(torch.cat(weight.split(32, dim=1), dim=1), weight)
    assert same_bytes(torch.stack(weight.unbind()), weight)
    assert same_bytes(torch.cat([weight.t()[:, :2], weight.t()[:, 2:]], dim=1).t(), weight)
    stacked = torch.stack([weight, weight])
    assert stacked.shape == (2, 6, 72)
    assert same_bytes(stacked[1], weight)


def test_a_single_tensor_can_be_concatenated() -> None:
    weight = quantize(torch.randn(6, 72), "mxfp4")
    assert same_bytes(torch.cat([weight]), weight)


@pytest.mark.parametrize("format", FORMATS)
def test_shape_stride_and_nbytes(format: str) -> None:
    """Logical shape, dense strides, and the bytes that are really held."""
    w = torch.randn(6, 72, dtype=torch.float16)
    weight = quantize(w, format)
    assert weight.shape == (6, 72)
    assert weight.stride() == (72, 1)
    assert weight.is_contiguous()
    assert weight.dtype == torch.float16
    assert weight.device == w.device
    assert weight.layout == torch.strided
    assert weight.ndim == weight.dim() == 2
    assert weight.numel() == 6 * 72
    assert len(weight) == 6
    real = weight.qdata.nbytes + weight.scale.nbytes
    if weight.per_tensor_scale is not None:
        real += weight.per_tensor_scale.nbytes
    assert weight.nbytes == real


@pytest.mark.parametrize(
    "format, bits", [("mxfp4", 4.25), ("mxfp6_e2m3", 6.25), ("mxfp6_e3m2", 6.25), ("mxfp8_e4m3", 8.25),
                     ("mxfp8_e5m2", 8.25), ("nvfp4", 4.5)],
)  # fmt: skip
def test_nbytes_is_the_bits_of_the_format(format: str, bits: float) -> None:
    weight = quantize(torch.randn(64, 256, dtype=torch.bfloat16), format)
    extra = 0 if weight.per_tensor_scale is None else weight.per_tensor_scale.nbytes
    assert (weight.nbytes - extra) * 8 == bits * weight.numel()


def test_nbytes_of_a_static_activation_scale_counts() -> None:
    weight = quantize(torch.randn(4, 64), "nvfp4")
    static = weight.with_activation("nvfp4", scale=torch.tensor(0.5))
    assert static.nbytes == weight.nbytes + 4


def test_views_of_rows_share_storage() -> None:
    """What is copied into a row slice is seen in the parent."""
    parent = quantize(torch.randn(6, 64), "mxfp4")
    rows = quantize(torch.randn(2, 64), "mxfp4")
    parent[2:4].copy_(rows)
    assert torch.equal(parent[2:4].dequantize(), rows.dequantize())
    parent.narrow(0, 0, 2).copy_(rows)
    assert torch.equal(parent[:2].dequantize(), rows.dequantize())
    parent[5].copy_(rows[0])
    assert torch.equal(parent[5].dequantize(), rows[0].dequantize())


@pytest.mark.parametrize("format", ["mxfp4", "mxfp6_e2m3", "mxfp8_e5m2"])
def test_views_of_block_columns_and_transposes_share_storage(format: str) -> None:
    parent = quantize(torch.randn(6, 128), format)
    block = quantize(torch.randn(6, 32), format)
    parent[:, 32:64].copy_(block)
    assert torch.equal(parent[:, 32:64].dequantize(), block.dequantize())
    row = quantize(torch.randn(1, 128), format)
    parent.t()[:, :1].copy_(row.t())
    assert torch.equal(parent[:1].dequantize(), row.dequantize())


def test_clone_shares_nothing() -> None:
    weight = quantize(torch.randn(4, 64), "nvfp4")
    copy = weight.clone()
    for inner in ("qdata", "scale", "per_tensor_scale"):
        assert getattr(copy, inner).data_ptr() != getattr(weight, inner).data_ptr()


@pytest.mark.parametrize("format", FORMATS)
def test_equal_compares_codes_and_scales(format: str) -> None:
    w = torch.randn(4, 64)
    weight = quantize(w, format)
    assert torch.equal(weight, weight)
    assert torch.equal(weight, quantize(w, format))
    assert torch.equal(weight.t(), quantize(w, format).t())
    other = weight.clone()
    other.qdata[0, 0] ^= 1
    assert not torch.equal(weight, other)
    assert not torch.equal(weight, weight[:3])


@pytest.mark.parametrize("format", FORMATS)
def test_new_zeros_is_quantized(format: str) -> None:
    zeros = quantize(torch.randn(4, 64), format).new_zeros((3, 40))
    assert zeros.shape == (3, 40)
    assert zeros.dtype == torch.float32
    assert dense(zeros).tolist() == torch.zeros(3, 40).tolist()


@pytest.mark.parametrize("make", [torch.empty_like, torch.zeros_like])
@pytest.mark.parametrize("format", FORMATS)
def test_empty_like_is_quantized_alike(format: str, make: Callable[[Tensor], Tensor]) -> None:
    weight = quantize(torch.randn(4, 72), format).with_activation(format)
    like = make(weight)
    assert isinstance(like, MXTensor)
    assert like.metadata == weight.metadata
    assert like.shape == weight.shape
    assert like.qdata.shape == weight.qdata.shape
    assert like.qdata.data_ptr() != weight.qdata.data_ptr()
    if make is torch.zeros_like:
        assert dense(like).tolist() == torch.zeros(4, 72).tolist()
