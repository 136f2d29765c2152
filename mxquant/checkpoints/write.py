"""Writing a checkpoint shard by shard into a new folder, which replaces the target when it is complete."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mxquant.checkpoints.atomic_replace import atomic_replace, recover
from mxquant.checkpoints.encode import Encoded
from mxquant.checkpoints.files import CONFIG, INDEX, WEIGHTS, Documents, json_of
from mxquant.checkpoints.known_producers import sidecar_files
from mxquant.checkpoints.producer import Producer
from mxquant.tensor import MXTensor

MAX_SHARD_BYTES = 5 * 10**9
_WEIGHT_FILE = re.compile(r"model(-+\d+-of-\d+)?\.safetensors")
"""Names of files of weights. An index may list others."""


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a new folder, which becomes `path` if the block succeeds, and is removed if it raises.

    An existing folder is replaced as a whole, and is untouched until then. Its files that are not weights, such as a
    tokenizer's or an adapter's, are kept; links stay links.

    Raises:
        FileExistsError: `path` is a file, the current folder, a mount point, or a folder with subfolders.
        OSError: the new folder is complete but cannot replace `path`; the message says where it is left.
    """
    target = Path(os.path.realpath(path))  # if `path` is a link, its target is replaced
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
    weights = {INDEX, *sidecar_files(), *_listed(old)}
    for file in old.iterdir():
        is_weights = _WEIGHT_FILE.fullmatch(file.name) or file.name in weights
        written = fresh / file.name
        if (file.is_file() or file.is_symlink()) and not is_weights and not written.exists():
            shutil.copy2(file, written, follow_symlinks=False)


def _listed(old: Path) -> set[str]:
    """The files that a folder's index lists."""
    with contextlib.suppress(ValueError):  # a damaged index is replaced like any other
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
    """Collects tensors and writes a file of an empty folder whenever a shard is full.

    Args:
        max_shard_bytes: the most bytes of tensors in a file, unless a single call of `add` brings more.
    """

    def __init__(self, folder: Path, producer: Producer, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        if type(max_shard_bytes) is not int:
            raise TypeError(f"max_shard_bytes={max_shard_bytes!r}: give the bytes that a file may have as an integer")
        if max_shard_bytes < 1:
            raise ValueError(f"max_shard_bytes={max_shard_bytes} is no size; give the bytes that a file may have")
        self._folder = folder
        self._producer = producer
        self._limit = max_shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._weights: dict[str, MXTensor] = {}
        self._aliases: dict[str, str] = {}
        self._shards: list[list[str]] = []
        self._names: set[str] = set()
        self.nbytes = 0
        self._pending_bytes = 0

    def add(
        self,
        tensors: Mapping[str, Tensor],
        weights: Mapping[str, MXTensor] | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        """Write tensors to one file, with whatever the producer's header says of them.

        Args:
            weights: the quantized weights that the tensors make up, by name.
            aliases: tied names, each with the name of one of these weights or tensors.
        """
        if taken := self._names & tensors.keys():
            raise ValueError(f"two tensors would be written as {min(taken)!r}; rename one of them in the model")
        size = sum(tensor.nbytes for tensor in tensors.values())
        if self._pending and self._pending_bytes + size > self._limit:
            self._flush()
        self._pending |= tensors
        self._weights |= weights or {}
        self._aliases |= aliases or {}
        self._names |= tensors.keys()
        self._pending_bytes += size
        self.nbytes += size

    def finish(self, documents: Documents, model_config: Mapping[str, Any]) -> None:
        """Write the last shard, the index if there are several, and the configs. `documents`: as `Producer.config`."""
        self._flush()
        count = len(self._shards)
        names = [WEIGHTS] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        for i, name in enumerate(names):
            self._part(i).rename(self._folder / name)
        if count > 1:
            weight_map = {t: name for name, shard in zip(names, self._shards, strict=True) for t in shard}
            _write_json(self._folder / INDEX, {"metadata": {"total_size": self.nbytes}, "weight_map": weight_map})
        config = dict(model_config)
        if CONFIG in documents:
            config["quantization_config"] = documents[CONFIG]
        for name, document in (documents | ({CONFIG: config} if config else {})).items():
            _write_json(self._folder / name, document)

    def _part(self, index: int) -> Path:
        return self._folder / f"part-{index}.safetensors"

    def _flush(self) -> None:
        from safetensors.torch import save_file

        if not self._pending and self._shards:
            return
        metadata = {"format": "pt"} | self._producer.header(self._weights, self._aliases)
        file = self._part(len(self._shards))
        save_file(_storable(self._pending), file, metadata)
        file.chmod(0o666 & ~_umask())  # safetensors lets only the owner read it
        self._shards.append(list(self._pending))
        self._pending, self._weights, self._aliases, self._pending_bytes = {}, {}, {}, 0


def write_encoded(
    folder: Path,
    encoded: Encoded,
    model_config: Mapping[str, Any],
    max_shard_bytes: int = MAX_SHARD_BYTES,
    *,
    aliases: Mapping[str, str] | None = None,
    progress: Callable[[Iterable[str]], Iterable[str]] = iter,
) -> None:
    """Write an encoded state dict with its configs into an empty folder.

    Args:
        model_config: what config.json holds beside the quantization config.
        aliases: tied names, each with the name in `encoded.tensors` that it is tied to.
        progress: wraps the names that are gone through, as tqdm does.
    """
    writer = ShardWriter(folder, encoded.producer, max_shard_bytes)
    aliases_of: dict[str, dict[str, str]] = {}
    for alias, first in (aliases or {}).items():
        aliases_of.setdefault(first, {})[alias] = first
    for name in progress(list(encoded.tensors)):
        weights = {name: encoded.weights[name]} if name in encoded.weights else {}
        writer.add(encoded.tensors[name], weights, aliases_of.get(name))
    writer.finish(encoded.documents, model_config)


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU, contiguous, each in a storage of its own and of its size, as safetensors needs them."""
    storable: dict[str, Tensor] = {}
    used: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().to("cpu")
        storage = tensor.untyped_storage()
        is_alone = storage.nbytes() == tensor.nbytes and (not tensor.nbytes or storage.data_ptr() not in used)
        used.add(storage.data_ptr())
        whole = tensor.is_contiguous() and is_alone
        storable[name] = tensor if whole else tensor.clone(memory_format=torch.contiguous_format)
    return storable
