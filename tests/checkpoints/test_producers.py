"""Producers own their details: a new one is a file and a line in the registry, and no other file knows its names."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mxquant
from mxquant import MXTensor, load_state, quantize, save_state
from mxquant.checkpoints import PRODUCERS
from mxquant.checkpoints.files import CONFIG, Checkpoint, Documents
from mxquant.checkpoints.native import Native
from mxquant.checkpoints.producer import Producer, Reading, module_of
from mxquant.checkpoints.weight_spec import WeightSpec
from mxquant.scheme import Scheme

PACKAGE = Path(mxquant.__file__).parent
OTHERS = [producer for producer in PRODUCERS.values() if not isinstance(producer, Native)]  # it has the package's name


def files_of(producer: Producer) -> set[str]:
    """The file of a producer's class, and files whose names begin with that file's."""
    own = Path(inspect.getfile(type(producer)))
    return {file.name for file in own.parent.glob(f"{own.stem}*.py")}


def mentions(source: str, producer: Producer) -> Iterator[str]:
    """String literals, docstrings included, that are or quote a producer's name, or name a sidecar of its."""
    quoted = [f"{quote}{producer.name}{quote}" for quote in "'\""]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
            if text == producer.name or any(word in text for word in (*quoted, *producer.sidecars)):
                yield f"line {node.lineno}: {text[:80]!r}"


@pytest.mark.parametrize("producer", OTHERS, ids=lambda producer: producer.name)
def test_no_other_file_knows_a_producers_names(producer: Producer) -> None:
    own = files_of(producer)
    found = {
        str(path.relative_to(PACKAGE)): list(mentions(path.read_text(), producer))
        for path in PACKAGE.rglob("*.py")
        if not (path.parent.name == "checkpoints" and path.name in own)
    }
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    ['NAME = "modelopt"', '"""Save as "modelopt"."""', "f'save as \\'modelopt\\' {x}'", 'open("hf_quant_config.json")'],
)
def test_a_mention_is_noticed(source: str) -> None:
    assert list(mentions(source, PRODUCERS["modelopt"]))


class Plain(Producer):
    """A producer as CONTRIBUTING describes one, with a sidecar and suffixes of its own."""

    name = "plain"
    sidecars = ("plain.json",)
    suffixes = (".codes", ".scales_of_codes")

    def recognizes(self, checkpoint: Checkpoint) -> bool:
        return "plain.json" in checkpoint.sidecars

    def read(self, checkpoint: Checkpoint) -> Reading:
        return Reading(
            [
                WeightSpec(
                    name=f"{module}.weight",
                    scheme=Scheme("mxfp4"),
                    qdata=f"{module}.codes",
                    scale=f"{module}.scales_of_codes",
                )
                for module in checkpoint.sidecars["plain.json"]["modules"]
            ]
        )

    def encode(self, name: str, weight: MXTensor, stored_scales: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.check_matrix(name, weight, ("mxfp4",))
        module = module_of(name)
        return {f"{module}.codes": weight.qdata, f"{module}.scales_of_codes": weight.scale}

    def config(self, weights: Mapping[str, MXTensor], ordinary: Iterable[str]) -> Documents:
        return {"plain.json": {"modules": [module_of(name) for name in weights]}}


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRODUCERS, "plain", Plain())


def state() -> dict[str, Tensor]:
    return {"a.weight": quantize(torch.randn(4, 64, dtype=torch.bfloat16), "mxfp4"), "norm.weight": torch.ones(4)}


def test_a_registered_producer_is_written_and_read(plain: None, tmp_path: Path) -> None:
    saved = state()
    save_state(saved, tmp_path / "saved", "plain")
    loaded: dict[str, Any] = load_state(tmp_path / "saved")
    assert torch.equal(loaded["a.weight"].dequantize(), saved["a.weight"].dequantize())
    assert torch.equal(loaded["norm.weight"], saved["norm.weight"])


def test_its_sidecar_is_replaced_with_the_weights(plain: None, tmp_path: Path) -> None:
    save_state(state(), tmp_path / "saved", "plain")
    (tmp_path / "saved" / "tokenizer.json").write_text("{}")
    save_state(state(), tmp_path / "saved", "quark")
    files = {file.name for file in (tmp_path / "saved").iterdir()}
    assert files == {CONFIG, "model.safetensors", "tokenizer.json"}


def test_its_suffixes_are_those_of_weights(plain: None, tmp_path: Path) -> None:
    save_state(state(), tmp_path / "saved", "plain")
    (tmp_path / "saved" / "plain.json").write_text(json.dumps({"modules": []}))
    with pytest.raises(ValueError, match=r"'a\.(codes|scales_of_codes)' belongs to no quantized weight"):
        load_state(tmp_path / "saved")


@pytest.mark.parametrize("producer", [p for p in PRODUCERS.values() if not p.can_write], ids=lambda p: p.name)
def test_a_producer_that_is_only_read_says_so(producer: Producer, tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match="read, not written; save as one of mxquant, "):
        save_state(state(), tmp_path / "saved", producer.name)
