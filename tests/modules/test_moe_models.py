"""Whole mixture-of-experts models: what is quantized of them, that they agree, compile, save and come back."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import transformers

import mxquant.integrations.transformers  # noqa: F401, registers the implementation
from mxquant import (
    MXTensor,
    dequantize_,
    explain,
    flatten_state_dict,
    quantize_,
    summary,
    unflatten_state_dict,
)

IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm", "mxquant")
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def qwen3_moe(implementation: str = "grouped_mm", **options: Any) -> nn.Module:
    config = transformers.Qwen3MoeConfig(
        **SIZES | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48} | options
    )
    return implemented(transformers.Qwen3MoeForCausalLM(config), implementation)


def gpt_oss(implementation: str = "grouped_mm", **options: Any) -> nn.Module:
    config = transformers.GptOssConfig(**SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2} | options)
    model = transformers.GptOssForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.3)
    return implemented(model, implementation)


def implemented(model: Any, implementation: str) -> nn.Module:
    model.set_experts_implementation(implementation)
    return model.eval()


MODELS = {"qwen3_moe": qwen3_moe, "gpt_oss": gpt_oss}


def logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_most_of_the_parameters_are_quantized(make: Any) -> None:
    """Of linears and experts; embeddings, lm_head, norms, routers and biases do not count."""
    model = make()
    counted = sum(p.numel() for n, p in model.named_parameters() if "_proj" in n and not n.endswith("bias"))
    routers = {n: p for n, p in model.named_parameters() if "gate.weight" in n or "router" in n}
    assert routers
    before = {n: p.clone() for n, p in routers.items()}
    quantize_(model, "mxfp4")
    quantized = sum(p.numel() for p in model.parameters() if isinstance(p, MXTensor))
    assert quantized / counted == 1
    for name, value in before.items():
        assert torch.equal(model.get_parameter(name), value)
    reasons = {row.name: row.reason for row in summary(model).skipped}
    assert {reasons[name] for name in routers if name in reasons} == {"MoE router"}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_weight_only_model_matches_its_dequantized_model(make: Any) -> None:
    model = make()
    quantize_(model, {"weight": "mxfp4", "activation": None})
    dense = copy.deepcopy(model)
    dequantize_(dense)
    ids = torch.randint(128, (2, 9))
    expected = logits(implemented(dense, "eager"), ids)
    for implementation in IMPLEMENTATIONS:
        y = logits(implemented(model, implementation), ids)
        assert (y - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_the_implementations_agree(make: Any, dtype: torch.dtype) -> None:
    """In bf16 as far as activations that round to another code let them."""
    model = make().to(dtype)
    quantize_(model, "mxfp4")
    ids = torch.randint(128, (2, 9))
    expected = logits(implemented(model, "eager"), ids)
    for implementation in IMPLEMENTATIONS:
        y = logits(implemented(model, implementation), ids)
        assert (y - expected).norm() < (1e-6 if dtype == torch.float64 else 0.1) * expected.norm()


def test_unquantized_block_runs_transformers_code() -> None:
    """Under "mxquant", where one layer was left out or nothing is quantized at all."""
    model = qwen3_moe("mxquant", hidden_size=64, moe_intermediate_size=64)
    ids = torch.randint(128, (2, 9))
    dense = logits(model, ids)
    assert torch.equal(logits(implemented(model, "grouped_mm"), ids), dense)
    quantize_(model, {"moe": "mxfp4", "model.layers.0": None})
    y = logits(implemented(model, "mxquant"), ids)
    assert torch.allclose(y, logits(implemented(model, "eager"), ids), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("left_out", ["gate_up_proj", "down_proj"])
def test_one_weight_of_a_block_can_stay_unquantized(left_out: str) -> None:
    model = gpt_oss(intermediate_size=64)
    quantize_(model, {"moe": {"weight": "mxfp4", "activation": None}, f"*.experts.{left_out}": None})
    ids = torch.randint(128, (2, 9))
    expected = logits(implemented(model, "eager"), ids)
    assert torch.allclose(logits(implemented(model, "mxquant"), ids), expected, rtol=1e-4, atol=1e-5)


def test_mappings_reach_experts() -> None:
    model = qwen3_moe()
    quantize_(
        model,
        {
            "moe": "mxfp4",
            "model.layers.1.mlp.experts": {"weight": "nvfp4", "activation": "mxfp8"},
            "*.down_proj": "mxfp6",
            "model.layers.1.mlp.experts.down_proj": None,
        },
    )
    rows = {row.name.removeprefix("model.layers."): (row.format, row.precision) for row in summary(model).quantized}
    assert rows == {
        "0.mlp.experts.gate_up_proj": ("mxfp4", "W4A4"),
        "0.mlp.experts.down_proj": ("mxfp6_e2m3", "W6A6"),
        "1.mlp.experts.gate_up_proj": ("nvfp4", "W4A8"),
    }


@pytest.mark.usefixtures("fixed_backends")
def test_explain_lists_each_weight() -> None:
    model = gpt_oss()
    quantize_(model, "mxfp4")
    experts = model.model.layers[0].mlp.experts
    explained = explain(experts, (5, 64))
    assert explained.matmul == ("W4A4: mxfp4 input [5, 64], each row times one of 4 mxfp4 weights [192, 64] on cpu")
    assert explained.chosen == "emulation"
    (down,) = explained.others
    assert down.matmul == "W4A4: mxfp4 input [M, 96], each row times one of 4 mxfp4 weights [64, 96] on cpu"
    assert str(explained).count("| emulation | chosen") == 2
    assert explained._repr_html_().count("<table>") == 2
    with pytest.raises(ValueError, match="the last is its in_features, 64"):
        explain(experts, (5, 96))
    with pytest.raises(ValueError, match=r"get_submodule\('layers.0.self_attn.q_proj'\)"):
        explain(model.model)


# Compiled


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("implementation", ["mxquant", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_block_compiles_whole_and_once(make: Any, implementation: str, dtype: torch.dtype) -> None:
    model = make(implementation).to(dtype)
    quantize_(model, "mxfp4")
    block = model.model.layers[0].mlp
    torch._dynamo.reset()
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=count)
    with torch.no_grad():
        for tokens in (5, 9, 33, 64):
            x = torch.randn(1, tokens, 64, dtype=dtype)
            assert torch.equal(first(compiled(x)), first(block(x)))
    assert len(graphs) == 1


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_inference_mode_and_autocast(make: Any, implementation: str) -> None:
    model = make(implementation)
    quantize_(model, {"weight": "nvfp4", "activation": "fp8_e4m3"})
    ids = torch.randint(128, (2, 9))
    expected = logits(model, ids)
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, expected)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y = model(ids).logits
    assert (y.float() - expected).norm() < 0.1 * expected.norm()


def test_a_block_is_exported() -> None:
    model = gpt_oss("mxquant")
    quantize_(model, "mxfp4")
    experts = model.model.layers[0].mlp.experts
    arguments = torch.randn(3, 64), torch.tensor([[0, 2], [3, 2], [1, 0]]), torch.rand(3, 2)
    with torch.no_grad():
        exported = torch.export.export(experts, arguments).module()
        assert torch.equal(exported(*arguments), experts(*arguments))


def first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def test_a_block_compiles_with_gradients() -> None:
    model = gpt_oss("mxquant")
    quantize_(model, {"weight": "mxfp4", "activation": None})
    experts = model.model.layers[0].mlp.experts
    torch._dynamo.reset()
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    arguments = torch.tensor([[0, 2], [3, 2], [1, 0]]), torch.rand(3, 2)
    gradients = []
    for function in (experts, compiled):
        x = torch.ones(3, 64, requires_grad=True)
        function(x, *arguments).square().sum().backward()
        gradients.append(x.grad)
    assert torch.allclose(*gradients, rtol=1e-4, atol=1e-5)


# State


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_model_is_equal_after_saving_and_copying(make: Any, format: str) -> None:
    model = make()
    names = list(model.state_dict())
    quantize_(model, format)
    assert list(model.state_dict()) == names
    ids = torch.randint(128, (2, 9))
    expected = logits(model, ids)

    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh = make()
    fresh.load_state_dict(torch.load(file, weights_only=True), assign=True)
    flat = make()
    flat.load_state_dict(unflatten_state_dict(*flatten_state_dict(model.state_dict())), assign=True)
    copied = make()
    quantize_(copied, format)
    copied.load_state_dict(model.state_dict())
    for twin in (fresh, flat, copied, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(twin, ids), expected)


def test_dequantize_gives_ordinary_stacks() -> None:
    model = gpt_oss().to(torch.bfloat16)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    quantize_(model, "mxfp4")
    weight = model.model.layers[0].mlp.experts.gate_up_proj
    assert weight.shape == shapes["model.layers.0.mlp.experts.gate_up_proj"]
    assert (weight.qdata.shape, weight.scale.shape, weight.axis) == ((4, 192, 32), (4, 192, 2), -2)
    values = weight.dequantize()
    dequantize_(model)
    assert {name: parameter.shape for name, parameter in model.named_parameters()} == shapes
    assert torch.equal(model.model.layers[0].mlp.experts.gate_up_proj, values)
    quantize_(model, "mxfp4")
    assert torch.equal(model.model.layers[0].mlp.experts.gate_up_proj.qdata, weight.qdata)


def test_a_bad_expert_is_named_before_any_change() -> None:
    model = qwen3_moe()
    model.model.layers[1].mlp.experts.down_proj.data[3, 5, 7] = torch.inf
    with pytest.raises(ValueError, match=r"model.layers.1.mlp.experts.down_proj \(8, 64, 48\) holds NaN or Inf"):
        quantize_(model, "mxfp4")
    assert not [p for p in model.parameters() if isinstance(p, MXTensor)]


def test_a_named_backend_is_asked_about_stacks() -> None:
    with pytest.raises(ValueError, match=r"gate_up_proj \(8, 96, 64\): backend 'fp8' cannot .*: needs an NVIDIA GPU"):
        quantize_(qwen3_moe(), {"moe": {"weight": "mxfp4", "backend": "fp8"}})
    model = qwen3_moe()
    quantize_(model, {"moe": {"weight": "mxfp4", "backend": "emulation"}})
    assert explain(model.model.layers[0].mlp.experts).requested == "emulation"
