"""Files of tensors (safetensors) with a checksum in their header, so that a damaged file is noticed when it is read."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from proxymetric.signals import interrupt_after

CHECKSUM = "crc32"
"""key of the checksum in the header of a file"""


class Damaged(ValueError):
    """A file is not what was written: it is cut short, it was changed, or it is another kind of file."""


def checksum(tensors: dict[str, Tensor], header: dict[str, str] | None = None) -> str:
    """The CRC-32 of a header and of names, types, shapes and bytes of tensors: it finds damage, not forgery.

    The computation takes 0.6 s for each GiB.

    Args:
        tensors: the tensors by name.
        header: text values by name; the checksum itself is left out.

    Returns:
        8 hexadecimal digits; the order of the dictionary does not change them.

    Example:
        >>> a, b = torch.zeros(2), torch.ones(2)
        >>> checksum({"a": a, "b": b}) == checksum({"b": b, "a": a})
        True
        >>> checksum({"a": a}) == checksum({"a": b})
        False
    """
    crc = 0
    for key, text in sorted((header or {}).items()):
        if key != CHECKSUM:
            crc = zlib.crc32(json.dumps([key, text]).encode(), crc)
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        description = json.dumps([name, str(value.dtype), list(value.shape)])
        crc = zlib.crc32(description.encode(), crc)
        crc = zlib.crc32(value.reshape(-1).view(torch.uint8).numpy().data, crc)
    return f"{crc:08x}"


def write_tensors(path: str | Path, tensors: dict[str, Tensor], header: dict[str, str]) -> None:
    """Write a safetensors file with a checksum of its tensors in the header.

    Args:
        path: the file.
        tensors: the tensors by name.
        header: text values by name.

    Raises:
        OSError: the file could not be written; also for errors of the safetensors library.
    """
    contiguous = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    # safetensors first writes to a file with a random name next to its target. In a separate folder, the file that a
    # killed process leaves behind can be recognised.
    target = Path(path)
    folder = target.with_name(f"{target.name}.tensors")
    try:
        folder.mkdir(exist_ok=True)
        with interrupt_after():
            save_file(contiguous, str(folder / target.name), header | {CHECKSUM: checksum(contiguous, header)})
        os.replace(folder / target.name, target)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def read_header(path: str | Path) -> dict[str, str]:
    """Read the header of a safetensors file, without its tensors.

    Args:
        path: the file.

    Returns:
        The header; empty if the file is not a safetensors file or has no header.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "a.safetensors"
        >>> write_tensors(file, {"a": torch.ones(2)}, {"made by": "hand"})
        >>> read_header(file)["made by"]
        'hand'
    """
    try:
        with interrupt_after(), safe_open(str(path), "pt") as opened:
            return dict(opened.metadata() or {})
    except (SafetensorError, ValueError, OSError):
        return {}


def read_tensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a safetensors file and compare its tensors with the checksum in its header, where there is one.

    Args:
        path: the file.

    Returns:
        The tensors by name, and the header.

    Raises:
        Damaged: the file cannot be read as safetensors, or its tensors are not those that were written.
        OSError: the file cannot be opened.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "a.safetensors"
        >>> write_tensors(file, {"a": torch.ones(2)}, {"made by": "hand"})
        >>> read_tensors(file)[0]
        {'a': tensor([1., 1.])}
        >>> content = bytearray(file.read_bytes())
        >>> content[-1] ^= 1
        >>> _ = file.write_bytes(content)
        >>> read_tensors(file)
        Traceback (most recent call last):
        proxymetric.tensor_files.Damaged: its checksum does not match: the file was damaged after it was written
    """
    with open(path, "rb"):
        pass  # raises the error of the file system; safetensors reports every error as a missing file
    try:
        with interrupt_after(), safe_open(str(path), "pt") as opened:
            header = dict(opened.metadata() or {})
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no dict
    except (SafetensorError, ValueError, OSError) as error:
        raise Damaged(f"it is not a readable safetensors file: {error}") from None
    if CHECKSUM in header and header[CHECKSUM] != checksum(tensors, header):
        raise Damaged("its checksum does not match: the file was damaged after it was written")
    return tensors, header
