"""How fast is a quantized block of experts on a GPU, against bf16 and triton_kernels in the same run?

    python benchmarks/gpu_experts.py

The expert blocks of three models with random weights, as transformers has them: gpt-oss-120b, Qwen3-30B-A3B and
Mixtral 8x7B. The router's top-k and softmax are part of the time. Each version is captured in a CUDA graph over inputs
that between them hit more weights than the L2 cache holds, and replayed. Needs a GPU and transformers; triton_kernels
is measured on gpt-oss where it is installed.
"""

import argparse
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import transformers
from gpu_timing import CACHED_BYTES
from peers import described
from record import Record
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from mxquant import MXFP4Config, experts_forward, quantize, quantize_
from mxquant.tuning import graph_microseconds

TOKENS = (1, 8, 32, 64, 128, 1024, 4096)
BITS = 17 / 32  # bytes of an MXFP4 element, its share of a scale included
Forward = Callable[[Tensor, Tensor], Tensor]
"""Hidden states [T, H] and router logits [T, E] to [T, H]."""

CONFIGS: dict[str, tuple[type[nn.Module], Any, int]] = {
    "gpt-oss-120b": (
        GptOssExperts,
        transformers.GptOssConfig(hidden_size=2880, intermediate_size=2880, num_local_experts=128),
        4,
    ),
    "Qwen3-30B-A3B": (
        Qwen3MoeExperts,
        transformers.Qwen3MoeConfig(hidden_size=2048, moe_intermediate_size=768, num_experts=128),
        8,
    ),
    "Mixtral-8x7B": (
        MixtralExperts,
        transformers.MixtralConfig(hidden_size=4096, intermediate_size=14336, num_local_experts=8),
        2,
    ),
}


def routed(forward: Callable[[Tensor, Tensor, Tensor], Tensor], choices: int) -> Forward:
    def run(x: Tensor, logits: Tensor) -> Tensor:
        values, ids = logits.topk(choices, -1)
        return forward(x, ids, values.softmax(-1).to(x.dtype))

    return run


def versions(block: str) -> Iterator[tuple[str, Forward]]:
    """bf16 first, then this library's, then triton_kernels where it is there."""
    cls, config, choices = CONFIGS[block]
    config._experts_implementation = "grouped_mm"
    with torch.device("cuda"):
        dense = cls(config).to(torch.bfloat16).requires_grad_(False)
    for parameter in dense.parameters():
        parameter.normal_(std=parameter.shape[-1] ** -0.5)
    yield "bf16", routed(lambda *inputs: ALL_EXPERTS_FUNCTIONS["grouped_mm"](dense, *inputs), choices)
    for name, activation in (("W4A4", "same"), ("W4A16", None)):
        quantized = copy.deepcopy(dense)
        quantize_(quantized, MXFP4Config(activation=activation))
        yield name, routed(lambda *inputs, quantized=quantized: experts_forward(quantized, *inputs), choices)
    if cls is GptOssExperts:
        yield "triton_kernels W4A16", triton_kernels_gpt_oss(dense, choices)


def triton_kernels_gpt_oss(experts: Any, choices: int) -> Forward:
    """As its users call it: routing, then two matmuls with the gate, the biases and the router's weights in them."""
    from triton_kernels.matmul_ogs import FlexCtx, FnSpecs, FusedActivation, PrecisionConfig, matmul_ogs
    from triton_kernels.numerics import InFlexData
    from triton_kernels.routing import routing
    from triton_kernels.swiglu import swiglu_fn
    from triton_kernels.tensor import FP4, convert_layout, wrap_torch_tensor
    from triton_kernels.tensor_details import layout

    value_layout, value_options = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
    scale_layout, scale_options = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=8)

    def prepared(w_EKN: Tensor) -> tuple[Any, Any]:
        codes = quantize(w_EKN, "mxfp4", axis=-2)
        weight = wrap_torch_tensor(codes.qdata.mT, dtype=FP4)
        scale = convert_layout(wrap_torch_tensor(codes.scale.mT), scale_layout, **scale_options)
        flex = FlexCtx(rhs_data=InFlexData())
        config = PrecisionConfig(weight_scale=scale, flex_ctx=flex, out_dtype=torch.bfloat16)
        return convert_layout(weight, value_layout, **value_options), config

    (w13, config13), (w2, config2) = prepared(experts.gate_up_proj), prepared(experts.down_proj)
    b13, b2 = experts.gate_up_proj_bias.float(), experts.down_proj_bias.float()
    swiglu = FusedActivation(FnSpecs("swiglu", swiglu_fn, ("alpha", "limit")), (experts.alpha, experts.limit), 2)

    def run(x: Tensor, logits: Tensor) -> Tensor:
        data, gather, scatter = routing(logits, choices)
        h = matmul_ogs(x, w13, b13, data, gather_indx=gather, precision_config=config13, fused_activation=swiglu)
        return matmul_ogs(h, w2, b2, data, scatter_indx=scatter, precision_config=config2, gammas=data.gate_scal)

    return run


