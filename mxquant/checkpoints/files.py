"""The files of a checkpoint: their headers and configs, and a reader of their tensors.

A checkpoint is one of

- one safetensors file,
- a folder with `model.safetensors`,
- a folder with shards and `model.safetensors.index.json`,
- a folder with all shards `*-00001-of-00007.safetensors`, ... and no index.

Nothing is unpickled. The safetensors library checks headers against the sizes of the files before anything is
allocated. Tensors are views of memory-mapped files.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
Documents = dict[str, dict[str, Any]]
"""JSON objects by file name."""
_SHARD = re.compile(r"(.+)-(\d{1,6})-of-(\d{1,6})\.safetensors")
_MAX_JSON_BYTES = 100 * 2**20
"""What safetensors allows a header."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as its file's header declares it."""

    file: str
    dtype: str
    """As safetensors spells it: "U8", "BF16", "F8_E4M3", ..."""
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Checkpoint:
    """What is on disk."""

    path: Path
    """The folder, also of a single file."""
    tensors: dict[str, TensorInfo]
    headers: tuple[dict[str, str], ...]
    """The distinct string metadata of the files' headers."""
    config: dict[str, Any]
    """config.json; empty where there is none."""
    sidecars: Documents = field(default_factory=dict)
    """Other JSON files that describe the weights, by file name; those that are there."""

    @property
    def configs(self) -> list[dict[str, Any]]:
        """config.json and its `text_config`, where there is one."""
        return [config for config in (self.config, self.config.get("text_config")) if isinstance(config, dict)]

    @property
    def quantization_config(self) -> dict[str, Any]:
        """Of the first of `configs` that has one; empty where none has."""
        for config in self.configs:
            if (found := config.get("quantization_config")) is not None:
                return _object(found, self.path / CONFIG, "quantization_config")
        return {}

    @property
    def file_sizes(self) -> list[int]:
        """In bytes, of the files that hold tensors."""
        return [(self.path / file).stat().st_size for file in {info.file for info in self.tensors.values()}]


class Reader:
    """Reads tensors of one checkpoint as views of its files. A file stays mapped while a view of it lives."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._handles: dict[str, Any] = {}

    def read(self, name: str) -> Tensor:
        file = self._checkpoint.tensors[name].file
        if file not in self._handles:
            self._handles[file] = _open(self._checkpoint.path / file)
        try:
            tensor: Tensor = self._handles[file].get_tensor(name)
        except Exception as error:
            raise ValueError(f"tensor {name!r} of {file} cannot be read: {error}; download the file anew") from error
        return tensor


def open_checkpoint(path: str | os.PathLike[str], sidecars: Iterable[str] = ()) -> Checkpoint:
    """Read the headers and configs of a checkpoint.

    Args:
        path: a folder, or one safetensors file. Configs beside a single file are read if they describe it.
        sidecars: JSON files beside config.json to read where they exist.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: a file is damaged, or files contradict each other; or the one file is a shard of a quantized
            checkpoint whose header does not say what is quantized.
    """
    given = Path(path)
    if given.is_file():
        folder, files, listed = given.parent, [given.name], None
    elif given.is_dir():
        folder = given
        files, listed = _files_of(folder)
    else:
        raise FileNotFoundError(
            f"{given} is neither a folder nor a file; name the folder of a checkpoint. Nothing is downloaded: of a "
            "model on Hugging Face's hub, give the folder that huggingface_hub.snapshot_download(name) returns"
        )
    tensors: dict[str, TensorInfo] = {}
    headers: list[dict[str, str]] = []
    for file in files:
        _add(folder, file, tensors, headers)
    if listed is not None:
        _check_index(listed, tensors)
    documents: Documents = {}
    if given.is_dir() or _has_configs(given):
        contents = {name: json_of(folder / name) for name in (CONFIG, *sidecars)}
        documents = {name: content for name, content in contents.items() if content is not None}
    checkpoint = Checkpoint(folder, tensors, tuple(headers), documents.pop(CONFIG, {}), documents)
    # NOTE: without headers only the config says which tensors are codes and scales, and they may be in other shards.
    is_part = given.is_file() and _SHARD.fullmatch(given.name) and not headers
    if is_part and (checkpoint.quantization_config or checkpoint.sidecars):
        raise ValueError(
            f"{given} is one of several files of a quantized checkpoint, and its header does not say what is "
            f"quantized; give the folder, {folder}"
        )
    return checkpoint


def _has_configs(file: Path) -> bool:
    """Whether the configs beside a file describe it."""
    alone = [other.name for other in file.parent.glob("*.safetensors")] == [file.name]
    return alone or file.name == WEIGHTS or _SHARD.fullmatch(file.name) is not None


def headers_of(files: Iterable[str | os.PathLike[str]]) -> list[dict[str, str]]:
    """The distinct string metadata of safetensors files' headers; ValueError if a file is damaged."""
    headers: list[dict[str, str]] = []
    for file in map(Path, files):
        _add(file.parent, file.name, {}, headers)
    return headers


