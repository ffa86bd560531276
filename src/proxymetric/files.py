"""Atomic writing of files: a reader finds the old file or the new one, never a part of it, also after a crash."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class NotSaved(OSError):
    """A file could not be written; an earlier version of it is unchanged."""


def full(error: BaseException) -> bool:
    """Whether an error means that there is no room: a full disk, a quota, a limit on the size of files."""
    messages = ("No space left", "File too large", "os error 28", "os error 27", "Disk quota")
    codes = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
    return getattr(error, "errno", None) in codes or any(message in str(error) for message in messages)


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary path to write to; it replaces `path` in one move, and only if the block succeeds.

    Args:
        path: the file to write; its folder is made.

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
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch()
        mode = temporary.stat().st_mode
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.chmod(temporary, mode)  # safetensors makes files that only their owner can read
        os.replace(temporary, path)
    except OSError as error:
        reason = "the disk is full, or a limit on file size is reached" if full(error) else error.strerror or error
        earlier = "the earlier file is unchanged" if path.is_file() else "there is no earlier file"
        raise NotSaved(f"could not save {path}: {reason}; {earlier}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def save_tensors(path: str | Path, tensors: dict[str, Tensor], header: dict[str, str]) -> None:
    """Write a safetensors file.

    Args:
        path: the file.
        tensors: by name, contiguous.
        header: text values by name.

    Raises:
        OSError: the file could not be written; also for errors of the safetensors library.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, str(path), header)
    except SafetensorError as error:
        raise OSError(str(error)) from error


def write_json(path: str | Path, content: Any) -> None:
    """Write a JSON file, in one move.

    Raises:
        NotSaved: the file could not be written.
    """
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: str | Path) -> Any:
    """Read a JSON file.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not valid JSON; the message names it.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged, it is not valid JSON: {error}") from None
