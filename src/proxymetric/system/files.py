"""Atomic file writes: a reader sees either the old file or the complete new file, even after a crash."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

DISK_FULL = "the disk is full, or a limit on file size is reached"
FULL_CODES = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
FULL_SIGNS = re.compile(
    "No space left|File too large|os error 2[78]|Disk quota|database or disk is full|[0-9] requested and [0-9]+ written"
)
"""what the system, safetensors (Rust), SQLite and NumPy say when a disk is full"""


class NotSaved(OSError):
    """A file could not be written; an earlier version of it is unchanged."""


def is_disk_full(error: BaseException) -> bool:
    """Return whether an error means that the disk is full, or that a quota or a limit on file size is reached.

    Example:
        >>> is_disk_full(OSError(errno.ENOSPC, "No space left on device"))
        True
        >>> is_disk_full(OSError("64 requested and 8 written"))  # NumPy
        True
        >>> is_disk_full(PermissionError(errno.EACCES, "Permission denied"))
        False
    """
    return getattr(error, "errno", None) in FULL_CODES or FULL_SIGNS.search(str(error)) is not None


def not_saved(place: str | Path, error: BaseException, consequence: str) -> NotSaved:
    """Return the error for a file or a folder that could not be written: its name, the reason, and what is there now.

    Example:
        >>> print(not_saved("a.json", OSError(errno.EROFS, "Read-only file system"), "there is no earlier file"))
        could not save a.json: Read-only file system; there is no earlier file
    """
    reason = DISK_FULL if is_disk_full(error) else getattr(error, "strerror", None) or error
    return NotSaved(f"could not save {place}: {reason}; {consequence}")


def check_output(
    argument: str, path: str | Path, what: str, is_ours: Callable[[Path], bool], overwrite: str | None = None
) -> Path:
    """Check, before the work begins, that a file may be written: only a file that this package wrote is replaced.

    Args:
        argument: the name of the argument that gave the path, for the error.
        path: where a file is to be written.
        what: the kind of file in words, such as "vectors of `proxymetric embed`".
        is_ours: returns whether the same verb wrote an existing file.
        overwrite: what the user can do other than choose a new file, for the error; None if there is nothing.

    Returns:
        The file to write: `path`, or the file that it links to.

    Raises:
        ValueError: the path holds something that this package did not write, or it cannot be written.

    Example:
        >>> import tempfile
        >>> photo = Path(tempfile.mkdtemp()) / "photo.jpg"
        >>> check_output("--out", photo, "a table", is_ours=lambda file: False).name
        'photo.jpg'
        >>> _ = photo.write_bytes(b"a photo")
        >>> check_output("--out", photo, "a table", is_ours=lambda file: False)
        Traceback (most recent call last):
        ValueError: --out: got ...photo.jpg, which exists and is not a table; expected a new file
    """
    path = Path(path)
    way_out = "a new file" if overwrite is None else f"a new file, or {overwrite}"
    if path.is_symlink() and not path.exists():
        raise ValueError(f"{argument}: got {path}, a link to {os.readlink(path)}, which is missing; expected {way_out}")
    if path.is_dir():
        raise ValueError(f"{argument}: got {path}, which is a folder; expected a file to write")
    if path.exists() and not path.is_file():
        raise ValueError(f"{argument}: got {path}, which is not a regular file; expected {way_out}")
    if path.exists() and not is_ours(path):
        raise ValueError(f"{argument}: got {path}, which exists and is not {what}; expected {way_out}")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir():
        raise ValueError(f"{argument}: got {path}, but {folder} is a file; expected a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(
            f"{argument}: got {path}, but {folder} cannot be written; expected a folder that you may write to"
        )
    return path.resolve() if path.is_symlink() else path


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path; the file written there replaces `path` atomically if the block succeeds.

    Args:
        path: the file to write; missing parent folders are created.

    Raises:
        NotSaved: the file could not be written.

    Example:
        >>> import tempfile
        >>> target = Path(tempfile.mkdtemp()) / "a.txt"
        >>> with replacing(target) as temporary:
        ...     _ = temporary.write_text("whole")
        >>> target.read_text()
        'whole'
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise NotSaved(f"could not save {path}: it exists and is not a regular file; it is unchanged")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch()
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        consequence = "the earlier file is unchanged" if path.is_file() else "there is no earlier file"
        raise not_saved(path, error, consequence) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def printable(name: str) -> str:
    """Return a file name as text that can be printed and encoded: bytes that are not UTF-8 become `\\xe9`.

    Example:
        >>> printable("caf\\udce9.png"), printable("caf\\xe9.png")
        ('caf\\\\xe9.png', 'caf\xe9.png')
    """
    try:
        return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:  # a surrogate that stands for no byte
        return name.encode("utf-8", "backslashreplace").decode()


def write_json(path: str | Path, content: Any) -> None:
    """Write a JSON file atomically; file names that are not UTF-8 are escaped and read back as they were.

    Raises:
        NotSaved: the file could not be written.
    """
    with replacing(path) as temporary:
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def read_toml(path: str | Path, name: str) -> dict[str, Any]:
    """Read a TOML file.

    Args:
        path: the file.
        name: what the file is, for the message, such as "recipe".

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not valid TOML; the message names the file.
    """
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name}: got {path}, which is not UTF-8 text (byte {error.start}), expected valid TOML"
        ) from None
    except ValueError as error:
        raise ValueError(f"{name}: got {path}, expected valid TOML: {error}") from None
    except RecursionError:
        raise ValueError(f"{name}: got {path}, which is nested too deeply, expected valid TOML") from None


def read_json(path: str | Path) -> Any:
    """Read a JSON file.

    Raises:
        ValueError: the file cannot be read or is not valid JSON; the message names the file.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: got a file that cannot be read ({error.strerror}), expected a JSON file") from None
    except ValueError as error:
        raise ValueError(f"{path}: got text that is not valid JSON ({error}), expected a JSON file") from None
    except RecursionError:
        raise ValueError(f"{path}: got JSON that is nested too deeply, expected a JSON file") from None


def read_json_object(path: str | Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises:
        ValueError: the file cannot be read, is not valid JSON or holds another value; the message names the file.
    """
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path}: got {content!r:.60}, expected a JSON object; the file is damaged")
    return content
