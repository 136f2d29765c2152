"""Finished stages of a calibration in a folder, so that one that was stopped goes on after the last of them.

Each stage is one safetensors file as `flatten_state_dict` has it, which `mxquant.load_state` reads too. It is written
beside its place and renamed, so that it is there whole or not at all. Its header says what the weights were made of,
by SHA-256 of the model, the configs and the batches (`digests`), and has that of the weights themselves: safetensors
notices a file that was cut short, not one with a wrong byte.
"""

from __future__ import annotations

import dataclasses
import json
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mxquant.algorithms.digests import digest, digest_of_batches, digest_of_model
from mxquant.algorithms.stages import Batch
from mxquant.modules.quantize_target import Target
from mxquant.tensor import MXTensor, flatten_state_dict, unflatten_state_dict
from mxquant.tensor.state import METADATA_KEY

_KEY = "mxquant.stage"
# Of these files. Raised where the same model, configs and batches give other codes.
_VERSION = 2


class SavedStages:
    """The stages that are finished, by their number. Made by `open_stages`."""

    def __init__(self, folder: Path, origin: dict[str, Any]) -> None:
        self.folder = folder
        self._origin = origin
        self._finished = {number for number in map(_number_of, folder.glob("stage-*.safetensors")) if number >= 0}

    def __contains__(self, number: int) -> bool:
        return number in self._finished

    @property
    def how_to_go_on(self) -> str:
        """For a message."""
        return f"load the model anew and make the same call; {len(self._finished)} stages are saved in {self.folder}"

    def check(self) -> None:
        """Refuse files that are damaged or were made of something else.

        Raises:
            ValueError: naming the file and what differs.
        """
        for number in sorted(self._finished):
            file = self._file(number)
            _, _, origin = _load(file)
            if differing := sorted(key for key, value in self._origin.items() if origin.get(key) != value):
                raise ValueError(
                    f"{file} was made with another {' and another '.join(differing)}; call with what it was made with, "
                    "the model as it was before quantize_ (load it anew), or name another folder"
                )
            if origin.get("stage") != number:
                raise ValueError(
                    f"{file} holds stage {origin.get('stage')}; give it its name back, or name another folder"
                )

    def read(self, number: int) -> dict[str, MXTensor]:
        """The weights of a finished stage, by their names, on the CPU."""
        tensors, header, _ = _load(self._file(number))
        weights = unflatten_state_dict(tensors, header)
        return {name: weight for name, weight in weights.items() if isinstance(weight, MXTensor)}

    def write(self, number: int, weights: Mapping[str, Tensor]) -> None:
        """Keep the weights of a stage that is finished."""
        from safetensors.torch import save_file

        tensors, header = flatten_state_dict(weights)
        tensors = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
        origin = self._origin | {"stage": number, "sha256": digest(tensors, header[METADATA_KEY])}
        file = self._file(number)
        part = _part_of(file)
        try:
            save_file(tensors, part, header | {_KEY: json.dumps(origin, sort_keys=True)})
            with part.open("rb+") as handle:
                os.fsync(handle.fileno())
            part.replace(file)
        finally:
            part.unlink(missing_ok=True)
        self._finished.add(number)

    def _file(self, number: int) -> Path:
        return self.folder / f"stage-{number:05}.safetensors"


def open_stages(
    path: str | os.PathLike[str], model: nn.Module, targets: Sequence[Target], batches: Sequence[Batch]
) -> SavedStages:
    """The stages in the folder `path`, which is made where it is not there.

    Args:
        path: "~" in it is the user's home.
        model: not changed yet: all its parameters and buffers, the classes of its modules and their plain attributes
            are read.
        targets: all that will be quantized.
        batches: empty where no config asks for any.

    Raises:
        ValueError: no config has an algorithm with stages, `path` is a file or nothing can be written there, a batch
            contains itself, or a stage there is damaged or was made of another model, other configs or other batches.
        TypeError: `path` is no path, or a batch holds what cannot be compared with another run's.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"resume is the path of a folder; got {path!r}")
    if not batches:
        raise ValueError(
            'resume is given, but no config of this call has an algorithm with stages; leave it out, or set algorithm="'
            'gptq"'
        )
    folder = Path(path).expanduser()
    if (folder.exists() or folder.is_symlink()) and not folder.is_dir():
        what = "a file" if folder.exists() else "a symbolic link to nothing"
        raise ValueError(f"resume={str(path)!r} is {what}; name a folder, new or of an earlier call")
    origin = {
        "version of mxquant's algorithm": _VERSION,
        "model": digest_of_model(model),
        "config": digest({}, *(_described(target) for target in targets)),
        "calibration": digest_of_batches(batches),
    }
    _require_writable(folder)
    saved = SavedStages(folder, origin)
    saved.check()
    return saved


def _described(target: Target) -> str:
    """With every field of its config, those of default values too: defaults may change."""
    return f"{target.name}: {type(target.config).__name__} {dataclasses.asdict(target.config)}"


def _require_writable(folder: Path) -> None:
    """Make the folder if needed, and see that files can be, before anything is computed for them."""
    probe = _part_of(folder / "writable")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        raise ValueError(f"resume={str(folder)!r}: no file can be made there ({error}); name another folder") from error


def _part_of(file: Path) -> Path:
    """A name beside it that no other process writes to."""
    return file.with_suffix(f".{uuid.uuid4().hex}.part")


def _number_of(file: Path) -> int:
    digits = file.stem.removeprefix("stage-")
    return int(digits) if digits.isascii() and digits.isdecimal() else -1


def _load(file: Path) -> tuple[dict[str, Tensor], dict[str, str], dict[str, Any]]:
    """Tensors with memory of their own, the header's strings, and what they were made of.

    Raises:
        ValueError: the file is damaged, or no stage.
    """
    from safetensors import safe_open

    remedy = "delete it, and its stage is computed again"
    try:
        with safe_open(file, "pt") as handle:
            header = dict(handle.metadata() or {})
            tensors = {name: handle.get_tensor(name).clone() for name in handle.keys()}  # noqa: SIM118 - no mapping
    except Exception as error:
        raise ValueError(f"{file} is no intact safetensors file: {error}; {remedy}") from error
    if not {_KEY, METADATA_KEY} <= header.keys():
        raise ValueError(f"{file} is no stage that quantize_ saved; name another folder")
    try:
        origin = dict(json.loads(header[_KEY]))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{file} is damaged: its header {header[_KEY][:80]!r} is no JSON ({error}); {remedy}"
        ) from None
    if origin.get("sha256") != digest(tensors, header[METADATA_KEY]):
        raise ValueError(f"{file} is damaged: its weights are not those that were saved; {remedy}")
    return tensors, header, origin
