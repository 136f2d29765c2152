"""Putting a complete folder where another one is, so that there is one or the other at every moment.

Linux exchanges two folders in one step (renameat2(2) with RENAME_EXCHANGE), on most of its file systems. Elsewhere it
takes two renames: the old folder waits beside under a name of its own, and what is killed between them is put right by
`recover`, before the next checkpoint is written there.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import sys
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h
_NOT_SUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)


def atomic_replace(fresh: Path, target: Path) -> None:
    """Make `fresh`, on the same file system, the folder `target`; what was there is gone.

    Raises:
        OSError: it cannot be; `target` is as it was.
    """
    if not target.exists():
        fresh.rename(target)
    elif rename_exchange(fresh, target):
        shutil.rmtree(fresh, ignore_errors=True)
    else:
        _replace(fresh, target)


def rename_exchange(first: Path, second: Path) -> bool:
    """Exchange two folders in one step; False where the system cannot.

    Raises:
        OSError: it can, and these cannot be exchanged.
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    if (code := ctypes.get_errno()) in _NOT_SUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(second))


def recover(target: Path) -> None:
    """Put back the folder that a process which was killed while it replaced `target` left beside it."""
    waiting = _waiting(target)
    if not waiting.is_dir():
        return
    if target.exists():  # killed after the second rename
        shutil.rmtree(waiting)
    else:
        waiting.rename(target)


def _replace(fresh: Path, target: Path) -> None:
    waiting = _waiting(target)
    try:
        target.rename(waiting)
        fresh.rename(target)
    finally:
        recover(target)


def _waiting(target: Path) -> Path:
    return target.with_name(f".{target.name}.mxquant-replaced")
