"""W4A4 that is usable on a small language model: a block Hadamard rotation and GPTQ, in one call.

Shows: `quantize_` with `rotation` and `algorithm="gptq"` on SmolLM2-135M-Instruct, beside rounding to nearest.
Needs: what smollm2_perplexity.py needs, which this script imports from.
Calibration: text of the English Wikipedia in gensim's test data, other text than the news that it is evaluated on.
Prints: perplexity on the first `--tokens` tokens of the news corpus, and the seconds that quantizing took.

    python examples/smollm2_gptq.py
    python examples/smollm2_gptq.py --tokens 20480 --calibration 12288 --samples 0 1 2   # the figures to quote
    python examples/smollm2_gptq.py --device cuda   # the model on the CPU, its blocks on a GPU one after the other
"""

import argparse
import bz2
import copy
import re
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table
from smollm2_perplexity import WINDOW, load_smollm2, news_windows, package_folder, perplexity
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from mxquant import GPTQ, MXFP4Config, NVFP4Config, quantize_

WIKIPEDIA = "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
ROTATED = MXFP4Config(rotation=32, algorithm="gptq")
PARALLEL = GPTQ(sequential=False)
CONFIGS = {
    "mxfp4 W4A16": MXFP4Config(activation=None),
    "mxfp4 W4A4": MXFP4Config(),
    "mxfp4 W4A16, rotated GPTQ": replace(ROTATED, activation=None),
    "mxfp4 W4A4, rotated GPTQ": ROTATED,
    "mxfp4 W4A4, rotated GPTQ, mse": replace(ROTATED, scale_mode="mse", activation_scale_mode="mse"),
    "mxfp4 W4A4, rotated GPTQ, parallel": replace(ROTATED, algorithm=PARALLEL),
    "mxfp4 W4A4, GPTQ": MXFP4Config(algorithm="gptq"),
    "mxfp4 W4A4, rotated": MXFP4Config(rotation=32),
    "nvfp4 W4A4": NVFP4Config(),
    "nvfp4 W4A4, rotated GPTQ": NVFP4Config(rotation=16, algorithm="gptq"),
}
DEFAULT = ("mxfp4 W4A4", "mxfp4 W4A4, rotated GPTQ")


def wikipedia_paragraphs(count: int | None = None) -> list[str]:
    """Paragraphs of articles without their markup: the first `count` of 300 characters or more, or all."""
    file = package_folder("gensim", 'pip install "mxquant[examples]"') / "test" / "test_data" / WIKIPEDIA
    xml = bz2.decompress(file.read_bytes()).decode("utf-8")
    pages = re.findall(r"<text[^>]*>(.*?)</text>", xml, re.DOTALL)
    text = "\n\n".join(page for page in pages if len(page) > 2000)
    text = re.sub(r"&lt;ref.*?(/&gt;|&lt;/ref&gt;)|&lt;.*?&gt;", "", text, flags=re.DOTALL)
    for _ in range(4):  # templates and tables within each other
        text = re.sub(r"\{[^{}]*\}", "", text)
    text = re.sub(r"\[\[(?:[^\[\]|]*\|)?([^\[\]|]*)\]\]", r"\1", text)
    text = re.sub(r"'{2,}|\[\[[^\]]*\]\]|^[=*#:;|!].*$|&\w+;", "", text, flags=re.MULTILINE)
    paragraphs = [paragraph for paragraph in text.split("\n") if paragraph.strip()]
    return paragraphs if count is None else [p for p in paragraphs if len(p) >= 300][:count]


def wikipedia_windows(tokenizer: PreTrainedTokenizerBase, tokens: int, sample: int) -> list[torch.Tensor]:
    """Batches of eight windows of 512 tokens; samples do not overlap."""
    start = sample * tokens
    text = "\n".join(wikipedia_paragraphs())[: 8 * (start + tokens)]
    ids = tokenizer(text)["input_ids"][start : start + tokens]
    return list(torch.tensor(ids).view(-1, WINDOW).split(8))


def main(argv: Sequence[str] | None = None) -> dict[str, list[dict[str, float]]]:
    parser = argparse.ArgumentParser(description="SmolLM2's perplexity after rounding, and after rotated GPTQ.")
    parser.add_argument("--tokens", type=int, default=1024, help="evaluate on so many (default 1024)")
    parser.add_argument("--calibration", type=int, default=2048, help="calibrate on so many (default 2048)")
    parser.add_argument("--samples", type=int, nargs="+", default=[0], help="calibration samples (default 0)")
    parser.add_argument("--configs", nargs="*", choices=CONFIGS, default=DEFAULT, metavar="CONFIG")
    parser.add_argument("--device", default="cpu", help="quantize there, block by block, and evaluate there")
    arguments = parser.parse_args(argv)
    for option in ("tokens", "calibration"):
        if getattr(arguments, option) % WINDOW or getattr(arguments, option) < WINDOW:
            parser.error(f"--{option} {getattr(arguments, option)}: give a multiple of {WINDOW}")

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model, tokenizer = load_smollm2()
    windows = news_windows(tokenizer, arguments.tokens).to(arguments.device)
    fp32 = perplexity(copy.deepcopy(model).to(arguments.device), windows)
    results = {"fp32": [{"perplexity": fp32, "seconds": 0.0}]}
    table = Table("config", "calibration sample", "perplexity", "seconds", title="SmolLM2-135M-Instruct")
    table.add_row("fp32", "", f"{fp32:.2f}", "")
    for name in arguments.configs:
        config = CONFIGS[name]
        calibrates = config.gptq is not None
        for sample in arguments.samples if calibrates else arguments.samples[:1]:
            quantized = copy.deepcopy(model)
            batches = wikipedia_windows(tokenizer, arguments.calibration, sample) if calibrates else None
            start = time.perf_counter()
            quantize_(quantized, config, calibration=batches, device=arguments.device)
            seconds = time.perf_counter() - start
            quantized.to(arguments.device)  # what quantize_ left on the CPU: norms and embeddings
            row = {"seconds": seconds, "perplexity": perplexity(quantized, windows)}
            results.setdefault(name, []).append(row)
            table.add_row(name, str(sample) if calibrates else "", f"{row['perplexity']:.2f}", f"{row['seconds']:.0f}")
    Console().print(table)
    return results


if __name__ == "__main__":
    main()
