"""Replace a folder by another one, so that the old or the new one is complete at every moment.

Linux exchanges two folders in one step on most file systems (renameat2(2) with RENAME_EXCHANGE). Elsewhere two renames
are needed, and the old folder has another name in between. If the process is killed there, `recover` restores it before
the next checkpoint is written.
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
    """Move `fresh` to `target`, on the same file system. The old `target` is deleted.

    Raises:
        OSError: this is not possible; `target` is unchanged.
    """
    if not target.exists():
        fresh.rename(target)
    elif rename_exchange(fresh, target):
        shutil.rmtree(fresh, ignore_errors=True)
    else:
        try:
            target.rename(_set_aside(target))
            fresh.rename(target)
        finally:
            recover(target)


def rename_exchange(first: Path, second: Path) -> bool:
    """Exchange two folders in one step; False if the system has no such call.

    Raises:
        OSError: it has, and these folders cannot be exchanged.
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
    """Clean up after a process that was killed while it replaced `target`."""
    old = _set_aside(target)
    if not old.is_dir():
        return
    if target.exists():  # killed after the second rename
        shutil.rmtree(old)
    else:
        old.rename(target)


def _set_aside(target: Path) -> Path:
    """Where the old folder is between the two renames."""
    return target.with_name(f".{target.name}.mxquant-replaced")
