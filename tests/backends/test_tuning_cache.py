"""The file of the fastest kernels: what is written is read, and what cannot be used never fails a matmul."""

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

from mxquant.backends import tuning_cache

TABLE = {"fp8 out_features=64": {1: "split_k", 64: "warp_specialized"}, "fp8 out_features=128": {16: "dequantize"}}


def test_what_is_written_is_read(empty_tuning_cache: None) -> None:
    path = tuning_cache.record("NVIDIA H200", TABLE)
    assert path.name == "routes-nvidia-h200.json"
    assert tuning_cache.load_table("NVIDIA H200") == TABLE
    assert tuning_cache.load_table("NVIDIA L4") == {}
    header = {key: value for key, value in json.loads(path.read_text()).items() if key != "routes"}
    assert header.keys() == {"version", "device", "mxquant", "torch", "triton"}
    assert all(header.values())


def test_other_products_are_kept(empty_tuning_cache: None) -> None:
    tuning_cache.record("cpu", TABLE)
    tuning_cache.record("cpu", {"fp8 out_features=64": {16: "split_k", 64: "dequantize"}, "other": {1: "one"}})
    assert tuning_cache.load_table("cpu") == {
        "fp8 out_features=64": {1: "split_k", 16: "split_k", 64: "dequantize"},
        "fp8 out_features=128": {16: "dequantize"},
        "other": {1: "one"},
    }


def test_product_keys_are_those_of_files_on_disk() -> None:
    assert tuning_cache.product_key(
        "fp8", dense_problem(activation="mxfp4", activation_scale_mode="even", rotation=32)
    ) == (
        "fp8 weight=mxfp4 activation=mxfp4 activation_scale_mode=even static_activation_scale=False out_features=64 "
        "in_features=256 block_offset=0 dtype=torch.bfloat16 contraction=blocked rotation=32"
    )


def test_former_kernel_names_are_translated(empty_tuning_cache: None) -> None:
    """Those that files of version 1 may hold for `fp8` and `fp16`. Other backends' names are their own."""
    problem = dense_problem(activation="mxfp4", activation_scale_mode="even", layout="mxfp4_tiles")
    key = (
        "fp8 weight=mxfp4 activation=mxfp4 activation_scale_mode=even static_activation_scale=False out_features=64 "
        "in_features=256 block_offset=0 dtype=torch.bfloat16 contraction=blocked rotation=None"
    )
    path = tuning_cache.record("cpu", {})
    content = json.loads(path.read_text())
    content["routes"] = {
        key: {"1": "few", "64": "specialized", "4096": "expand"}, "fp16 k": {"1": "few"}, "forked k": {"1": "few"}
    }  # fmt: skip
    path.write_text(json.dumps(content))
    names = [tuning_cache.fastest_kernel("fp8", problem, rows) for rows in (1, 2, 65)]
    assert names == ["split_k", "warp_specialized", "dequantize"]
    table = tuning_cache.load_table("cpu")
    assert (table["fp16 k"], table["forked k"]) == ({1: "split_k"}, {1: "few"})


