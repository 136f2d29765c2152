"""The command line: `python -m mxquant {quantize, inspect, report, explain}`.

Exit codes: 0 done; 1 refused, damaged, or compared in part only, with the reason on stderr; 2 wrong usage; 130
interrupted. With `--json`, stdout is one JSON object and nothing else.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mxquant.checkpoints import Content, get_producer, read_content, writable_producers
from mxquant.checkpoints.compare import Tensors, compare
from mxquant.checkpoints.files import without_duplicates
from mxquant.checkpoints.weight_spec import build
from mxquant.config import resolve_mapping
from mxquant.explanation import explain
from mxquant.formats import ACTIVATION_FORMATS, FORMAT_ALIASES, WEIGHT_FORMATS, get_format
from mxquant.integrations.streaming import quantize_checkpoint
from mxquant.tables import text_table

_ERRORS = (ValueError, TypeError, NotImplementedError, OSError, ImportError, RuntimeError)
_FORMATS = (*WEIGHT_FORMATS, *FORMAT_ALIASES)
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class _Answer:
    """What a command prints: `result` as JSON with `--json`, `text` without."""

    result: Any
    text: str
    complaint: str | None = None
    """Printed on stderr if the command was done only in part."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        arguments: the command line without the program's name; None: that of `sys.argv`.

    Raises:
        SystemExit: wrong usage, with code 2.
    """
    options = _parser().parse_args(arguments)
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING, stream=sys.stderr)
    try:
        answer: _Answer = options.command(options)
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    except _ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    try:
        print(json.dumps(answer.result, indent=2) if options.json else answer.text)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader stopped, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if answer.complaint is None:
        return 0
    print(f"error: {answer.complaint}", file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mxquant",
        description="Quantize checkpoints to MXFP4, MXFP6, MXFP8 and NVFP4, and look into them.",
        epilog="exit codes: 0 done, 1 refused, damaged, or compared in part only, 2 wrong usage, 130 interrupted",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_quantize(commands)
    inspect = _add_command(
        commands, "inspect", _run_inspect, "what a checkpoint holds, by its headers; no model code is needed"
    )
    inspect.add_argument("path", metavar="PATH", help="a folder, or one safetensors file")
    report = _add_command(
        commands, "report", _run_report, "SQNR and differing bytes of each tensor that two checkpoints have"
    )
    report.add_argument("first", metavar="A", help="the reference")
    report.add_argument("second", metavar="B", help="what is compared with it")
    explained = _add_command(
        commands, "explain", _run_explain, "which backend computes each kind of weight on a device, and why"
    )
    explained.add_argument("path", metavar="PATH", help="a folder, or one safetensors file")
    explained.add_argument("--device", default="cpu", help="such as cuda or cuda:1 (default: %(default)s)")
    return parser


def _add_command(commands: Any, name: str, run: Callable[..., _Answer], about: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=about, description=f"{about}.")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.set_defaults(command=run, refuse_usage=command.error)
    return command


def _add_quantize(commands: Any) -> None:
    command = _add_command(
        commands, "quantize", _run_quantize, "quantize an unquantized checkpoint, one parameter at a time"
    )
    command.add_argument("source", metavar="SRC", help="the folder of the checkpoint")
    command.add_argument("destination", metavar="DST", help="the folder to write; an old one is replaced at the end")
    what = command.add_mutually_exclusive_group(required=True)
    what.add_argument("--format", choices=_FORMATS, help="of the weights of every linear layer and of all experts")
    what.add_argument("--config", metavar="FILE", help="JSON as quantize_ takes it: a mapping from kinds and names")
    command.add_argument(
        "--activation",
        choices=("same", "none", *ACTIVATION_FORMATS, *FORMAT_ALIASES),
        help="with --format: 'same' (the default), 'none' for weight-only, or another format",
    )
    command.add_argument(
        "--as",
        dest="producer",
        choices=writable_producers(),
        default="mxquant",
        help="whose files to write (default: %(default)s)",
    )
    command.add_argument("--max-shard-bytes", type=_size, metavar="N", help="the most that one file holds, such as 5GB")


def _size(text: str) -> int:
    """A number of bytes from text, with a unit or without, as transformers' `max_shard_size` takes it."""
    found = re.fullmatch(r"(\d+)\s*(\w*)", text.strip(), re.ASCII)
    value = int(found[1]) * _UNITS.get(found[2].upper(), 0) if found else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is no size; give a number of bytes, or such as 500MB, 5GB, 2GiB")
    return value