def inputs_for(block: str, tokens: int) -> tuple[list[tuple[Tensor, Tensor]], float]:
    """Inputs that hit enough weights between them, and how many bytes of MXFP4 one of them hits on the average."""
    _, config, choices = CONFIGS[block]
    experts = getattr(config, "num_local_experts", None) or config.num_experts
    width, inner = config.hidden_size, getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    of_one = 3 * width * inner * BITS
    expected_hits = experts * (1 - (1 - choices / experts) ** tokens)
    sets = [
        (
            torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16),
            torch.randn(tokens, experts, device="cuda"),
        )
        for _ in range(max(1, round(CACHED_BYTES / (expected_hits * of_one))))
    ]
    hits = sum(logits.topk(choices, -1).indices.unique().numel() for _, logits in sets) / len(sets)
    return sets, hits * of_one


def measure(block: str, tokens: Sequence[int]) -> Iterator[dict[str, Any]]:
    inputs = {count: inputs_for(block, count) for count in tokens}
    bf16: dict[int, float] = {}
    reference: dict[int, Tensor] = {}
    for name, forward in versions(block):
        for count, (sets, weight_bytes) in inputs.items():
            row: dict[str, Any] = {"block": block, "tokens": count, "version": name}
            try:
                y = forward(*sets[0])
                row["us"] = round(graph_microseconds(lambda s=sets, f=forward: [f(*one) for one in s], len(sets)), 2)
            except Exception as error:
                if name in ("W4A4", "W4A16"):
                    raise
                yield row | {"failed": described(error)}
                continue
            reference.setdefault(count, y.float())
            bf16.setdefault(count, row["us"])
            difference = (y.float() - reference[count]).norm() / reference[count].norm()
            row["from_bf16"] = float(f"{difference.item():.2g}")
            row["tb_s"] = round((weight_bytes / BITS * 2 if name == "bf16" else weight_bytes) / row["us"] / 1e6, 2)
            yield row | {"times_bf16": round(bf16[count] / row["us"], 3)}


def record_goals(record: Record) -> None:
    times = {(r["block"], r["tokens"], r["version"]): r for r in record.results if "us" in r}
    for (block, tokens, name), row in times.items():
        peer = times.get((block, tokens, "triton_kernels W4A16"))
        if peer is not None and name == "W4A16" and tokens <= 128:
            record.goal(f"{block} T={tokens}: W4A16 times triton_kernels", peer["us"] / row["us"], at_least=1.25)
        if block == "gpt-oss-120b" and name == "W4A16" and 32 <= tokens <= 128:
            record.goal(f"{block} T={tokens}: W4A16, TB/s of weights hit", row["tb_s"], at_least=2.8)
        if block == "gpt-oss-120b" and name == "W4A4" and tokens >= 1024:
            record.goal(f"{block} T={tokens}: W4A4 times bf16", row["times_bf16"], at_least=1.3)
            if peer is not None:
                record.goal(f"{block} T={tokens}: W4A4 times triton_kernels", peer["us"] / row["us"], at_least=1.6)
        if block != "gpt-oss-120b" and name in ("W4A4", "W4A16") and tokens <= 64:
            record.goal(f"{block} T={tokens}: {name} times bf16", row["times_bf16"], at_least=1.8)


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", nargs="+", choices=CONFIGS, default=list(CONFIGS))
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("needs a GPU that torch can use; cpu_linear.py measures a CPU")
    method = "medians of CUDA graph replays, routing included; from_bf16: difference from the bf16 block, in norm"
    record = Record("gpu_experts", "time of a block of experts on a GPU, bf16 inputs", method, ("triton_kernels",))
    for block in arguments.blocks:
        for row in measure(block, arguments.tokens):
            record.results.append(row)
            said = row.get("failed") or f"{row['us']:9.1f} us ({row['times_bf16']:5.2f}x) {row['tb_s']:5.2f} TB/s"
            print(f"{block:14} T={row['tokens']:<5} {row['version']:21} {said}", flush=True)
        record.save()  # what is cut short keeps the blocks before it
        torch.cuda.empty_cache()
    record_goals(record)
    record.save()


if __name__ == "__main__":
    main()
