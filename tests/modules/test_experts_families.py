"""Expert blocks of known classes: those of transformers that it does not decorate, and other libraries'."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("transformers")

from experts_classes import EXPERTS, HIDDEN, build, fill
from moe_reference import assert_block, routing

from mxquant import MXTensor, dequantize_, experts_forward, quantize_, summary
from mxquant.modules.experts_layouts import experts_layout
from mxquant.modules.families import FAMILIES

TOKENS = 6


def transformers_class(path: str, name: str) -> nn.Module:
    return build(f"transformers.models.{path}.modeling_{path}", name)


def llama4() -> tuple[nn.Module, list[Any]]:
    experts = transformers_class("llama4", "Llama4TextExperts")
    return experts, [torch.randn(EXPERTS * TOKENS, HIDDEN)]


def longcat() -> tuple[nn.Module, list[Any]]:
    """Ids from EXPERTS on are identity experts."""
    experts = transformers_class("longcat_flash", "LongcatFlashExperts")
    ids = torch.tensor([[0, EXPERTS], [1, 2], [EXPERTS + 1, 3], [2, 0], [3, 1], [0, 1]])
    return experts, [torch.randn(TOKENS, HIDDEN), ids, routing(TOKENS, EXPERTS)[1]]


def step3p7() -> tuple[nn.Module, list[Any]]:
    experts = transformers_class("step3p7", "Step3p7Experts")
    experts.limit = 0.5
    return experts, [torch.randn(TOKENS, HIDDEN), *routing(TOKENS, EXPERTS)]


def jetmoe() -> tuple[nn.Module, list[Any]]:
    from transformers.models.jetmoe.modeling_jetmoe import JetMoeParallelExperts

    return fill(JetMoeParallelExperts(EXPERTS, HIDDEN, 72)), [torch.randn(TOKENS, HIDDEN), [1, 0, 3, 2]]


def inkling_shared() -> tuple[nn.Module, list[Any]]:
    experts = transformers_class("inkling", "InklingSharedExperts")
    return experts, [torch.randn(1, TOKENS, HIDDEN), torch.rand(1, TOKENS, experts.n_shared_experts)]


def dbrx() -> tuple[nn.Module, list[Any]]:
    experts = transformers_class("dbrx", "DbrxExperts")
    for parameter in experts.parameters():
        parameter.data *= 0.5
    return experts, [torch.randn(TOKENS, experts.hidden_size), *routing(TOKENS, experts.num_experts)]


class GroupedExperts(nn.Module):
    """With the parameters and the forward of torchtitan's class of this name, for tokens sorted by expert."""

    def __init__(self, names: tuple[str, str, str]) -> None:
        super().__init__()
        self.names = names
        for name, shape in zip(names, ((72, HIDDEN), (HIDDEN, 72), (72, HIDDEN)), strict=True):
            setattr(self, name, nn.Parameter(torch.empty(EXPERTS, *shape)))

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        w1, w2, w3 = (getattr(self, name) for name in self.names)
        parts = []
        for expert, rows in enumerate(torch.split(x, num_tokens_per_expert.tolist())):
            h = F.silu(torch.matmul(rows, w1[expert].transpose(-2, -1)))
            h = h * torch.matmul(rows, w3[expert].transpose(-2, -1))
            parts.append(torch.matmul(h, w2[expert].transpose(-2, -1)))
        return torch.cat(parts)


GroupedExperts.__module__ = "torchtitan.models.moe.moe"


def torchtitan(*names: str) -> tuple[nn.Module, list[Any]]:
    return fill(GroupedExperts(names)), [torch.randn(TOKENS, HIDDEN), torch.tensor([2, 0, 1, 3])]  # type: ignore[arg-type]


class GptOssGroupedExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp1_weight = nn.Parameter(torch.empty(EXPERTS, 144, HIDDEN))
        self.mlp1_bias = nn.Parameter(torch.empty(EXPERTS, 144))
        self.mlp2_weight = nn.Parameter(torch.empty(EXPERTS, HIDDEN, 72))
        self.mlp2_bias = nn.Parameter(torch.empty(EXPERTS, HIDDEN))

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        parts = []
        for expert, rows in enumerate(torch.split(x, num_tokens_per_expert.tolist())):
            h = torch.matmul(rows, self.mlp1_weight[expert].transpose(-2, -1)) + self.mlp1_bias[expert]
            h = F.silu(h[..., ::2]) * h[..., 1::2]
            parts.append(torch.matmul(h, self.mlp2_weight[expert].transpose(-2, -1)) + self.mlp2_bias[expert])
        return torch.cat(parts)


GptOssGroupedExperts.__module__ = "torchtitan.models.gpt_oss.moe"


def torchtitan_gpt_oss() -> tuple[nn.Module, list[Any]]:
    return fill(GptOssGroupedExperts()), [torch.randn(TOKENS, HIDDEN), torch.tensor([2, 0, 1, 3])]


CASES: dict[str, Callable[[], tuple[nn.Module, list[Any]]]] = {
    "Llama4TextExperts": llama4,
    "LongcatFlashExperts": longcat,
    "Step3p7Experts": step3p7,
    "JetMoeParallelExperts": jetmoe,
    "InklingSharedExperts": inkling_shared,
    "DbrxExpertGLU": dbrx,
    "GroupedExperts": lambda: torchtitan("w1", "w2", "w3"),
    "GroupedExperts with axes in their names": lambda: torchtitan("w1_EFD", "w2_EDF", "w3_EFD"),
    "GptOssGroupedExperts": torchtitan_gpt_oss,
}


def make(name: str) -> tuple[nn.Module, list[Any]]:
    try:
        return CASES[name]()
    except (ImportError, AttributeError) as error:
        pytest.skip(f"this transformers has no {name}: {error}")


