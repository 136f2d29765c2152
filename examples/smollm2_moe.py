"""A trained mixture of experts, quantized: SmolLM2-135M with every feed-forward split into four experts.

Shows: `quantize_` on a MoE model of transformers, and its experts implementation "mxquant". All four experts serve
    every token with equal weight, so the MoE model computes what the dense one does, and should lose as much.
Needs: what smollm2_perplexity.py needs, which this script imports from.
Prints: what was quantized in one layer, and the perplexity of the dense and of the MoE model, in fp32 and quantized
    to each format.

    python examples/smollm2_moe.py
"""

import argparse
import copy
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table
from smollm2_perplexity import CONFIGS, WINDOW, load_smollm2, news_windows, perplexity
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel
from transformers.utils import logging

import mxquant.integrations.transformers  # noqa: F401, registers the experts implementation "mxquant"
from mxquant import quantize_, summary

EXPERTS = 4


@torch.no_grad()
def as_mixture_of_experts(dense: PreTrainedModel) -> MixtralForCausalLM:
    """The same function with each feed-forward cut into experts that are all on.

    A router of zeros gives each of them the weight 1 / EXPERTS, which its down projection makes up for.
    """
    kept = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    kept += ("max_position_embeddings", "rms_norm_eps", "rope_parameters", "tie_word_embeddings", "hidden_act")
    config = MixtralConfig(
        **{name: getattr(dense.config, name) for name in kept},
        intermediate_size=dense.config.intermediate_size // EXPERTS,
        num_local_experts=EXPERTS,
        num_experts_per_tok=EXPERTS,
        sliding_window=None,
        pad_token_id=None,
    )
    state = {name: value for name, value in dense.state_dict().items() if ".mlp." not in name}
    for index, layer in enumerate(dense.model.layers):
        gate, up, down = (getattr(layer.mlp, f"{name}_proj").weight for name in ("gate", "up", "down"))
        block = f"model.layers.{index}.mlp"
        both = torch.stack([gate, up]).unflatten(1, (EXPERTS, -1)).transpose(0, 1)  # [E, 2, F, H]
        state[f"{block}.experts.gate_up_proj"] = both.flatten(1, 2).contiguous()
        state[f"{block}.experts.down_proj"] = EXPERTS * down.unflatten(1, (EXPERTS, -1)).transpose(0, 1).contiguous()
        state[f"{block}.gate.weight"] = torch.zeros(EXPERTS, config.hidden_size)
    model = MixtralForCausalLM(config)
    model.load_state_dict(state)
    model.tie_weights()
    return model.eval()


def main(argv: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
    parser = argparse.ArgumentParser(description="Perplexity of SmolLM2 and of a MoE model made of it.")
    parser.add_argument("--tokens", type=int, default=1024, help="evaluate on so many (default 1024)")
    parser.add_argument("--configs", nargs="*", choices=CONFIGS, default=["mxfp4 W4A16", "mxfp4 W4A4"])
    parser.add_argument("--implementation", default="mxquant", help='of quantized experts; or "grouped_mm", "eager"')
    arguments = parser.parse_args(argv)
    if arguments.tokens % WINDOW or arguments.tokens < WINDOW:
        parser.error(f"--tokens {arguments.tokens}: give a multiple of {WINDOW}")

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    dense, tokenizer = load_smollm2()
    windows = news_windows(tokenizer, arguments.tokens)
    mixture = as_mixture_of_experts(dense)
    mixture.set_experts_implementation("eager")  # torch's grouped matmul of fp32 weights is very slow on a CPU

    results: dict[str, dict[str, float]] = {}
    table = Table("format", "dense", f"{EXPERTS} experts", title="perplexity")
    for name in ("fp32", *arguments.configs):
        results[name] = {}
        for kind, model in (("dense", dense), ("moe", mixture)):
            quantized = model
            if name != "fp32":
                quantized = copy.deepcopy(model)
                quantize_(quantized, CONFIGS[name])
                if kind == "moe":
                    quantized.set_experts_implementation(arguments.implementation)
            results[name][kind] = perplexity(quantized, windows)
        table.add_row(name, *(f"{value:.2f}" for value in results[name].values()))
    print(summary(quantized.model.layers[0]))
    Console().print(table)
    return results


if __name__ == "__main__":
    main()
