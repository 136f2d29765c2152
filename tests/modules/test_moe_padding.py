"""Sizes that are multiples of no block or tile, with everything that lies beyond them poisoned."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from matmul_reference import FORMATS
from torch import Tensor

pytest.importorskip("transformers")

from experts_classes import EXPERTS, fill
from moe_reference import assert_block, block64, routing, run
from transformers import GptOssConfig, MixtralConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import mxquant.integrations.transformers  # noqa: F401, registers the implementation
from mxquant import MXTensor, quantize_
from mxquant.formats import get_format

BLOCKS = {"Mixtral": (MixtralExperts, MixtralConfig), "GptOss": (GptOssExperts, GptOssConfig)}
# Hidden and intermediate: shards of 2880, 1856 / 8, 704 / 4, one that a kernel would pad to 128, and odd ones.
SIZES = [(90, 232), (232, 176), (176, 80), (80, 90), (81, 45)]


@pytest.fixture(autouse=True)
def poisoned_allocations() -> Iterator[None]:
    """What is allocated and not written holds NaN, or 255 in bytes."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def poison_unused_bits(weight: MXTensor) -> int:
    """Sets the bits of the last byte of each row that belong to no code, and counts them."""
    fmt, length = get_format(weight.format), weight.shape[weight.axis]
    used = length * fmt.element.bits
    unused = weight.qdata.shape[-1] * 8 - used
    for byte in range(used // 8, weight.qdata.shape[-1]):
        mask = 0xFF & (0xFF << max(0, used - 8 * byte))
        weight.qdata[..., byte] |= mask
    return unused


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("hidden, intermediate", SIZES)
@pytest.mark.parametrize("name", BLOCKS)
def test_padding_does_not_change_the_result(name: str, hidden: int, intermediate: int, format: str) -> None:
    experts = make(name, hidden, intermediate)
    quantize_(experts, format)
    x = torch.randn(5, hidden, dtype=torch.float64)
    ids, weights = routing(5, EXPERTS)
    expected = block64(experts, x, ids, weights, experts.down_proj.activation)
    for weight in (experts.gate_up_proj, experts.down_proj):
        poison_unused_bits(weight)
    for implementation in ("mxquant", "grouped_mm", "eager"):
        assert_block(run(experts, implementation, x, ids, weights.double()), expected, 1e-6)


def make(name: str, hidden: int, intermediate: int) -> Any:
    cls, config = BLOCKS[name]
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_local_experts": EXPERTS}
    return fill(cls(config(**sizes))).double()


def test_there_are_unused_bits_to_poison() -> None:
    counted = []
    for size in (90, 81):
        for format in ("mxfp4", "mxfp6_e2m3"):
            experts = make("Mixtral", size, 45)
            quantize_(experts, format)
            before: Tensor = experts.gate_up_proj.dequantize()
            counted.append(poison_unused_bits(experts.gate_up_proj))
            assert torch.equal(experts.gate_up_proj.dequantize(), before)
    assert counted == [0, 12, 4, 18]
