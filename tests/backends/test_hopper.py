"""The packed layout of stacks."""

import pytest
import torch

from mxquant.backends.hopper import PackedLayout
from mxquant.formats import FORMATS, quantize_blocks
from mxquant.kernels.mxfp4_sm90.layout import pack_weight

MXFP4 = FORMATS["mxfp4"]


@pytest.mark.parametrize("shape", [(64, 256), (3, 64, 288), (2, 2, 128, 448)], ids=str)
def test_stacks_are_packed_matrix_by_matrix(shape: tuple[int, ...]) -> None:
    qdata, scale = quantize_blocks(torch.randn(shape), MXFP4)
    packed = PackedLayout().pack(qdata, scale, MXFP4)
    whole = pack_weight(qdata, scale)
    assert packed is not None
    assert whole is not None
    for ours, expected in zip(packed, whole):
        assert torch.equal(ours, expected)
    for back, original in zip(PackedLayout().unpack(*packed, MXFP4, shape), (qdata, scale)):
        assert torch.equal(back, original)


def test_a_stack_does_not_fit_if_one_of_its_matrices_does_not() -> None:
    w = torch.randn(3, 64, 256)
    w[1, 5, :32] *= 2.0**-20
    assert PackedLayout().pack(*quantize_blocks(w, MXFP4), MXFP4) is None
