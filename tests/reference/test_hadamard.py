"""The block Hadamard against the matrix of its definition."""

import pytest
import torch
from torch import Tensor

from mxquant.reference.hadamard import hadamard


def hadamard64(size: int) -> Tensor:
    """Sylvester's matrix by its definition: entry (i, j) is -1 to the number of bits that i and j have in common."""
    index = torch.arange(size)
    common = index[:, None] & index[None, :]
    bits = sum((common >> bit) & 1 for bit in range(6))
    return (1 - 2 * (bits % 2)).double() / size**0.5


@pytest.mark.parametrize("size", [16, 32])
def test_it_is_the_matrix_in_every_block(size: int) -> None:
    x = torch.randn(3, 5, 2 * size, dtype=torch.float64)
    expected = (x.view(-1, size) @ hadamard64(size)).view_as(x)
    torch.testing.assert_close(hadamard(x, size), expected, rtol=1e-13, atol=1e-13)  # fp64 sums of 32 terms
    # The control: blocks that begin elsewhere give something else.
    assert not torch.allclose(hadamard(x.roll(1, -1), size).roll(-1, -1), expected, atol=0.1)


@pytest.mark.parametrize("size", [16, 32])
def test_it_is_its_own_inverse(size: int) -> None:
    x = torch.randn(64, 4 * size)
    # Five stages, each rounding once, and a constant that is off by half an ulp, twice over.
    assert (hadamard(hadamard(x, size), size) - x).abs().max() <= 12 * 2**-24 * x.abs().max() * size**0.5
    assert torch.linalg.vector_norm(hadamard(x, size)).item() == pytest.approx(
        torch.linalg.vector_norm(x).item(), rel=1e-6
    )
    assert not torch.allclose(hadamard(x, size), x, atol=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_equal_values_give_equal_values_in_every_dtype_and_stride(dtype: torch.dtype) -> None:
    x = torch.randn(32, 64).to(dtype)
    expected = hadamard(x.float(), 32)
    assert expected.dtype == torch.float32
    assert torch.equal(hadamard(x, 32), expected)
    assert torch.equal(hadamard(x.t().contiguous().t(), 32), expected)
    assert torch.equal(torch.cat([hadamard(row, 32) for row in x.split(1)]), expected)


def test_compiled_gives_the_same_bits() -> None:
    x = torch.randn(16, 96)
    assert torch.equal(torch.compile(hadamard, fullgraph=True)(x, 32), hadamard(x, 32))


def test_an_outlier_is_spread() -> None:
    x = torch.zeros(1, 32)
    x[0, 5] = 8.0
    assert hadamard(x, 32).abs().unique().numel() == 1


def test_an_empty_batch() -> None:
    assert hadamard(torch.empty(0, 64), 32).shape == (0, 64)
