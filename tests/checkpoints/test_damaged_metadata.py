"""Damaged metadata of mxquant's own files: `load_state` and `unflatten_state_dict` refuse it with one ValueError."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mxquant import flatten_state_dict, load_state, quantize, unflatten_state_dict
from mxquant.checkpoints.files import WEIGHTS

FLAT, METADATA = flatten_state_dict({"a.weight": quantize(torch.linspace(-1, 1, 256).reshape(4, 64), "mxfp4")})
HUGE = 10**20
FIELDS: list[tuple[str, list[Any]]] = [
    ("axis", [-3, 0, 1, HUGE, -HUGE, None, 1.5, "x", []]),
    ("shape", [[], [4], [64, 4], [HUGE, 64], [-4, 64], 4, {}]),
    ("dtype", [[], {}, None, 3, "int8"]),
    ("format", [[], {}, None, 3, "int4"]),
    ("activation", [[], {}, 3, "int4"]),
    ("activation_scale_mode", [[], {}, 3, "nope"]),
    ("rotation", [[], {}, "x", 3, HUGE]),
    ("block_offset", [[], -1, 1.5, HUGE, None]),
    ("layout", [[], {}, None, 3, "tiles"]),
    ("version", [[], {}, None, 2, HUGE]),
    ("unknown", [1]),
]


def edited(change: Callable[[dict[str, Any]], Any]) -> str:
    content = json.loads(METADATA["mxquant"])
    change(content)
    return json.dumps(content)


def set_field(name: str, value: Any) -> str:
    return edited(lambda content: content["tensors"]["a.weight"].update({name: value}))


CASES = {f"{name} {value!r}": set_field(name, value) for name, values in FIELDS for value in values} | {
    "nested": "[" * 100_000 + "]" * 100_000,
    "nested fields": '{"version":1,"tensors":{"a.weight":' + "[" * 100_000 + "]" * 100_000 + "}}",
    "an alias of a list": edited(lambda content: content.update(aliases={"x": ["a.weight"]})),
    "an alias of nothing": edited(lambda content: content.update(aliases={"x": "y"})),
    "a list of aliases": edited(lambda content: content.update(aliases=["x"])),
    "a list of tensors": edited(lambda content: content.update(tensors=["a.weight"])),
    "a tensor that is a list": edited(lambda content: content["tensors"].update({"a.weight": []})),
    "a missing tensor": edited(lambda content: content["tensors"].update(b=content["tensors"]["a.weight"])),
    "no object": "[]",
}


@pytest.mark.parametrize("what", CASES)
def test_damaged_metadata_is_a_value_error(what: str, tmp_path: Path) -> None:
    metadata = {"mxquant": CASES[what]}
    with pytest.raises(ValueError, match=r"."):
        unflatten_state_dict(dict(FLAT), metadata)
    save_file(FLAT, tmp_path / WEIGHTS, metadata)
    with pytest.raises(ValueError, match=r"."):
        load_state(tmp_path)


def test_undamaged_metadata_is_read(tmp_path: Path) -> None:
    """The control: what is refused above is refused for its damage."""
    save_file(FLAT, tmp_path / WEIGHTS, METADATA)
    expected = unflatten_state_dict(dict(FLAT), METADATA)["a.weight"]
    assert torch.equal(load_state(tmp_path)["a.weight"].dequantize(), expected.dequantize())
