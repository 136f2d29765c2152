"""Which kernel of a backend was measured to be the fastest: one JSON file for each kind of device, in the user's cache.

    {"version": 1, "device": "NVIDIA H200", "mxquant": "0.1.0", "torch": "2.11.0", "triton": "3.6.0",
     "routes": {"fp8 weight=mxfp4 ... out_features=8192 ...": {"1": "split_k", "64": "warp_specialized"}}}

`mxquant.tune` writes the file. A process reads it once, at the first matmul that could use it, and never fails there: a
file that is damaged, or of another device or other versions, is not used, with a warning.

NOTE: kernel choices were called routes. The file's key and name stay, so that files on disk are still read.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from mxquant.backends.base import Problem

Table = Mapping[str, Mapping[int, str]]
"""Of each product, named by `product_key`, the fastest kernel for some numbers of rows."""

_logger = logging.getLogger("mxquant")
_VERSION = 1
# NOTE: these names and their order are in files on disk. Device and capability are not, as a file is of one kind of
# device; nor layout, experts and gate, as a kernel choice is for one matrix in the backend's layout.
_KEY_FIELDS = (
    "weight", "activation", "activation_scale_mode", "static_activation_scale", "out_features", "in_features",
    "block_offset", "dtype", "contraction", "rotation",
)  # fmt: skip
# Former names of the kernels of `fp8` and `fp16`, which files may hold.
_FORMER_NAMES = {"few": "split_k", "specialized": "warp_specialized", "expand": "dequantize"}


def fastest_kernel(backend: str, problem: Problem, rows: int) -> str | None:
    """The name of the fastest kernel for the smallest measured number of rows that is at least `rows`; None if there is
    none.

    NOTE: not the nearest number on either side, as kernels compute whole tiles of rows.
    """
    measured = load_table(device_name(problem.device)).get(product_key(backend, problem), {})
    nearest = min((m for m in measured if m >= rows), default=None)
    return None if nearest is None else measured[nearest]


def product_key(backend: str, problem: Problem) -> str:
    """A line that names the product of a weight's matrix."""
    return " ".join((backend, *(f"{name}={getattr(problem, name)}" for name in _KEY_FIELDS)))


def device_name(device: torch.device) -> str:
    """The kind of device, by its vendor's name."""
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_name(device)
    return device.type


def path_of(device: str) -> Path:
    """The file of a kind of device: in `$MXQUANT_CACHE`, else in `mxquant` of `$XDG_CACHE_HOME` or of `~/.cache`."""
    folder = os.environ.get("MXQUANT_CACHE") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "mxquant")
    return Path(folder).expanduser() / f"routes-{re.sub('[^a-z0-9]+', '-', device.lower())}.json"


@functools.lru_cache(maxsize=64)
def load_table(device: str) -> Table:
    """What was measured on a kind of device; empty without a usable file. Never raises."""
    path = path_of(device)
    try:
        return _read(path, device)
    except (OSError, ValueError, RecursionError) as error:
        _logger.warning(
            "%s is not used, and kernels are chosen by default: %s. mxquant.tune(model) writes it anew", path, error
        )
        return {}


def check_writable(path: Path) -> None:
    """Make the folder of a file, and raise OSError if the file cannot be locked and written there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(path):
            if path.is_dir():
                raise IsADirectoryError("it is a folder")
            with _new_file(path).open("ab"):
                pass
            _new_file(path).unlink()
    except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
        raise _cannot_write(path, error) from error


def record(device: str, measured: Table) -> Path:
    """Add what was measured to the file of this device and these versions; returns its path.

    A reader finds the old file or the new one. Of two processes that write at once, both parts are kept.
    """
    path = path_of(device)
    check_writable(path)
    with _lock(path):
        try:
            known = _read(path, device)
        except (OSError, ValueError, RecursionError):  # not usable: replaced
            known = {}
        products = sorted({*known, *measured})
        merged = {product: {**known.get(product, {}), **measured.get(product, {})} for product in products}
        content = json.dumps({**_environment(device), "routes": merged}, indent=1) + "\n"
        try:
            _new_file(path).write_text(content, encoding="utf-8")
            os.replace(_new_file(path), path)
        except OSError as error:
            raise _cannot_write(path, error) from error
    return path


def _new_file(path: Path) -> Path:
    """Where a file is written before it replaces the old one."""
    return path.with_suffix(".new")


def _cannot_write(path: Path, error: Exception) -> OSError:
    remedy = "set MXQUANT_CACHE to a folder on a local disk that can be written to"
    return OSError(f"{path} cannot be written: {error}; {remedy}")


def _lock(path: Path) -> AbstractContextManager[object]:
    """The lock of a file's writers."""
    from filelock import FileLock

    return FileLock(f"{path}.lock")


def _read(path: Path, device: str) -> Table:
    """The table in a file; empty if there is none. Raises OSError if the file cannot be read, ValueError or
    RecursionError if it was written elsewhere or is damaged.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    if not isinstance(content, dict):
        raise ValueError("it holds no JSON object")
    for what, here in _environment(device).items():
        if content.get(what) != here:
            raise ValueError(f"it was written for {what} {content.get(what)!r}, here is {here!r}")
    products = content.get("routes")
    if not isinstance(products, dict) or not all(map(_is_measured, products.values())):
        raise ValueError("its routes are damaged")
    return {
        product: {int(rows): _current_name(product, name) for rows, name in measured.items()}
        for product, measured in products.items()
    }


def _is_measured(value: object) -> bool:
    return isinstance(value, dict) and all(rows.isdecimal() and isinstance(name, str) for rows, name in value.items())


def _current_name(product: str, kernel: str) -> str:
    return _FORMER_NAMES.get(kernel, kernel) if product.startswith(("fp8 ", "fp16 ")) else kernel


def _environment(device: str) -> dict[str, int | str]:
    """What has to be the same for a table to hold: the kernels and cuBLAS are of these versions."""
    versions = {package: _version_of(package) for package in ("mxquant", "torch", "triton")}
    return {"version": _VERSION, "device": device, **versions}


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