def _run_quantize(options: argparse.Namespace) -> _Answer:
    def progress(names: Iterable[str]) -> Iterable[str]:
        from tqdm.auto import tqdm

        return tqdm(names, desc="quantizing", unit="parameter", disable=None)

    config = _config_of(options)
    try:
        done = quantize_checkpoint(
            options.source,
            options.destination,
            config,
            producer=options.producer,
            max_shard_bytes=options.max_shard_bytes,
            progress=progress,
        )
    except NotImplementedError as error:
        if options.format is None or options.producer == "mxquant":
            raise
        how = "on the command line, weight-only is --activation none, and mxquant's own files come without --as"
        raise NotImplementedError(f"{error} ({how})") from error
    reasons: dict[str, list[str]] = {}
    for name, reason in sorted(done.skipped.items()):
        reasons.setdefault(reason, []).append(name)
    result = {
        "destination": options.destination,
        "producer": options.producer,
        "quantized": done.weights,
        "skipped": done.skipped,
        "bytes_before": done.nbytes_before,
        "bytes": done.nbytes,
    }
    text = (
        f"{done.weights} weights quantized, {done.nbytes_before:,} bytes to {done.nbytes:,}, as {options.producer} in "
        f"{options.destination}"
    )
    for reason, names in sorted(reasons.items()):
        text += f"\nleft as they are, {reason}: {len(names)} ({_some(names)})"
    return _Answer(result, text)


def _some(names: Sequence[str]) -> str:
    """The first three names; `--json` lists all."""
    return ", ".join(names[:3]) + ", ..." * (len(names) > 3)


def _config_of(options: argparse.Namespace) -> object:
    """What `--format` or `--config` gives. Where it names no activation scale mode, that of the producer's readers."""
    activation = options.activation or "same"
    given: object = {"weight": options.format, "activation": None if activation == "none" else activation}
    if options.config is not None:
        if options.activation is not None:
            options.refuse_usage("--activation goes with --format; with --config, write it in the file")
        given = _read_config(options)
    mapping = resolve_mapping(given)
    for key, config in mapping.items():
        if config is None or config.activation_format is None or config.activation_scale_mode is not None:
            continue
        implied = get_producer(options.producer).activation_scale_mode(config.activation_format)
        if implied is not None and get_format(config.activation_format, activation=True).scale_modes:
            mapping[key] = replace(config, activation_scale_mode=implied)
    return mapping


def _read_config(options: argparse.Namespace) -> object:
    file = Path(options.config)
    if not file.is_file():
        options.refuse_usage(f"--config {file} is no file; name one with JSON as quantize_ takes it")
    try:
        content = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--config {file} is no JSON: {error}") from error
    if not isinstance(content, (dict, str)):
        raise ValueError(f"--config {file} holds {content!r}; it is an object, or a format's name")
    return content


def _run_inspect(options: argparse.Namespace) -> _Answer:
    content = read_content(options.path)
    rows = [_row(content, name) for name in sorted(content.names)]
    producer = None if content.producer is None else content.producer.name
    result = {
        "path": str(options.path),
        "producer": producer,
        "tensors": rows,
        "aliases": content.aliases,
        "left_out": content.ignored,
        "bytes": sum(content.checkpoint.file_sizes),
        "parameters": sum(math.prod(row["shape"]) for row in rows),
    }
    cells = [
        [
            row["name"],
            row["format"],
            (row["precision"] or "") + (f", rotation {row['rotation']}" if row["rotation"] else ""),
            " x ".join(map(str, row["shape"])),
            f"{row['bits']:.2f}",
            f"{row['bytes']:,}",
        ]
        for row in rows
    ]
    table = text_table(["tensor", "format", "W/A", "shape", "bits", "bytes"], cells)
    quantized = sum(row["precision"] is not None for row in rows)
    title = f"{options.path}: {producer or 'not quantized'}, {quantized} of {len(rows)} tensors quantized"
    totals = f"{result['parameters']:,} parameters, {result['bytes']:,} bytes in files"
    return _Answer(result, f"{title}\n{table}\n{totals}")


