"""How much accuracy does each format cost on the examples' two small models, and how much does calibration win back?

MiniLM's cosine to fp32 on 64 texts, and SmolLM2's perplexity on 20,480 tokens of news. With `--gptq` after a block
rotation and GPTQ on other text, for several samples of it. There, one quantization gives two figures: the weight-only
model has the same codes, without a rule for activations. Nothing random is involved but the choice of samples: another
machine differs only by the order in which its matmuls add.

    python benchmarks/accuracy.py                           # rounded to nearest; some minutes
    python benchmarks/accuracy.py --gptq                    # half an hour; --sequential takes twice that
    python benchmarks/accuracy.py --mixed 5                 # formats mixed by sensitivity within 5 bits a weight, GPTQ
"""

import argparse
import copy
import time
from collections.abc import Sequence
from statistics import mean

import torch
from example_scripts import load
from record import Record
from torch import nn

from mxquant import GPTQ, MXFP4Config, MXFP6Config, MXTensor, NVFP4Config, quantize_, summary
from mxquant.algorithms import sensitivity

# Rounded to nearest.
ROUNDED_COSINE = {"mxfp4 W4A16": 0.95, "mxfp4 W4A4": 0.925, "nvfp4 W4A16": 0.965, "nvfp4 W4A4": 0.955}
ROUNDED_PERPLEXITY = {"mxfp4 W4A16": 46, "mxfp4 W4A4": 95, "nvfp4 W4A4": 49}
# Calibrated: goals for the mean of three samples on 20,480 tokens.
GOALS = {"mxfp4 W4A16": 36.5, "mxfp4 W4A4": 49, "nvfp4 W4A4": 46}
MIXED_GOAL = 43
COSINE_GOAL = 0.955
# Of 210 layers with 12,288 tokens, on two idle cores.
SECONDS_GOALS = {"parallel": 60, "sequential": 180}
ROTATION = {"mxfp4": 32, "nvfp4": 16}
SEARCHED = {"mxfp4": "mse", "nvfp4": "four_over_six"}
CONFIG = {"mxfp4": MXFP4Config, "nvfp4": NVFP4Config}


def rounded(arguments: argparse.Namespace) -> Record:
    record = Record(
        "accuracy",
        "what each format costs on all-MiniLM-L6-v2 and SmolLM2-135M-Instruct",
        "examples/minilm_embeddings.py on 64 texts; examples/smollm2_perplexity.py on "
        f"{arguments.tokens} tokens in windows of 512; round to nearest, default scale modes; the embeddings in fp32",
    )
    for name, figures in load("minilm_embeddings").main([]).items():
        rounded = {key: round(value, 4) for key, value in figures.items()}
        record.results.append({"model": "all-MiniLM-L6-v2", "config": name, **rounded})
        if name in ROUNDED_COSINE:
            record.goal(f"MiniLM, {name}: mean cosine to fp32", figures["cosine"], at_least=ROUNDED_COSINE[name])

    rows = load("smollm2_perplexity").main(["--tokens", str(arguments.tokens), "--length", "0"])
    for name, row in rows.items():
        perplexity = round(float(row["perplexity"]), 2)
        record.results.append({"model": "SmolLM2-135M-Instruct", "config": name, "perplexity": perplexity})
        if name in ROUNDED_PERPLEXITY and arguments.tokens == 20_480:
            record.goal(f"SmolLM2, {name}: perplexity", perplexity, at_most=ROUNDED_PERPLEXITY[name])
    return record


def weight_only_(model: nn.Module) -> None:
    """The same codes, multiplied with activations as they are."""
    for module in model.modules():
        for name, weight in list(module._parameters.items()):
            if isinstance(weight, MXTensor):
                module.register_parameter(name, nn.Parameter(weight.with_activation(None), requires_grad=False))


def smollm2(record: Record, arguments: argparse.Namespace, algorithm: GPTQ) -> None:
    gptq = load("smollm2_gptq")
    gptq.logging.set_verbosity_error()
    gptq.logging.disable_progress_bar()
    model, tokenizer = gptq.load_smollm2()
    windows = gptq.news_windows(tokenizer, arguments.tokens)
    for name in arguments.formats:
        found: dict[str, list[float]] = {p: [] for p in ("W4A4", "W4A16") if f"{name} {p}" in GOALS}
        times = []
        for sample in arguments.samples:
            batches = gptq.wikipedia_windows(tokenizer, arguments.calibration, sample)
            quantized = copy.deepcopy(model)
            start = time.perf_counter()
            modes = dict.fromkeys(("scale_mode", "activation_scale_mode"), SEARCHED[name]) if arguments.search else {}
            config = CONFIG[name](rotation=ROTATION[name], algorithm=algorithm, **modes)
            quantize_(quantized, config, calibration=batches)
            seconds = round(time.perf_counter() - start, 1)
            times.append(seconds)
            for precision, figures in found.items():
                if precision == "W4A16":
                    weight_only_(quantized)
                figures.append(round(gptq.perplexity(quantized, windows), 2))
                row = {"config": f"{name} {precision}", "sample": sample, "perplexity": figures[-1], "seconds": seconds}
                record.results.append({"model": "SmolLM2-135M-Instruct", **row})
                print(row, flush=True)
                record.write()
        if arguments.calibration == 12_288:
            mode = "sequential" if algorithm.sequential else "parallel"
            record.goal(f"SmolLM2, {name}, {mode}: mean seconds", mean(times), at_most=SECONDS_GOALS[mode])
        for precision, figures in found.items():
            if arguments.tokens == 20_480:
                goal = GOALS[f"{name} {precision}"]
                record.goal(f"SmolLM2, {name} {precision}: mean perplexity", mean(figures), at_most=goal)


