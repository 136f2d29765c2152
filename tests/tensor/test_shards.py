"""quantize(shard(W)) == shard(quantize(W)), byte for byte, where the borders are borders of blocks."""

import pytest
import torch
from matmul_reference import FORMATS, same_bytes

from mxquant import MXTensor, quantize

MX_FORMATS = tuple(f for f in FORMATS if f != "nvfp4")


def quantize_shard(shard: torch.Tensor, whole: MXTensor, **options: object) -> MXTensor:
    """A shard alone; NVFP4 needs the per-tensor scale of the whole."""
    return quantize(shard, whole.format, per_tensor_scale=whole.per_tensor_scale, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("ways", [2, 4, 8])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("format", FORMATS)
def test_quantizing_shards_of_a_matrix_gives_shards_of_the_quantized_one(format: str, dim: int, ways: int) -> None:
    w = torch.randn(16, 256, dtype=torch.bfloat16)
    whole = quantize(w, format)
    for shard, part in zip(w.chunk(ways, dim), whole.chunk(ways, dim)):
        assert part.metadata.block_offset == 0
        assert same_bytes(quantize_shard(shard, whole), part)


@pytest.mark.parametrize("mode", ["floor", "even", "ceil", "rceil"])
@pytest.mark.parametrize("format", MX_FORMATS)
def test_shards_in_every_scale_mode(format: str, mode: str) -> None:
    w = torch.randn(4, 128)
    whole = quantize(w, format, scale_mode=mode)
    for shard, part in zip(w.split(32, 1), whole.split(32, 1)):
        assert same_bytes(quantize(shard, format, scale_mode=mode), part)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("format", FORMATS)
def test_shards_of_stacked_experts(format: str, dim: int) -> None:
    w = torch.randn(4, 6, 64)
    whole = quantize(w, format)
    for shard, part in zip(w.chunk(2, dim), whole.chunk(2, dim)):
        assert same_bytes(quantize_shard(shard, whole), part)


@pytest.mark.parametrize("format", FORMATS)
def test_shards_of_a_tensor_blocked_along_another_axis(format: str) -> None:
    """K before N: rows of the logical weight are its blocked axis."""
    w = torch.randn(128, 8)
    whole = quantize(w, format, axis=0)
    for shard, part in zip(w.chunk(4), whole.chunk(4)):
        assert same_bytes(quantize_shard(shard, whole, axis=0), part)


@pytest.mark.parametrize("format", FORMATS)
def test_the_last_shard_may_end_in_a_partial_block(format: str) -> None:
    w = torch.randn(4, 232)
    whole = quantize(w, format)
    assert same_bytes(quantize_shard(w[:, 128:], whole), whole[:, 128:])
    assert same_bytes(quantize_shard(w[:, :128], whole), whole[:, :128])


@pytest.mark.parametrize("ways, width", [(2, 1440), (4, 720), (8, 360)])
def test_a_shard_inside_a_block_keeps_its_values_and_its_offset(ways: int, width: int) -> None:
    """gpt-oss has 2880: halves fall on a border of 32, quarters and eighths do not and keep their offset."""
    w = torch.randn(2, 2880)
    whole = quantize(w, "mxfp4")
    for i, part in enumerate(whole.split(width, 1)):
        assert torch.equal(part.dequantize(), whole.dequantize()[:, i * width : (i + 1) * width])
        assert part.metadata.block_offset == i * width % 32
        assert part.scale.shape[-1] == -(-(part.metadata.block_offset + width) // 32)


def test_nvfp4_shards_need_the_per_tensor_scale_of_the_whole() -> None:
    """The control: without the whole tensor's scale the bytes differ, so the argument above is not idle."""
    w = torch.randn(4, 64)
    w[0, 0] = 50
    whole = quantize(w, "nvfp4")
    assert not torch.equal(quantize(w[2:], "nvfp4").scale, whole[2:].scale)
    assert same_bytes(quantize_shard(w[2:], whole), whole[2:])
