"""Locks that end with the process that holds them: only one process writes to a folder, and a file is being read."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

LOCK = ".lock"
"""name of the lock file in the folder; it states which process holds the lock"""
_held: set[int] = set()
"""the open files that hold locks in this process"""


class InUse(ValueError):
    """Another process holds the lock."""


def _close_in_child() -> None:
    """A forked process, such as one that reads images, must not keep the lock of a parent that was killed."""
    for handle in _held:
        with contextlib.suppress(OSError):
            os.close(handle)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Hold the lock of a folder. The system releases it when the process ends, however it ends.

    A missing folder is created, and at the end removed again if it is empty.

    Args:
        folder: the folder.

    Yields:
        Whether the lock is held; False where the system or its disk has no locks.

    Raises:
        InUse: another process holds the lock.
        ValueError: the folder cannot be created, or nothing can be written to it.

    Example:
        >>> import tempfile
        >>> place = Path(tempfile.mkdtemp())
        >>> with locked(place), locked(place):
        ...     pass
        Traceback (most recent call last):
        proxymetric.system.lock.InUse: out: got ..., in use by process ... on ... since ...; expected a folder that no
        process uses: wait until that process ends, or choose another folder with --out
    """
    new_folders = [place for place in (folder, *folder.absolute().parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"out: got {folder}, which cannot be created ({error.strerror}); expected a folder that you may write to"
        ) from None
    file, handle = folder / LOCK, None
    try:
        handle = _acquire(folder, file)
        yield handle is not None
    finally:
        if handle is not None:
            with contextlib.suppress(OSError):
                # Two folders may have changed their names meanwhile: the lock file of the other one stays.
                if os.path.samestat(os.fstat(handle), os.stat(file)):
                    file.unlink()
            _held.discard(handle)
            os.close(handle)
        for place in new_folders:
            with contextlib.suppress(OSError):
                place.rmdir()


@contextlib.contextmanager
def reading(file: Path) -> Iterator[None]:
    """Mark a file as being read, for `is_being_read` in other processes.

    Raises:
        OSError: the file cannot be opened.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "a"
        >>> _ = file.write_bytes(b"a")
        >>> with reading(file):
        ...     is_being_read(file)
        True
        >>> is_being_read(file)
        False
    """
    with open(file, "rb") as opened:
        with contextlib.suppress(ImportError, OSError):  # Windows, or a disk without locks
            import fcntl

            fcntl.flock(opened, fcntl.LOCK_SH)
        yield


def is_being_read(file: Path) -> bool:
    """Whether a process is inside `reading(file)`; False where the system or its disk has no locks."""
    try:
        import fcntl

        with open(file, "rb") as opened:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (ImportError, OSError):
        return False
    return False


def _acquire(folder: Path, file: Path) -> int | None:
    """Open the lock file and lock it; None where the system or its disk has no locks."""
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    while True:
        try:
            handle = os.open(file, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
        except OSError as error:
            raise ValueError(
                f"out: got {folder}, where {LOCK} cannot be written ({error.strerror}); expected a folder that you may "
                "write to"
            ) from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _owner(handle)
            os.close(handle)
            raise InUse(
                f"out: got {folder}, in use by {owner}; expected a folder that no process uses: wait until that "
                "process ends, or choose another folder with --out"
            ) from None
        except OSError:  # such as a network disk without locks
            os.close(handle)
            with contextlib.suppress(OSError):
                file.unlink()
            return None
        try:
            is_same_file = os.path.samestat(os.fstat(handle), os.stat(file))
        except FileNotFoundError:
            is_same_file = False
        if is_same_file:
            break
        os.close(handle)  # the last owner of the lock removed the file between open and flock
    _held.add(handle)
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    with contextlib.suppress(OSError):  # on a full disk the lock holds, but does not state its owner
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(holder).encode(), 0)
    return handle


def _owner(handle: int) -> str:
    """The process that holds a lock, in words."""
    try:
        owner = json.loads(os.pread(handle, 1000, 0))
        return f"process {owner['pid']} on {owner['host']} since {owner['since']}"
    except (ValueError, KeyError, TypeError, OSError):
        return "another process"