def mixed(record: Record, arguments: argparse.Namespace, algorithm: GPTQ) -> None:
    """MXFP4 and MXFP6 by sensitivity, in the budget of bits a weight."""
    gptq = load("smollm2_gptq")
    gptq.logging.disable_progress_bar()
    model, tokenizer = gptq.load_smollm2()
    windows = gptq.news_windows(tokenizer, arguments.tokens)
    configs = [MXFP4Config(rotation=32, algorithm=algorithm), MXFP6Config(rotation=32, algorithm=algorithm)]
    found = []
    for sample in arguments.samples:
        batches = gptq.wikipedia_windows(tokenizer, arguments.calibration, sample)
        quantized = copy.deepcopy(model)
        start = time.perf_counter()
        mapping = sensitivity(quantized, batches[0][:2].split(1), configs).propose(arguments.mixed)
        quantize_(quantized, mapping, calibration=batches)
        seconds = round(time.perf_counter() - start, 1)
        found.append(round(gptq.perplexity(quantized, windows), 2))
        bits = round(summary(quantized).bits_per_weight or 0, 3)
        row = {"config": "mxfp4 and mxfp6, W and A", "bits": bits, "sample": sample, "perplexity": found[-1]}
        record.results.append({"model": "SmolLM2-135M-Instruct", **row, "seconds": seconds})
        print(row, flush=True)
        record.write()
    if arguments.tokens == 20_480:
        record.goal(f"SmolLM2, mixed in {arguments.mixed} bits: mean perplexity", mean(found), at_most=MIXED_GOAL)


def minilm(record: Record, arguments: argparse.Namespace, algorithm: GPTQ) -> None:
    """Calibrated on Wikipedia, evaluated on 64 news texts."""
    example, gptq = load("minilm_embeddings"), load("smollm2_gptq")
    model, tokenizer = example.load_minilm()
    batch = tokenizer(example.news_texts(64), padding=True, truncation=True, max_length=96, return_tensors="pt")
    before = example.embed(model, batch)
    found = []
    for sample in arguments.samples:
        paragraphs = gptq.wikipedia_paragraphs(96 * (sample + 1))[96 * sample :]
        batches = [tokenizer(text, truncation=True, max_length=96, return_tensors="pt") for text in paragraphs]
        quantized = copy.deepcopy(model)
        quantize_(quantized, MXFP4Config(rotation=32, algorithm=algorithm), calibration=batches)
        found.append(example.compare(before, example.embed(quantized, batch))["cosine"])
        row = {"config": "mxfp4 W4A4", "sample": sample, "cosine": round(found[-1], 4)}
        record.results.append({"model": "all-MiniLM-L6-v2", **row})
        print(row, flush=True)
    record.goal("MiniLM, mxfp4 W4A4: mean cosine to fp32", mean(found), at_least=COSINE_GOAL)


def calibrated(arguments: argparse.Namespace) -> Record:
    mode = "sequential" if arguments.sequential else "parallel"
    scales = f"SmolLM2's scales by {' and '.join(SEARCHED.values())}" if arguments.search else "default scale modes"
    record = Record(
        f"{'calibrated' if arguments.mixed is None else 'mixed'}_accuracy_{mode}{'_search' * arguments.search}",
        "what rotation and GPTQ win back on all-MiniLM-L6-v2 and SmolLM2-135M-Instruct",
        f"rotation of the block's size and GPTQ ({mode}), {scales}; SmolLM2: {arguments.calibration} tokens "
        f"of Wikipedia to calibrate, {arguments.tokens} of the Lee news corpus to evaluate, in windows of 512; the "
        "weight-only model has the codes of the other; embeddings in fp32; MiniLM: 96 paragraphs, 64 texts",
    )
    torch.manual_seed(0)
    algorithm = GPTQ(sequential=arguments.sequential)
    if arguments.mixed is None:
        minilm(record, arguments, algorithm)
        smollm2(record, arguments, algorithm)
    else:
        mixed(record, arguments, algorithm)
    return record


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20_480, help="to evaluate SmolLM2 on (default 20480)")
    parser.add_argument("--gptq", action="store_true", help="with a rotation and GPTQ instead of rounding to nearest")
    parser.add_argument("--calibration", type=int, default=12_288, help="tokens to calibrate on (default 12288)")
    parser.add_argument("--samples", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--formats", nargs="+", choices=CONFIG, default=list(CONFIG))
    parser.add_argument("--sequential", action="store_true", help="calibrate each layer on quantized predecessors")
    parser.add_argument("--search", action="store_true", help="SmolLM2 with scales that are searched for")
    parser.add_argument("--mixed", type=float, help="only formats mixed within so many bits a weight")
    arguments = parser.parse_args(argv)
    (calibrated if arguments.gptq or arguments.mixed is not None else rounded)(arguments).save()


if __name__ == "__main__":
    main()
