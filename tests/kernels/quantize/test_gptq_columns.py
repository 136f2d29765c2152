"""The kernel that rounds a block's columns in turn, against its twin.

Bit by bit where no product or sum is rounded; else a fused one, which a GPU has, tells them apart in the last bit.
"""

import pytest
import torch
from torch import Tensor

from mxquant.formats import WEIGHT_FORMATS, get_format
from mxquant.kernels.quantize.gptq_columns import ELEMENTS, gptq_columns
from mxquant.reference.gptq_columns import gptq_columns as twin

FORMATS = [name for name in WEIGHT_FORMATS if get_format(name).element.name in ELEMENTS]
SHAPES = [(32, 96), (16, 1), (5, 33), (1, 7)]


@pytest.mark.parametrize("per_column", [True, False])
@pytest.mark.parametrize(
    "name, size, rows", [*((name, 32, 1061) for name in FORMATS), *(("nvfp4", *shape) for shape in SHAPES)]
)
def test_bits_of_the_twin(name: str, size: int, rows: int, per_column: bool, device: torch.device) -> None:
    """Whole and partial blocks, any number of rows, one scale for the block and one for each column."""
    w = torch.randint(-512, 512, (size, rows)) / 64.0
    w[:, 0] *= 100  # saturates
    w[0] = 0.0
    # A part of a larger one, as it comes. Sparse and of whole numbers, so that no bits are lost.
    factor = (torch.randint(-1, 2, (2 * size, 2 * size)) * (torch.rand(2 * size, 2 * size) < 0.15)).float().triu(1)
    factor = (factor + torch.exp2(torch.randint(0, 2, (2 * size,))).diag())[:size, :size]
    unit = torch.exp2(torch.randint(-3, 2, (size if per_column else 1, rows)))
    if name == "nvfp4":
        unit = unit * 1.375
    unit = unit.expand(size, rows)
    element = get_format(name).element
    found = gptq_columns(w.to(device), unit.to(device), factor.to(device), element)
    expected = twin(w.clone(), unit, factor, element)
    for ours, wanted in zip(found, expected, strict=True):
        assert torch.equal(ours.cpu().view(torch.int32), wanted.view(torch.int32))
    if rows * size > 1000:  # the control: columns that are rounded each for itself
        apart = twin(w.clone(), unit, factor.diagonal().diag(), element)
        assert not torch.equal(apart[0], expected[0])


def correlated_factor(size: int) -> Tensor:
    x = torch.randn(4 * size, size) @ torch.randn(size, size)
    hessian = (x.T @ x).double()
    hessian += 0.01 * hessian.diagonal().mean() * torch.eye(size)
    return torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True).float()


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_codes_of_the_twin_on_ordinary_weights(name: str, device: torch.device) -> None:
    """But for those that the last bit decides, and what follows from them in their rows."""
    w, factor = torch.randn(32, 4096), correlated_factor(32)
    unit = (torch.rand(1, 4096) + 0.2).expand_as(w)
    element = get_format(name).element
    found = gptq_columns(w.to(device), unit.to(device), factor.to(device), element)
    expected = twin(w.clone(), unit, factor, element)
    # 32 sums a weight, each off by 2^-24 of some units, change a code of steps of half a unit for one weight in a
    # million; a row that has one counts with its 32.
    assert (found[0].cpu() != expected[0]).any(0).float().mean() < 1e-3
    same = (found[0].cpu() == expected[0]).all(0)
    scale = expected[1].abs().amax()
    assert (found[1].cpu() - expected[1])[:, same].abs().max() < 1e-4 * scale  # the same sums, over the same pivots
