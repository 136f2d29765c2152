"""How much accuracy does each format cost on the two small models of the examples?

Runs both examples at their full size: MiniLM's embeddings in every format (64 texts), SmolLM2's perplexity on
20,480 tokens. Nothing random is involved: another machine differs only by the order in which its matmuls add.

    python benchmarks/accuracy.py       # some minutes
"""

import argparse
from collections.abc import Sequence

from example_scripts import load
from record import Record

COSINE = {"mxfp4 W4A16": 0.95, "mxfp4 W4A4": 0.925, "nvfp4 W4A16": 0.965, "nvfp4 W4A4": 0.955}
PERPLEXITY = {"mxfp4 W4A16": 46, "mxfp4 W4A4": 95, "nvfp4 W4A4": 49}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20_480, help="for SmolLM2 (default 20480)")
    arguments = parser.parse_args(argv)

    record = Record(
        "accuracy",
        "what each format costs on all-MiniLM-L6-v2 and SmolLM2-135M-Instruct",
        "examples/minilm_embeddings.py on 64 texts; examples/smollm2_perplexity.py on "
        f"{arguments.tokens} tokens in windows of 512; round to nearest, default scale modes; the embeddings in fp32",
    )
    for name, figures in load("minilm_embeddings").main([]).items():
        rounded = {key: round(value, 4) for key, value in figures.items()}
        record.results.append({"model": "all-MiniLM-L6-v2", "config": name, **rounded})
        if name in COSINE:
            record.goal(f"MiniLM, {name}: mean cosine to fp32", figures["cosine"], at_least=COSINE[name])

    rows = load("smollm2_perplexity").main(["--tokens", str(arguments.tokens), "--length", "0"])
    for name, row in rows.items():
        perplexity = round(float(row["perplexity"]), 2)
        record.results.append({"model": "SmolLM2-135M-Instruct", "config": name, "perplexity": perplexity})
        if name in PERPLEXITY and arguments.tokens == 20_480:
            record.goal(f"SmolLM2, {name}: perplexity", perplexity, at_most=PERPLEXITY[name])
    record.save()


if __name__ == "__main__":
    main()
