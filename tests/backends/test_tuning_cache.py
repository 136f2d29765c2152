"""The file of the fastest routes: what is written is read, and what cannot be used never fails a matmul."""

import json
import logging
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from forked_backend import dense_problem

from mxquant.backends import tuning_cache as tuned

TABLE = {"forked out_features=64": {1: "few", 64: "specialized"}, "forked out_features=128": {16: "expand"}}


def test_what_is_written_is_read(routes_cache: None) -> None:
    path = tuned.record("NVIDIA H200", TABLE)
    assert path.name == "routes-nvidia-h200.json"
    assert tuned.table("NVIDIA H200") == TABLE
    assert tuned.table("NVIDIA L4") == {}
    header = {key: value for key, value in json.loads(path.read_text()).items() if key != "routes"}
    assert header.keys() == {"version", "device", "mxquant", "torch", "triton"}
    assert all(header.values())


def test_what_is_known_of_others_is_kept(routes_cache: None) -> None:
    tuned.record("cpu", TABLE)
    tuned.record("cpu", {"forked out_features=64": {16: "few", 64: "expand"}, "other": {1: "few"}})
    assert tuned.table("cpu") == {
        "forked out_features=64": {1: "few", 16: "few", 64: "expand"},
        "forked out_features=128": {16: "expand"},
        "other": {1: "few"},
    }


def test_a_product_is_named_by_all_that_kernels_depend_on() -> None:
    assert tuned.product_key("fp8", dense_problem(activation="mxfp4", activation_scale_mode="even", rotation=32)) == (
        "fp8 weight=mxfp4 activation=mxfp4 activation_scale_mode=even static_activation_scale=False out_features=64 "
        "in_features=256 block_offset=0 dtype=torch.bfloat16 contraction=blocked rotation=32"
    )


def test_where_the_file_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("MXQUANT_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert tuned.path_of("cpu") == tmp_path / ".cache" / "mxquant" / "routes-cpu.json"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert tuned.path_of("cpu") == tmp_path / "xdg" / "mxquant" / "routes-cpu.json"
    monkeypatch.setenv("MXQUANT_CACHE", str(tmp_path / "own"))
    assert tuned.path_of("cpu") == tmp_path / "own" / "routes-cpu.json"
    monkeypatch.setenv("MXQUANT_CACHE", "~/own")
    assert tuned.path_of("cpu") == tmp_path / "own" / "routes-cpu.json"


# Files that cannot be used


def changed(**changes: Any) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def replaced_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES = {
    "cut": (lambda path: path.write_text(path.read_text()[:-40]), "delimiter|Expecting|Unterminated"),
    "empty": (lambda path: path.write_text(""), "Expecting value"),
    "no text": (lambda path: path.write_bytes(b"\xff\xfe\x00"), "codec can't decode"),
    "no object": (lambda path: path.write_text("[]"), "it holds no JSON object"),
    "nested": (lambda path: path.write_text("[" * 100_000), "recursion"),
    "a folder": (replaced_by_a_folder, "directory"),
    "no routes": (changed(routes=None), "its routes are damaged"),
    "routes of no rows": (changed(routes={"forked": {"many": "few"}}), "its routes are damaged"),
    "routes without names": (changed(routes={"forked": {"1": 2}}), "its routes are damaged"),
    "another device": (changed(device="NVIDIA L4"), "written for device 'NVIDIA L4', here is 'cpu'"),
    "another mxquant": (changed(mxquant="0.0.1"), "written for mxquant '0.0.1', here is"),
    "another torch": (changed(torch="1.0"), "written for torch '1.0', here is"),
    "another triton": (changed(triton="1.0"), "written for triton '1.0', here is"),
    "another layout": (changed(version=2), "written for version 2, here is 1"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_cannot_be_used_is_left_with_one_warning(
    damage: str, routes_cache: None, caplog: pytest.LogCaptureFixture
) -> None:
    apply, reason = DAMAGES[damage]
    path = tuned.record("cpu", TABLE)
    apply(path)
    with caplog.at_level(logging.WARNING, logger="mxquant"):
        for rows in (1, 2):
            assert tuned.fastest_route("forked", dense_problem(), rows) is None
    (warning,) = caplog.messages
    assert warning.startswith(f"{path} is not used, and routes are chosen by default: ")
    assert warning.endswith(". mxquant.tune(model) writes it anew")
    assert re.search(reason, warning)


@pytest.mark.parametrize("damage", ["cut", "another triton"])
def test_writing_renews_it(damage: str, routes_cache: None) -> None:
    DAMAGES[damage][0](tuned.record("cpu", TABLE))
    tuned.record("cpu", {"other": {1: "few"}})
    assert tuned.table("cpu") == {"other": {1: "few"}}


def test_no_file_is_no_warning(routes_cache: None, caplog: pytest.LogCaptureFixture) -> None:
    assert tuned.fastest_route("forked", dense_problem(), 1) is None
    assert not caplog.messages


@pytest.mark.parametrize("nested", [False, True])
def test_a_folder_that_cannot_be_made_is_told_before(
    nested: bool, routes_cache: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MXQUANT_CACHE", str(tmp_path / "file" / "deeper" if nested else tmp_path / "file"))
    with pytest.raises(OSError, match=r"file.* cannot be written: .*; set MXQUANT_CACHE to a folder on a local disk"):
        tuned.check_writable(tuned.path_of("cpu"))


def test_a_folder_in_the_files_place_is_told_before(routes_cache: None) -> None:
    path = tuned.path_of("cpu")
    path.mkdir(parents=True)
    with pytest.raises(OSError, match=r"routes-cpu\.json cannot be written: it is a folder"):
        tuned.check_writable(path)


# Several at once


def test_writers_wait_for_each_other(routes_cache: None) -> None:
    path = tuned.record("cpu", TABLE)
    writer = threading.Thread(target=tuned.record, args=("cpu", {"late": {1: "few"}}))
    with FileLock(f"{path}.lock"):
        writer.start()
        writer.join(0.3)
        assert writer.is_alive()
        assert tuned.table("cpu") == TABLE, "who reads does not wait"
    writer.join()
    tuned.table.cache_clear()
    assert tuned.table("cpu") == {**TABLE, "late": {1: "few"}}


def test_nobody_reads_half_a_file_and_nothing_is_lost(routes_cache: None) -> None:
    wide = {f"product {index}": dict.fromkeys(range(1, 100), "few") for index in range(50)}
    path = tuned.record("cpu", wide)
    with ThreadPoolExecutor(4) as pool:
        writers = [pool.submit(tuned.record, "cpu", {f"late {index}": {1: "few"}}) for index in range(12)]
        reads = 0
        while not all(writer.done() for writer in writers) or reads == 0:
            assert tuned._read(path, "cpu").keys() >= wide.keys()
            reads += 1
    assert tuned.table("cpu").keys() == {*wide, *(f"late {index}" for index in range(12))}


def test_a_writer_that_is_stopped_leaves_the_old_file(routes_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned.record("cpu", TABLE)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", stop)
        with pytest.raises(KeyboardInterrupt):
            tuned.record("cpu", {"late": {1: "few"}})
    assert tuned.table("cpu") == TABLE
    tuned.record("cpu", {"later": {1: "few"}})
    tuned.table.cache_clear()
    assert tuned.table("cpu") == {**TABLE, "later": {1: "few"}}
