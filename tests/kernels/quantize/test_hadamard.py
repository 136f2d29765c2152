"""The kernel that rotates blocks gives the bits of `mxquant.reference.hadamard`."""

import pytest
import torch

from kernels.bits import bits
from mxquant.kernels.quantize.hadamard import hadamard
from mxquant.reference.hadamard import hadamard as twin

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [16, 32])
def test_every_dtype_and_stride(size: int, dtype: torch.dtype, to: torch.dtype, device: torch.device) -> None:
    x = torch.randn(3, 431, 2 * size).to(dtype)
    x[0, 1], x[0, 2, 3], x[0, 3, 5] = 0.0, torch.nan, torch.inf
    x[0, 4] = torch.finfo(torch.bfloat16).max
    expected = twin(x, size).to(to)
    for given in (x, x.transpose(1, 2).contiguous().transpose(1, 2)):
        ours = hadamard(given.to(device), size, to)
        assert torch.equal(bits(ours), bits(expected))
        assert ours.dtype == to
    assert hadamard(x[:0].to(device), size, to).shape == (0, 431, 2 * size)
    assert not torch.equal(bits(ours), bits(x.to(to)))
