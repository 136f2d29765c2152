"""The packed layout: as many bytes as the canonical one, and the same bytes back; or the weight does not fit."""

import pytest
import torch
from torch import Tensor

from mxquant.formats import FORMATS, quantize_blocks
from mxquant.kernels.mxfp4_sm90.layout import E4M3_SPAN, pack_weight, unpack_weight


def canonical(*shape: int, spread: int = 5) -> tuple[Tensor, Tensor]:
    """Codes and scales of random values whose blocks' exponents differ, with zero blocks and a zero row."""
    w = torch.randn(*shape).unflatten(-1, (-1, 32))
    w = w * torch.exp2(torch.randint(0, spread + 1, w.shape[:-1]).float()).unsqueeze(-1)
    w[..., :3, 1, :] = 0
    w[..., 7, :, :] = 0
    return quantize_blocks(w.flatten(-2), FORMATS["mxfp4"])


@pytest.mark.parametrize(
    "shape", [(64, 256), (192, 768), (3, 64, 512), (128, 288), (64, 448), (2, 64, 2880), (64, 384)], ids=str
)
def test_unpacking_gives_the_same_bytes(shape: tuple[int, ...]) -> None:
    qdata, scale = canonical(*shape)
    packed = pack_weight(qdata, scale)
    assert packed is not None
    w_packed, w_scale = packed
    assert w_packed.nbytes == qdata.nbytes
    assert w_scale.nbytes == scale.nbytes
    assert w_packed.shape[:-2] == w_scale.shape[:-2] == qdata.shape[:-2]
    back = unpack_weight(w_packed, w_scale, *shape[-2:])
    assert torch.equal(back[0], qdata)
    assert torch.equal(back[1], scale)


def test_every_code_at_every_position_of_a_word() -> None:
    codes = torch.randint(0, 256, (64, 128), dtype=torch.uint8)
    scale = torch.full((64, 8), 120, dtype=torch.uint8)
    packed = pack_weight(codes, scale)
    assert packed is not None
    assert torch.equal(unpack_weight(*packed, 64, 256)[0], codes)


@pytest.mark.parametrize("lowest", [0, 1, 100, 254 - E4M3_SPAN])
def test_exponent_spans_that_fit(lowest: int) -> None:
    """Exponents of one row up to E4M3_SPAN apart, wherever they lie; one more does not fit."""
    qdata = torch.full((64, 128), 0x22, dtype=torch.uint8)
    scale = torch.randint(lowest, lowest + E4M3_SPAN + 1, (64, 8)).to(torch.uint8)
    scale[5, 0], scale[5, 1] = lowest, lowest + E4M3_SPAN
    packed = pack_weight(qdata, scale)
    assert packed is not None
    assert torch.equal(unpack_weight(*packed, 64, 256)[1], scale)
    if lowest:
        scale[5, 0] -= 1
        assert pack_weight(qdata, scale) is None


@pytest.mark.parametrize("byte, fits", [(0, True), (94, True), (93, False), (121, False), (255, False)])
def test_scale_bytes_of_zero_blocks_that_fit(byte: int, fits: bool) -> None:
    """0, or within reach of the row's largest (120): another tool's byte must come back, not be replaced."""
    qdata = torch.full((64, 128), 0x22, dtype=torch.uint8)
    scale = torch.full((64, 8), 120, dtype=torch.uint8)
    qdata[9, :16], scale[9, 0] = 0, byte
    packed = pack_weight(qdata, scale)
    assert (packed is not None) == fits
    if packed is not None:
        assert torch.equal(unpack_weight(*packed, 64, 256)[1], scale)


def test_nan_does_not_fit() -> None:
    qdata, scale = canonical(64, 256)
    scale[3, 2] = 255
    assert pack_weight(qdata, scale) is None
