"""The rotation in registers gives the bits of `mxquant.reference.hadamard`."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.bits import bits
from mxquant.kernels.primitives.hadamard import hadamard_block
from mxquant.kernels.primitives.thread_block import fp32_values, load_block
from mxquant.reference.hadamard import hadamard

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

BLOCKS = 256


@triton.jit
def hadamard_kernel(x_ptr: tl.tensor, y_ptr: tl.tensor, SIZE: tl.constexpr, BLOCKS: tl.constexpr) -> None:
    block = tl.arange(0, BLOCKS)
    rotated = hadamard_block(fp32_values(load_block(x_ptr, block, SIZE), tl.float32))
    for i in tl.static_range(SIZE):
        tl.store(y_ptr + block * SIZE + i, rotated[i])


def in_registers(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    hadamard_kernel[(1,)](x.view(torch.int32), y, SIZE=x.shape[1], BLOCKS=x.shape[0])
    return y


@pytest.mark.parametrize("size", [16, 32])
def test_the_bits_of_the_twin(size: int, device: torch.device) -> None:
    x = torch.randn(BLOCKS, size) * torch.exp2(torch.randint(-30, 30, (BLOCKS, size)))
    x[0, 3], x[1, 5], x[2], x[3, :2] = torch.nan, torch.inf, 2.0**127, torch.tensor([torch.inf, -torch.inf])
    x[4], x[5] = torch.randn(size) * 2.0**-140, 0.0
    assert torch.equal(bits(in_registers(x.to(device))), bits(hadamard(x, size)))


@pytest.mark.parametrize("size", [16, 32])
def test_another_order_of_stages_gives_other_bits(size: int, device: torch.device) -> None:
    """The control: rotating places whose index has its bits reversed is the same matrix, summed in another order."""
    x = torch.randn(BLOCKS, size)
    width = size.bit_length() - 1
    reversed_bits = torch.tensor([int(f"{i:0{width}b}"[::-1], 2) for i in range(size)])
    another = hadamard(x[:, reversed_bits], size)[:, reversed_bits]
    torch.testing.assert_close(another, hadamard(x, size), rtol=0, atol=1e-5)  # of sums of 32 near 1, in fp32
    ours = in_registers(x.to(device))
    assert not torch.equal(bits(ours), bits(another))
    assert not torch.equal(bits(ours), bits(x))