def _files_of(folder: Path) -> tuple[list[str], dict[str, str] | None]:
    """The files that hold weights, and the index's map of tensors to files if there is one."""
    if (folder / INDEX).exists():
        listed = _weight_map(folder)
        return sorted(set(listed.values())), listed
    if (folder / WEIGHTS).exists():
        return [WEIGHTS], None
    others = sorted(file.name for file in folder.glob("*.safetensors"))
    if len(others) == 1 or _are_all_shards(folder, others):
        return others, None
    pickled = [file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern)]
    hint = f"; {pickled[0]} is a pickle, which is never read: convert it to safetensors" if pickled else ""
    raise FileNotFoundError(f"{folder} has neither {WEIGHTS} nor {INDEX} (safetensors there: {others}){hint}")


def _are_all_shards(folder: Path, names: list[str]) -> bool:
    """Whether the names of files without an index are those of all shards of one checkpoint."""
    parts = [_SHARD.fullmatch(name) for name in names]
    whole = {(part[1], int(part[3])) for part in parts if part is not None}
    if not names or None in parts or len(whole) > 1:
        return False
    ((_, count),) = whole
    there = {int(part[2]) for part in parts if part is not None}
    if missing := [number for number in range(1, count + 1) if number not in there]:
        raise ValueError(f"{folder} has {len(there)} of {count} shards; number {missing[0]} is missing: download it")
    return len(names) == count


def _weight_map(folder: Path) -> dict[str, str]:
    content = json_of(folder / INDEX) or {}
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{folder / INDEX} has no weight_map of tensors to files; download it anew")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or "\\" in file or not file.endswith(".safetensors"):
            raise ValueError(
                f"{folder / INDEX} says that {name!r} is in {file!r}; only safetensors files beside the index are read"
            )
        if not (folder / file).is_file():
            raise ValueError(f"{folder / INDEX} says that {name!r} is in {file!r}, which is missing; download it")
    return weight_map


def _check_index(listed: dict[str, str], tensors: dict[str, TensorInfo]) -> None:
    for name, file in listed.items():
        if name not in tensors or tensors[name].file != file:
            raise ValueError(f"the index says that {name!r} is in {file}, which does not have it; download both anew")
    if extra := tensors.keys() - listed.keys():
        name = min(extra)
        raise ValueError(f"{tensors[name].file} holds {name!r}, which the index does not list; download both anew")


def _add(folder: Path, file: str, tensors: dict[str, TensorInfo], headers: list[dict[str, str]]) -> None:
    handle = _open(folder / file)
    for name in handle.keys():  # noqa: SIM118 - a safe_open handle is no mapping
        if name in tensors:
            raise ValueError(f"{name!r} is both in {tensors[name].file} and in {file}; one of them must go")
        declared = handle.get_slice(name)
        tensors[name] = TensorInfo(file, str(declared.get_dtype()), tuple(declared.get_shape()))
    header = {key: value for key, value in (handle.metadata() or {}).items() if key != "format"}
    if header and header not in headers:
        headers.append(header)


def _open(file: Path) -> Any:
    from safetensors import safe_open

    try:
        return safe_open(file, "pt")
    except Exception as error:
        raise ValueError(f"{file} is no intact safetensors file: {error}; download it anew") from error


def json_of(file: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if there is no such file."""
    if not file.is_file():
        return None
    if (size := file.stat().st_size) > _MAX_JSON_BYTES:
        raise ValueError(f"{file} has {size:,} bytes; a config or index has at most {_MAX_JSON_BYTES:,}")
    try:
        content = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no intact JSON: {error}; download it anew") from error
    return _object(content, file, "the content")


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An `object_pairs_hook` for `json` that refuses an object with one key twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    return found


def _object(content: Any, file: Path, what: str) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ValueError(f"{what} of {file} is no JSON object but {type(content).__name__}; download it anew")
    return content