def dense_twin(experts: nn.Module) -> nn.Module:
    """Its quantized weights as ordinary ones, in the shapes that it had."""
    twin = copy.deepcopy(experts)
    dequantize_(twin)
    assert not [p for p in twin.parameters() if isinstance(p, MXTensor)]
    return twin


def test_every_entry_of_the_table_has_a_case() -> None:
    assert {name for _, name in FAMILIES} == {name.partition(" ")[0] for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_own_forward_multiplies_with_quantized_weights(name: str) -> None:
    experts, arguments = make(name)
    shapes = {name: parameter.shape for name, parameter in experts.named_parameters()}
    stacks = [name for name in shapes if not name.endswith("bias")]
    quantize_(experts, {"moe": {"weight": "mxfp4", "activation": None}})
    assert [(row.name, row.kind) for row in summary(experts).quantized] == [(name, "moe") for name in stacks]
    dense = dense_twin(experts)
    assert {name: parameter.shape for name, parameter in dense.named_parameters()} == shapes
    with torch.no_grad():
        assert_block(experts(*arguments), dense(*arguments).double(), 1e-5)


@pytest.mark.parametrize("name", CASES)
def test_k_is_the_axis_that_is_contracted(name: str) -> None:
    """Activations are quantized along it: the wrong axis would leave them as they are."""
    experts, arguments = make(name)
    weight_only = copy.deepcopy(experts)
    quantize_(weight_only, {"moe": {"weight": "mxfp8", "activation": None}})
    quantize_(experts, {"moe": {"weight": "mxfp8", "activation": "mxfp4"}})
    for parameter in experts.parameters():
        if isinstance(parameter, MXTensor):
            assert parameter.shape[parameter.axis] in (HIDDEN, 72, *[getattr(experts, "ffn_hidden_size", HIDDEN)])
    with torch.no_grad():
        y, exact = experts(*arguments), weight_only(*arguments)
    assert 0.02 < (y - exact).norm() / exact.norm() < 0.4


# experts_forward for blocks that their own forward computes


def one_hot_weights(ids: Tensor, weights: Tensor) -> Tensor:
    """[T, E], zero for experts that were not chosen."""
    return torch.zeros(ids.shape[0], EXPERTS, dtype=weights.dtype).scatter(1, ids, weights)


def test_llama4_router_weight_multiplies_the_input() -> None:
    """Its own forward gets every token for every expert, weighed, with zeros for those that were not chosen."""
    experts = llama4()[0].double()
    quantize_(experts, "mxfp4")
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.float64)
    ids, weights = routing(TOKENS, EXPERTS)
    weighed = x.repeat(EXPERTS, 1) * one_hot_weights(ids, weights.double()).T.reshape(-1, 1)
    expected = experts(weighed).view(EXPERTS, TOKENS, HIDDEN).sum(0)
    assert_block(experts_forward(experts, x, ids, weights.double()), expected, 1e-6)


@pytest.mark.parametrize("make", [step3p7, dbrx])
def test_experts_forward_matches_the_blocks_own_forward(make: Callable[[], tuple[nn.Module, list[Any]]]) -> None:
    experts, (x, ids, weights) = make()
    experts = experts.double()
    quantize_(experts, "mxfp4")
    x, weights = x.double(), weights.double()
    block = getattr(experts, "mlp", experts)
    assert_block(experts_forward(block, x, ids, weights), experts(x, ids, weights).view(x.shape), 1e-6)


def test_experts_forward_matches_torchtitan() -> None:
    experts = torchtitan("w1", "w2", "w3")[0].double()
    quantize_(experts, "mxfp4")
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.float64)
    ids = torch.tensor([0, 0, 2, 3, 3, 3]).unsqueeze(-1)
    y = experts_forward(experts, x, ids, torch.ones(TOKENS, 1, dtype=torch.float64))
    assert_block(y, experts(x, torch.tensor([2, 0, 1, 3])), 1e-6)


# What is no stack


def test_module_list_of_linears_is_quantized_as_linears() -> None:
    from transformers.models.switch_transformers.configuration_switch_transformers import SwitchTransformersConfig
    from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersExperts

    experts = SwitchTransformersExperts(SwitchTransformersConfig(num_experts=3, d_model=32, d_ff=64))
    quantize_(experts, "mxfp4")
    rows = summary(experts).quantized
    assert [row.kind for row in rows] == ["linear"] * 6


def test_a_linear_that_views_its_weight_otherwise_is_skipped() -> None:
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    model = nn.ModuleDict({"o_a_proj": modeling.DeepseekV4GroupedLinear(64, 64, 4), "fc": nn.Linear(32, 32)})
    quantize_(model, "mxfp4")
    assert summary(model).skipped[0].reason == "DeepseekV4GroupedLinear has a forward of its own"


def test_experts_in_embeddings_are_left_alone() -> None:
    from transformers import DogeConfig
    from transformers.models.doge.modeling_doge import DogeCDMoE

    block = DogeCDMoE(DogeConfig(hidden_size=32, intermediate_size=64, num_experts=16, num_experts_per_tok=2))
    quantize_(block, "mxfp4")
    reasons = {row.name: row.reason for row in summary(block).skipped}
    assert reasons["up_embed.weight"] == reasons["down_embed.weight"] == "embedding"
    assert {row.kind for row in summary(block).quantized} == {"linear"}


def test_known_class_name_in_another_package_has_no_layout() -> None:
    class Llama4TextExperts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.randn(2, 64, 64))
            self.down_proj = nn.Parameter(torch.randn(2, 64, 64))

    assert experts_layout(Llama4TextExperts()) is None
