"""Files of tensors (safetensors) with a checksum in their header, so that a damaged file is noticed when it is read."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from proxymetric.system.signals import interrupt_after

CHECKSUM = "crc32"
"""key of the checksum in the header of a file"""
TYPE_NAMES = {
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""type -> its name in a safetensors file"""
HEADER_ALIGNMENT = 8
"""the tensors of a safetensors file begin at a multiple of this many bytes"""


class StreamedTensor(NamedTuple):
    """A tensor that is written part by part, so that it is not in memory as a whole."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: Iterable[Tensor]
    """its rows in their order, in parts of any size; they are asked for once"""


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
    crc = _header_checksum(header or {})
    for name in sorted(tensors):
        crc = zlib.crc32(_content(tensors[name]), zlib.crc32(_description(name, tensors[name]), crc))
    return f"{crc:08x}"


def _header_checksum(header: Mapping[str, str]) -> int:
    crc = 0
    for key, text in sorted(header.items()):
        if key != CHECKSUM:
            crc = zlib.crc32(json.dumps([key, text]).encode(), crc)
    return crc


def _description(name: str, tensor: Tensor | StreamedTensor) -> bytes:
    return json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode()


def _content(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in host memory, without a copy where it lies there in order."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor | StreamedTensor], header: dict[str, str]) -> None:
    """Write a safetensors file with a checksum of its tensors in the header.

    The safetensors library needs all tensors in memory; here, they are written one after the other, by their names.

    Args:
        path: the file.
        tensors: the tensors by name. The parts of streamed ones are asked for in the order of the names.
        header: text values by name.

    Raises:
        ValueError: a tensor has a type that such a file cannot hold; nothing has been written.
        OSError: the file could not be written.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "a.safetensors"
        >>> write_tensors(file, {"a": StreamedTensor(torch.float32, (3,), iter([torch.ones(1), torch.zeros(2)]))}, {})
        >>> read_tensors(file)[0]
        {'a': tensor([1., 0., 0.])}
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in TYPE_NAMES:
            types = ", ".join(str(dtype).removeprefix("torch.") for dtype in TYPE_NAMES)
            raise ValueError(f"{name}: got a tensor of {tensor.dtype}, expected one of {types}")
    places, size = dict[str, tuple[int, int]](), 0
    # A tensor must begin at a multiple of the size of its numbers: those of the largest numbers are first in the file.
    for name in sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name)):
        start, size = size, size + math.prod(tensors[name].shape) * tensors[name].dtype.itemsize
        places[name] = start, size
    entries: dict[str, dict[str, object]] = {
        name: {"dtype": TYPE_NAMES[tensors[name].dtype], "shape": list(tensors[name].shape), "data_offsets": place}
        for name, place in places.items()
    }
    with open(path, "wb") as file:
        crc, begin = _header_checksum(header), _write_header(file, entries, header, crc=0)
        for name in sorted(tensors):
            tensor, (start, stop) = tensors[name], places[name]
            crc = zlib.crc32(_description(name, tensor), crc)
            file.seek(begin + start)
            for part in tensor.parts if isinstance(tensor, StreamedTensor) else (tensor,):
                content = _content(part)
                crc = zlib.crc32(content, crc)
                file.write(content)
            assert file.tell() == begin + stop, f"{name} has parts of {file.tell() - begin - start} bytes"
        file.seek(0)
        _write_header(file, entries, header, crc)


def _write_header(file: BinaryIO, entries: dict[str, dict[str, object]], header: dict[str, str], crc: int) -> int:
    """Write the header, whose size does not depend on the checksum; return where the tensors begin."""
    metadata = header | {CHECKSUM: f"{crc:08x}"}
    content = json.dumps({"__metadata__": metadata, **entries}, ensure_ascii=False, separators=(",", ":")).encode()
    content += b" " * (-len(content) % HEADER_ALIGNMENT)
    file.write(len(content).to_bytes(8, "little"))
    file.write(content)
    return 8 + len(content)


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
        proxymetric.system.tensor_files.Damaged: its checksum does not match: the file was damaged after it was written
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
