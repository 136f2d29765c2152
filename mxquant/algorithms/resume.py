"""Resuming a calibration that was stopped: each finished stage is saved in a folder.

A stage is one safetensors file in the form of `flatten_state_dict`, which `mxquant.load_state` reads too. It is written
under another name and renamed, so that no file is ever half written. Its header holds the SHA-256 of the model, the
configs and the batches (`fingerprints`), by which a call recognizes its own files. It also holds the SHA-256 of the
weights: safetensors detects a truncated file, but not a flipped byte.
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

from mxquant.algorithms.blockwise import Batch
from mxquant.algorithms.fingerprints import batches_fingerprint, model_fingerprint, tensors_fingerprint
from mxquant.modules.quantize_target import Target
from mxquant.tensor import MXTensor, flatten_state_dict, unflatten_state_dict
from mxquant.tensor.state import METADATA_KEY

_KEY = "mxquant.stage"
# Raise it when the same model, configs and batches give other codes than before.
_VERSION = 2


class SavedStages:
    """The finished stages in a folder, by number. Made by `open_stages`."""

    def __init__(self, folder: Path, fingerprints: dict[str, Any]) -> None:
        self.folder = folder
        self._fingerprints = fingerprints
        self._finished = {number for number in map(_number_of, folder.glob("stage-*.safetensors")) if number >= 0}

    def __contains__(self, number: int) -> bool:
        return number in self._finished

    @property
    def resume_hint(self) -> str:
        """What to do after a stop, for the log."""
        return f"load the model anew and make the same call; {len(self._finished)} stages are saved in {self.folder}"

    def check(self) -> None:
        """Refuse files that are damaged or belong to other inputs, with a ValueError that says what differs."""
        for number in sorted(self._finished):
            file = self._file(number)
            _, _, fingerprints = _read_stage(file)
            if differing := sorted(key for key, value in self._fingerprints.items() if fingerprints.get(key) != value):
                raise ValueError(
                    f"{file} was made with another {' and another '.join(differing)}; call with what it was made with, "
                    "the model as it was before quantize_ (load it anew), or name another folder"
                )
            if fingerprints.get("stage") != number:
                raise ValueError(
                    f"{file} holds stage {fingerprints.get('stage')}; give it its name back, or name another folder"
                )

    def read(self, number: int) -> dict[str, MXTensor]:
        """The weights of a finished stage, by name, on the CPU."""
        tensors, header, _ = _read_stage(self._file(number))
        weights = unflatten_state_dict(tensors, header)
        return {name: weight for name, weight in weights.items() if isinstance(weight, MXTensor)}

    def write(self, number: int, weights: Mapping[str, Tensor]) -> None:
        """Save the weights of a finished stage."""
        from safetensors.torch import save_file

        tensors, header = flatten_state_dict(weights)
        tensors = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
        weights_hash = tensors_fingerprint(tensors, header[METADATA_KEY])
        saved_with = self._fingerprints | {"stage": number, "sha256": weights_hash}
        file = self._file(number)
        part = _part_of(file)
        try:
            save_file(tensors, part, header | {_KEY: json.dumps(saved_with, sort_keys=True)})
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
    """Open the folder `path`, and make it if it does not exist.

    Args:
        path: a leading "~" is the user's home.
        model: before quantization. All its parameters, buffers, module classes and plain attributes are hashed.
        targets: all weights that will be quantized.
        batches: empty if no config needs calibration.

    Raises:
        ValueError: no config needs calibration, `path` is a file or not writable, a batch contains itself, or a saved
            stage is damaged or belongs to another model, config or calibration.
        TypeError: `path` is not a path, or a batch holds an object whose value cannot be hashed.
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
    # All fields of the configs are hashed: their defaults may change.
    configs = [f"{one.name}: {type(one.config).__name__} {dataclasses.asdict(one.config)}" for one in targets]
    fingerprints = {
        "version of mxquant's algorithm": _VERSION,
        "model": model_fingerprint(model),
        "config": tensors_fingerprint({}, *configs),
        "calibration": batches_fingerprint(batches),
    }
    _require_writable(folder)
    saved = SavedStages(folder, fingerprints)
    saved.check()
    return saved


def _require_writable(folder: Path) -> None:
    """Make the folder, and check that files can be written there before anything is computed."""
    probe = _part_of(folder / "writable")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        raise ValueError(f"resume={str(folder)!r}: no file can be made there ({error}); name another folder") from error


def _part_of(file: Path) -> Path:
    """A temporary name beside it, unique to this process."""
    return file.with_suffix(f".{uuid.uuid4().hex}.part")


def _number_of(file: Path) -> int:
    digits = file.stem.removeprefix("stage-")
    return int(digits) if digits.isascii() and digits.isdecimal() else -1


def _read_stage(file: Path) -> tuple[dict[str, Tensor], dict[str, str], dict[str, Any]]:
    """A stage's tensors, in memory of their own, its header, and the fingerprints of its inputs.

    Raises a ValueError if the file is damaged or not a saved stage.
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
        fingerprints = dict(json.loads(header[_KEY]))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{file} is damaged: its header {header[_KEY][:80]!r} is no JSON ({error}); {remedy}"
        ) from None
    if fingerprints.get("sha256") != tensors_fingerprint(tensors, header[METADATA_KEY]):
        raise ValueError(f"{file} is damaged: its weights are not those that were saved; {remedy}")
    return tensors, header, fingerprints