def _row(content: Content, name: str) -> dict[str, Any]:
    spec, shape, nbytes = content.quantized.get(name), content.shape(name), content.nbytes(name)
    bits = 8 * nbytes / max(1, math.prod(shape))
    row: dict[str, Any] = {"name": name, "shape": list(shape), "bits": bits, "bytes": nbytes}
    if spec is None:
        dtype = content.checkpoint.tensors[name].dtype
        return row | {"format": dtype.lower(), "precision": None, "activation": None, "rotation": None}
    scheme = spec.scheme
    return row | {
        "format": scheme.weight,
        "precision": scheme.precision,
        "activation": scheme.activation,
        "rotation": scheme.rotation,
    }


def _run_report(options: argparse.Namespace) -> _Answer:
    whole = compare(options.first, options.second, _by_model)
    result = {
        "first": str(options.first),
        "second": str(options.second),
        "tensors": [
            vars(d) | {"kinds": list(d.kinds), "shape": list(d.shape), "sqnr_db": _finite(d.sqnr_db)}
            for d in whole.tensors
        ],
        "only_first": whole.only_first,
        "only_second": whole.only_second,
        "other_shapes": whole.other_shapes,
    }
    cells = [
        [
            d.name,
            *d.kinds,
            "equal" if d.sqnr_db == math.inf else f"{d.sqnr_db:.2f}",
            "-" if d.differing_bytes is None else f"{d.differing_bytes:,}",
            f"{d.nbytes:,}",
        ]
        for d in whole.tensors
    ]
    lines = [text_table(["tensor", "A", "B", "SQNR dB", "differing bytes", "bytes"], cells)] if cells else []
    left_out = {
        "only in A": whole.only_first,
        "only in B": whole.only_second,
        "of other shapes": whole.other_shapes,
    }
    lines += [f"{what}: {len(names)} ({_some(names)})" for what, names in left_out.items() if names]
    count = sum(map(len, left_out.values()))
    complaint = f"{count} tensors are not compared; the report says which, with --json all of them" if count else None
    return _Answer(result, "\n".join(lines), complaint)


def _by_model(content: Content) -> Tensors | None:
    """The checkpoint by its model's names; None if transformers is not installed or does not know the model."""
    if importlib.util.find_spec("transformers") is None:
        return None
    from transformers import CONFIG_MAPPING

    from mxquant.integrations.parameters import parameters_of

    if content.as_in_transformers().checkpoint.config.get("model_type") not in CONFIG_MAPPING:
        return None
    return parameters_of(content)


def _finite(value: float) -> float | str:
    """JSON has no infinity."""
    return value if math.isfinite(value) else str(value)


def _run_explain(options: argparse.Namespace) -> _Answer:
    content = read_content(options.path)
    kinds: dict[tuple[Any, ...], list[str]] = {}
    for name, spec in content.quantized.items():
        kinds.setdefault((spec.scheme, content.shape(name), spec.axis), []).append(name)
    if not kinds:
        raise ValueError(f"{options.path} is not quantized, so no backend computes it; quantize it first")
    explained = [
        (names, explain(_without_values(content, names[0]), device=options.device)) for names in kinds.values()
    ]
    result = [
        {"weights": names, "matmul": e.matmul, "chosen": e.chosen, "backends": [list(pair) for pair in e.backends]}
        for names, e in explained
    ]
    text = "\n\n".join(f"{len(names)} weights, such as {names[0]}\n{e}" for names, e in explained)
    return _Answer(result, text)


def _without_values(content: Content, name: str) -> Any:
    """A weight of the file's shapes and formats whose bytes are not read."""
    spec, tensors = content.quantized[name], content.checkpoint.tensors

    def read(part: str) -> torch.Tensor:
        if tensors[part].dtype == "F32":
            return torch.ones(tensors[part].shape)
        return torch.zeros(1, dtype=torch.uint8).expand(tensors[part].shape)

    return build(spec, content.dtype, read)