def test_path_of_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("MXQUANT_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert tuning_cache.path_of("cpu") == tmp_path / ".cache" / "mxquant" / "routes-cpu.json"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert tuning_cache.path_of("cpu") == tmp_path / "xdg" / "mxquant" / "routes-cpu.json"
    monkeypatch.setenv("MXQUANT_CACHE", str(tmp_path / "own"))
    assert tuning_cache.path_of("cpu") == tmp_path / "own" / "routes-cpu.json"
    monkeypatch.setenv("MXQUANT_CACHE", "~/own")
    assert tuning_cache.path_of("cpu") == tmp_path / "own" / "routes-cpu.json"


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
    "no products": (changed(routes=None), "its routes are damaged"),
    "rows that are no number": (changed(routes={"forked": {"many": "split_k"}}), "its routes are damaged"),
    "kernels without names": (changed(routes={"forked": {"1": 2}}), "its routes are damaged"),
    "another device": (changed(device="NVIDIA L4"), "written for device 'NVIDIA L4', here is 'cpu'"),
    "another mxquant": (changed(mxquant="0.0.1"), "written for mxquant '0.0.1', here is"),
    "another torch": (changed(torch="1.0"), "written for torch '1.0', here is"),
    "another triton": (changed(triton="1.0"), "written for triton '1.0', here is"),
    "another layout": (changed(version=2), "written for version 2, here is 1"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_cannot_be_used_gives_one_warning(
    damage: str, empty_tuning_cache: None, caplog: pytest.LogCaptureFixture
) -> None:
    apply, reason = DAMAGES[damage]
    path = tuning_cache.record("cpu", TABLE)
    apply(path)
    with caplog.at_level(logging.WARNING, logger="mxquant"):
        for rows in (1, 2):
            assert tuning_cache.fastest_kernel("forked", dense_problem(), rows) is None
    (warning,) = caplog.messages
    assert warning.startswith(f"{path} is not used, and kernels are chosen by default: ")
    assert warning.endswith(". mxquant.tune(model) writes it anew")
    assert re.search(reason, warning)


@pytest.mark.parametrize("damage", ["cut", "another triton"])
def test_writing_replaces_a_file_that_cannot_be_used(damage: str, empty_tuning_cache: None) -> None:
    DAMAGES[damage][0](tuning_cache.record("cpu", TABLE))
    tuning_cache.record("cpu", {"other": {1: "split_k"}})
    assert tuning_cache.load_table("cpu") == {"other": {1: "split_k"}}


def test_a_missing_file_gives_no_warning(empty_tuning_cache: None, caplog: pytest.LogCaptureFixture) -> None:
    assert tuning_cache.fastest_kernel("forked", dense_problem(), 1) is None
    assert not caplog.messages


@pytest.mark.parametrize("nested", [False, True])
def test_check_writable_without_a_folder(
    nested: bool, empty_tuning_cache: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MXQUANT_CACHE", str(tmp_path / "file" / "deeper" if nested else tmp_path / "file"))
    with pytest.raises(OSError, match=r"file.* cannot be written: .*; set MXQUANT_CACHE to a folder on a local disk"):
        tuning_cache.check_writable(tuning_cache.path_of("cpu"))


def test_check_writable_where_a_folder_has_the_name(empty_tuning_cache: None) -> None:
    path = tuning_cache.path_of("cpu")
    path.mkdir(parents=True)
    with pytest.raises(OSError, match=r"routes-cpu\.json cannot be written: it is a folder"):
        tuning_cache.check_writable(path)


# Several at once


def test_writers_wait_for_each_other(empty_tuning_cache: None) -> None:
    path = tuning_cache.record("cpu", TABLE)
    writer = threading.Thread(target=tuning_cache.record, args=("cpu", {"late": {1: "split_k"}}))
    with FileLock(f"{path}.lock"):
        writer.start()
        writer.join(0.3)
        assert writer.is_alive()
        assert tuning_cache.load_table("cpu") == TABLE, "who reads does not wait"
    writer.join()
    tuning_cache.load_table.cache_clear()
    assert tuning_cache.load_table("cpu") == {**TABLE, "late": {1: "split_k"}}


def test_readers_and_writers_at_once(empty_tuning_cache: None) -> None:
    wide = {f"product {index}": dict.fromkeys(range(1, 100), "split_k") for index in range(50)}
    path = tuning_cache.record("cpu", wide)
    with ThreadPoolExecutor(4) as pool:
        writers = [pool.submit(tuning_cache.record, "cpu", {f"late {index}": {1: "split_k"}}) for index in range(12)]
        reads = 0
        while not all(writer.done() for writer in writers) or reads == 0:
            assert tuning_cache._read(path, "cpu").keys() >= wide.keys()
            reads += 1
    assert tuning_cache.load_table("cpu").keys() == {*wide, *(f"late {index}" for index in range(12))}


def test_an_interrupted_writer_leaves_the_old_file(empty_tuning_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    tuning_cache.record("cpu", TABLE)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", stop)
        with pytest.raises(KeyboardInterrupt):
            tuning_cache.record("cpu", {"late": {1: "split_k"}})
    assert tuning_cache.load_table("cpu") == TABLE
    tuning_cache.record("cpu", {"later": {1: "split_k"}})
    tuning_cache.load_table.cache_clear()
    assert tuning_cache.load_table("cpu") == {**TABLE, "later": {1: "split_k"}}
