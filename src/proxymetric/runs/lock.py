"""One process writes to a folder: a lock that ends with the process that holds it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

LOCK = ".lock"
"""name of the file in the folder; it says who holds the lock"""
_held: set[int] = set()
"""the open files that hold locks in this process"""


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

    A folder that is missing is made, and removed again at the end if it is empty then.

    Args:
        folder: the folder.

    Yields:
        Whether the lock is held; False where the system or its disk has no locks.

    Raises:
        ValueError: another process holds it, or the folder cannot be made.

    Example:
        >>> import tempfile
        >>> place = Path(tempfile.mkdtemp())
        >>> with locked(place), locked(place):
        ...     pass
        Traceback (most recent call last):
        ValueError: out: got ..., in use by process ... on ... since ...; expected to wait for it, or another folder
        with --out
    """
    made = [place for place in (folder, *folder.absolute().parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"out: got {folder}, which cannot be made ({error.strerror}); expected a folder that you may write to"
        ) from None
    file, handle = folder / LOCK, None
    try:
        handle = _acquired(folder, file)
        yield handle is not None
    finally:
        if handle is not None:
            with contextlib.suppress(OSError):
                file.unlink()
            _held.discard(handle)
            os.close(handle)
        for place in made:
            with contextlib.suppress(OSError):
                place.rmdir()


def _acquired(folder: Path, file: Path) -> int | None:
    """The open file that holds the lock; None without locks."""
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
            raise ValueError(
                f"out: got {folder}, in use by {owner}; expected to wait for it, or another folder with --out"
            ) from None
        except OSError:  # such as a network disk without locks
            os.close(handle)
            with contextlib.suppress(OSError):
                file.unlink()
            return None
        try:
            same = os.path.samestat(os.fstat(handle), os.stat(file))
        except FileNotFoundError:
            same = False
        if same:
            break
        os.close(handle)  # its last owner removed the file between the two calls
    _held.add(handle)
    about = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    with contextlib.suppress(OSError):  # a full disk: the lock holds, only its description is missing
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(about).encode(), 0)
    return handle


def _owner(handle: int) -> str:
    try:
        about = json.loads(os.pread(handle, 1000, 0))
        return f"process {about['pid']} on {about['host']} since {about['since']}"
    except (ValueError, KeyError, TypeError, OSError):
        return "another process"
