"""`replacing`: the destination is the old checkpoint or the new one at every moment, and nothing else is lost."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from mxquant.checkpoints import atomic_replace as atomic_module
from mxquant.checkpoints.files import INDEX, WEIGHTS
from mxquant.checkpoints.write import replacing


def save(target: Path, content: str = "new") -> None:
    with replacing(target) as folder:
        (folder / WEIGHTS).write_text(content)


def saved(at: Path) -> Path:
    at.mkdir()
    (at / WEIGHTS).write_text("old")
    return at


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@pytest.fixture
def without_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic_module, "rename_exchange", lambda first, second: False)


def test_rename_exchange_replaces_a_folder_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No moment without a folder: nothing is renamed away."""
    for name in ("a", "b"):
        saved(tmp_path / name)
    if not atomic_module.rename_exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this file system exchanges no folders")

    def renamed(*arguments: Any) -> None:
        raise AssertionError(f"renamed {arguments}")

    monkeypatch.setattr(os, "rename", renamed)
    save(tmp_path / "a")
    assert (tmp_path / "a" / WEIGHTS).read_text() == "new"
    assert names(tmp_path) == ["a", "b"]


def test_two_renames_replace_a_folder_without_rename_exchange(tmp_path: Path, without_exchange: None) -> None:
    save(saved(tmp_path / "a"))
    assert (tmp_path / "a" / WEIGHTS).read_text() == "new"
    assert names(tmp_path) == ["a"]


def test_interrupt_between_two_renames_keeps_the_old_folder(
    tmp_path: Path, without_exchange: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, calls = os.rename, []

    def interrupted(*arguments: Any, **options: Any) -> None:
        rename(*arguments, **options)
        calls.append(arguments)
        if len(calls) == 1:
            raise KeyboardInterrupt

    target = saved(tmp_path / "a")
    monkeypatch.setattr(os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(target)
    assert (target / WEIGHTS).read_text() == "old"
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("has_new", [False, True])
def test_recovers_what_a_killed_process_left(has_new: bool, tmp_path: Path) -> None:
    target = saved(tmp_path / "a")
    target.rename(tmp_path / ".a.mxquant-replaced")
    if has_new:
        saved(target)
    with pytest.raises(RuntimeError), replacing(target):
        raise RuntimeError
    assert (target / WEIGHTS).read_text() == "old"
    assert names(tmp_path) == ["a"]


def test_files_that_are_not_weights_are_kept(tmp_path: Path) -> None:
    target = saved(tmp_path / "a")
    (target / INDEX).write_text(json.dumps({"weight_map": {"x": "part.safetensors", "y": "tokenizer.json", "z": [1]}}))
    gone = ["part.safetensors", "model-00001-of-00002.safetensors", "model--00002-of-00002.safetensors"]
    kept = ["adapter_model.safetensors", "tokenizer.json", "model_card.safetensors"]
    for name in gone + kept:
        (target / name).write_text(name)
    (target / "link.json").symlink_to("tokenizer.json")
    (target / "nowhere.json").symlink_to("absent.json")
    save(target)
    assert names(target) == sorted([*kept, "link.json", "nowhere.json", WEIGHTS])
    assert os.readlink(target / "link.json") == "tokenizer.json"
    assert (target / "adapter_model.safetensors").read_text() == "adapter_model.safetensors"
    assert os.readlink(target / "nowhere.json") == "absent.json"


def test_a_folder_with_a_damaged_index_is_replaced(tmp_path: Path) -> None:
    target = saved(tmp_path / "a")
    (target / INDEX).write_text("{")
    save(target)
    assert names(target) == [WEIGHTS]


def test_a_folder_with_subfolders_is_refused(tmp_path: Path) -> None:
    (tmp_path / "home" / "letters").mkdir(parents=True)
    with pytest.raises(FileExistsError, match="letters"):
        save(tmp_path / "home")
    assert names(tmp_path) == ["home"]
    assert names(tmp_path / "home") == ["letters"]


def test_a_link_to_a_folder_stays_a_link(tmp_path: Path) -> None:
    saved(tmp_path / "elsewhere")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "elsewhere" / WEIGHTS).read_text() == "new"
    assert names(tmp_path) == ["elsewhere", "link"]


def test_current_folder_and_mount_points_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = saved(tmp_path / "a")
    monkeypatch.chdir(target)
    for place, named in ((Path("."), "is the current folder"), (Path("/"), "is a mount point")):
        with pytest.raises(FileExistsError, match=named), replacing(place):
            raise AssertionError("the work began")
    assert names(target) == [WEIGHTS]


def test_complete_folder_is_kept_if_it_cannot_be_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As at a bind mount, which looks like any folder until it is renamed."""

    def busy(first: Path, second: Path) -> bool:
        raise OSError(errno.EBUSY, "Device or resource busy")

    target = saved(tmp_path / "a")
    monkeypatch.setattr(atomic_module, "rename_exchange", busy)
    with pytest.raises(OSError, match=r"busy\); the new checkpoint is complete in") as caught:
        save(target)
    (left,) = (entry for entry in tmp_path.iterdir() if entry != target)
    assert str(left) in str(caught.value)
    assert (left / WEIGHTS).read_text() == "new"
    assert (target / WEIGHTS).read_text() == "old"
