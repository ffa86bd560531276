"""Writing files so that a reader, or a crash, never meets half of one."""

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
    """A file could not be written; what was there before is as it was."""


def full(error: BaseException) -> bool:
    """Whether writing failed for want of room: a full disk, a quota, a limit on the size of files."""
    signs = ("No space left", "File too large", "os error 28", "os error 27", "Disk quota")
    lacking = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
    return getattr(error, "errno", None) in lacking or any(sign in str(error) for sign in signs)


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary path to write to; it takes the place of `path` in one move, and only when all went well.

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
        why = "the disk is full, or a limit on the size of files is reached" if full(error) else error.strerror or error
        kept = "what was there before is untouched" if path.is_file() else "there is no earlier one"
        raise NotSaved(f"could not save {path}: {why}; {kept}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def save_tensors(path: str | Path, tensors: dict[str, Tensor], header: dict[str, str]) -> None:
    """A safetensors file; what its library cannot write is an OSError like any other."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, str(path), header)
    except SafetensorError as error:
        raise OSError(str(error)) from error


def write_json(path: str | Path, content: Any) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: str | Path) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged, it is not valid JSON: {error}") from None
