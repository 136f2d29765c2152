"""What to answer to a value that is no config: the remedy for what people bring from elsewhere."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

import torch
from torchao.core.config import AOBaseConfig

from mxquant.formats.spec import FORMAT_ALIASES, WEIGHT_FORMATS, similar_formats

_BLOCK = "a format's block is fixed: 32 elements, NVFP4's 16"
_QUANTIZE = "it is an argument of quantize_, not of the config"
_CLASS = "the config's class names the format"
FIELDS_ELSEWHERE = {
    "block_size": _BLOCK,
    "group_size": _BLOCK,
    "calibration": _QUANTIZE,
    "device": _QUANTIZE,
    "filter_fn": _QUANTIZE,
    "resume": _QUANTIZE,
    "format": f"{_CLASS}, and a dict names it under 'weight'",
    "weight": _CLASS,
    "bits": _CLASS,
    "dtype": "a quantized weight stands for values of its original's dtype",
    "weight_only": "activation=None is weight-only",
    "modules_to_not_convert": "map those modules to None: {'linear': 'mxfp4', 'name': None}",
    "ignore": "map those modules to None: {'linear': 'mxfp4', 'name': None}",
}
"""Keywords that configs of other libraries have, or other functions of this one, and what to do instead."""

_UNQUANTIZED = {"none", "false", "bf16", "bfloat16", "fp16", "float16", "half", "fp32", "float32", "16", "32", "a16"}


def suggestion(name: str, known: Iterable[str]) -> str:
    """ "; did you mean ...?" if `known` has a name similar to `name`, else ""."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def format_hint(value: object) -> str:
    """What is meant by a weight format's name (a string, dtype or number of bits) that is none; empty if unclear."""
    text = str(value)
    if match := re.fullmatch(r"[wW](\d)[aA](\d+)", text):
        formats = _either(similar_formats(match[1], WEIGHT_FORMATS))
        activation = "None" if match[2] == "16" else "a format's name"
        return f"; {text} is {formats or 'a weight format'} with activation={activation}" if formats else ""
    near = _either(similar_formats(text, (*FORMAT_ALIASES, *WEIGHT_FORMATS)))
    if re.search("int", text, re.IGNORECASE):
        return f"; there are no integer formats{f', of that size there is {near}' if near else ''}"
    return f"; did you mean {near}?" if near else suggestion(text.lower(), (*WEIGHT_FORMATS, *FORMAT_ALIASES))


def activation_hint(value: object) -> str:
    """What is meant by an activation that is no format."""
    if str(value).removeprefix("torch.").lower() in _UNQUANTIZED:
        return "; did you mean activation=None?"
    return ""


def field_hint(name: str, known: Iterable[str]) -> str:
    """What is meant by a keyword that is no field of a config."""
    if name in FIELDS_ELSEWHERE:
        return f"; {FIELDS_ELSEWHERE[name]}"
    return suggestion(name, known)


def type_hint(value: object) -> str:
    """What to do with a value of another type that is no config."""
    cls = value if isinstance(value, type) else type(value)
    if issubclass(cls, AOBaseConfig):
        return "; use torchao.quantization.quantize_ for torchao's own configs"
    if cls.__name__ == "MXQuantConfig":
        return "; an MXQuantConfig is for transformers: from_pretrained(..., quantization_config=...)"
    if any(base.__module__.startswith("transformers.") for base in cls.__mro__):
        return "; it is a config of transformers, for from_pretrained(..., quantization_config=...)"
    if isinstance(value, (torch.dtype, int)) and not isinstance(value, bool):
        return format_hint(value)
    return ""


def _either(names: list[str]) -> str:
    return " or ".join(map(repr, names))
