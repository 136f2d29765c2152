"""Writing a checkpoint: shard by shard into a folder beside the target, which takes its place when all is there."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mxquant.checkpoints.atomic_replace import atomic_replace, recover
from mxquant.checkpoints.files import INDEX, WEIGHTS, json_of
from mxquant.tensor import MXTensor
from mxquant.tensor.metadata import VERSION
from mxquant.tensor.state import METADATA_KEY

MAX_SHARD_BYTES = 5 * 10**9
_WEIGHTS = re.compile(r"model(-+\d+-of-\d+)?\.safetensors")
"""The names that checkpoints give their files of weights; an index may list others."""


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A new folder to write into, which becomes `path` if the block ends well, and is removed if it does not.

    A folder that is there already is replaced as a whole; files in it that are no weights of a checkpoint, such as a
    tokenizer's or an adapter's, are kept, links as links. Until the new one is complete, the old one is untouched.

    Raises:
        FileExistsError: `path` is a file, the current folder, a mount point, or a folder with folders of its own.
        OSError: the new folder is complete and cannot take its place; the message says where it is left.
    """
    target = Path(os.path.realpath(path))  # a link stays one, and what it leads to is replaced
    _check_replaceable(target)
    recover(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent))
    is_complete = False
    try:
        fresh.chmod(0o777 & ~_umask())
        yield fresh
        _sync(fresh)
        is_complete = True
        _keep_others(target, fresh)
        atomic_replace(fresh, target)
    except OSError as error:
        if not is_complete:
            shutil.rmtree(fresh, ignore_errors=True)
            raise
        left = f"{target} cannot be replaced ({error.strerror}); the new checkpoint is complete in {fresh}"
        raise OSError(error.errno, left) from error
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def _check_replaceable(target: Path) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise FileExistsError(f"{target} is a file; name a folder to write the checkpoint to")
    if target.samefile("."):
        raise FileExistsError(f"{target} is the current folder and is not replaced; name another one, or one in it")
    if target.is_mount():
        raise FileExistsError(f"{target} is a mount point, which cannot be replaced; name a folder in it")
    if nested := [entry.name for entry in target.iterdir() if entry.is_dir()]:
        raise FileExistsError(f"{target} has folders of its own ({nested[0]}) and is not replaced; name a new one")


def _keep_others(old: Path, fresh: Path) -> None:
    if not old.is_dir():
        return
    weights = {INDEX, "hf_quant_config.json", *_listed(old)}
    for file in old.iterdir():
        is_weights = _WEIGHTS.fullmatch(file.name) or file.name in weights
        written = fresh / file.name
        if (file.is_file() or file.is_symlink()) and not is_weights and not written.exists():
            shutil.copy2(file, written, follow_symlinks=False)


def _listed(old: Path) -> set[str]:
    """The files of weights in the index of a folder; none of a damaged one, which is replaced like any other."""
    with contextlib.suppress(ValueError):
        weight_map = (json_of(old / INDEX) or {}).get("weight_map")
        if isinstance(weight_map, dict):
            return {name for name in map(str, weight_map.values()) if name.endswith(".safetensors")}
    return set()


def _sync(folder: Path) -> None:
    for file in folder.iterdir():
        with file.open("rb+") as handle:
            os.fsync(handle.fileno())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


class ShardWriter:
    """Takes tensors one by one and writes a file whenever it has a shard's worth of them.

    Args:
        folder: an empty one, see `replacing`.
        max_shard_bytes: the most that a file holds, but that one tensor may be larger.
    """

    def __init__(self, folder: Path, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        if max_shard_bytes < 1:
            raise ValueError(f"max_shard_bytes={max_shard_bytes} is no size; give the bytes that a file may have")
        self._folder = folder
        self._limit = max_shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._described: dict[str, Any] = {}
        self._shards: list[list[str]] = []
        self._names: set[str] = set()
        self.nbytes = 0
        self._pending_bytes = 0

    def add(self, tensors: Mapping[str, Tensor], described: Mapping[str, Any] | None = None) -> None:
        """Write tensors that belong together, in one file.

        Args:
            described: what mxquant's own header says of the weight that they make up, by its name.

        Raises:
            ValueError: a name was written before.
        """
        if taken := self._names & tensors.keys():
            raise ValueError(f"two tensors would be written as {min(taken)!r}; rename one of them in the model")
        size = sum(tensor.nbytes for tensor in tensors.values())
        if self._pending and self._pending_bytes + size > self._limit:
            self._flush()
        self._pending |= tensors
        self._described |= described or {}
        self._names |= tensors.keys()
        self._pending_bytes += size
        self.nbytes += size

    def finish(self, documents: Mapping[str, Mapping[str, Any]]) -> None:
        """Write what is left, the index where there are several shards, and JSON documents by their files' names."""
        self._flush()
        count = len(self._shards)
        if count == 1:
            self._part(0).rename(self._folder / WEIGHTS)
        else:
            names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
            for i, name in enumerate(names):
                self._part(i).rename(self._folder / name)
            weight_map = {t: name for name, shard in zip(names, self._shards, strict=True) for t in shard}
            write_json(self._folder / INDEX, {"metadata": {"total_size": self.nbytes}, "weight_map": weight_map})
        for name, document in documents.items():
            write_json(self._folder / name, document)

    def _part(self, index: int) -> Path:
        return self._folder / f"part-{index}.safetensors"

    def _flush(self) -> None:
        from safetensors.torch import save_file

        if not self._pending and self._shards:
            return
        metadata = {"format": "pt"}
        if self._described:
            content = {"version": VERSION, "tensors": self._described, "aliases": {}}
            metadata[METADATA_KEY] = json.dumps(content, sort_keys=True)
        contiguous = {name: _storable(tensor) for name, tensor in self._pending.items()}
        file = self._part(len(self._shards))
        save_file(contiguous, file, metadata)
        file.chmod(0o666 & ~_umask())  # safetensors leaves it to its owner alone
        self._shards.append(list(self._pending))
        self._pending, self._described, self._pending_bytes = {}, {}, 0


def described(name: str, weight: MXTensor) -> dict[str, Any]:
    """What mxquant's own header says of a weight."""
    canonical = weight.canonical()
    return {name: json.loads(canonical.metadata.to_json(tuple(canonical.shape)))}


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _storable(tensor: Tensor) -> Tensor:
    """Contiguous and with memory of its own length, as safetensors wants it, on the CPU."""
    tensor = tensor.detach().to("cpu")
    whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)
