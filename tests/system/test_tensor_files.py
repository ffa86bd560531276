"""Files of tensors: every damaged byte is noticed, and files without a checksum are read as before."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from proxymetric.search import VectorFile
from proxymetric.system.checkpoint import Checkpoint
from proxymetric.system.tensor_files import (
    TYPE_NAMES,
    Damaged,
    StreamedTensor,
    checksum,
    read_header,
    read_tensors,
    write_tensors,
)

TENSORS = {
    "float": torch.randn(3, 5),
    "half": torch.randn(4).bfloat16(),
    "whole": torch.arange(6).reshape(2, 3),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "nothing": torch.zeros(0, 4),
    "flags": torch.tensor([True, False]),
}


def test_what_is_written_is_read(tmp_path):
    file = tmp_path / "a.safetensors"
    write_tensors(file, TENSORS | {"turned": torch.randn(3, 4).T}, {"k": "v"})
    tensors, header = read_tensors(file)
    assert header["k"] == "v"
    assert all(torch.equal(tensors[name], value) for name, value in TENSORS.items())
    assert header["crc32"] == checksum(tensors, {"k": "v"})


def test_safetensors_reads_what_is_written(tmp_path):
    """An odd number of bytes before numbers of 8 bytes, a name and a value that are not ASCII."""
    tensors = TENSORS | {
        "bytes": torch.arange(3, dtype=torch.uint8),
        "a": torch.arange(5, dtype=torch.int8),
        "ä": torch.ones(1),
    }
    write_tensors(tmp_path / "ours", tensors, {"k": "ü"})
    save_file(tensors, tmp_path / "theirs", {"k": "ü"})
    ours, theirs = load_file(tmp_path / "ours"), load_file(tmp_path / "theirs")
    assert ours.keys() == theirs.keys() == tensors.keys()
    assert all(torch.equal(ours[name], value) and value.dtype == ours[name].dtype for name, value in theirs.items())
    assert read_header(tmp_path / "ours")["k"] == "ü"


@pytest.mark.parametrize("dtype", TYPE_NAMES, ids=str)
def test_every_type_is_written_as_the_library_writes_it(tmp_path, dtype):
    value = torch.randint(0, 2, (3, 5)).to(dtype)
    write_tensors(tmp_path / "ours", {"a": value}, {})
    save_file({"a": value}, tmp_path / "theirs")
    ours, theirs = load_file(tmp_path / "ours")["a"], load_file(tmp_path / "theirs")["a"]
    assert ours.dtype == theirs.dtype == dtype
    assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def test_a_type_that_a_file_cannot_hold_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match=r"^a: got a tensor of torch.complex128, expected one of complex64, float64, "):
        write_tensors(tmp_path / "a", {"a": torch.ones(2, dtype=torch.complex128)}, {})
    assert not list(tmp_path.iterdir())


def test_a_streamed_tensor_makes_the_same_file(tmp_path):
    asked = []

    def parts(name, value, sizes):
        for part in value.split(sizes):
            asked.append(name)
            yield part

    streamed = {
        name: StreamedTensor(TENSORS[name].dtype, TENSORS[name].shape, parts(name, TENSORS[name], sizes))
        for name, sizes in {"whole": [1, 1], "float": [2, 1], "half": [4]}.items()
    }
    write_tensors(tmp_path / "streamed", TENSORS | streamed, {"k": "v"})
    write_tensors(tmp_path / "whole", TENSORS, {"k": "v"})
    assert asked == ["float", "float", "half", "whole", "whole"], "in the order of the names"
    assert (tmp_path / "streamed").read_bytes() == (tmp_path / "whole").read_bytes()
    too_short = StreamedTensor(torch.float32, (3,), iter([torch.ones(2)]))
    with pytest.raises(AssertionError, match="a has parts of 8 bytes"):
        write_tensors(tmp_path / "short", {"a": too_short}, {})


@pytest.mark.parametrize("seed", range(40))
def test_a_changed_byte_anywhere_is_noticed(tmp_path, seed):
    file = tmp_path / "a.safetensors"
    write_tensors(file, TENSORS, {"k": "v"})
    content = bytearray(file.read_bytes())
    position = random.Random(seed).randrange(len(content))
    content[position] ^= 1 << random.Random(-seed).randrange(8)
    before = read_tensors(file)
    file.write_bytes(content)
    try:
        tensors, _ = read_tensors(file)
    except Damaged:
        return
    # The remaining bytes are the name of the checksum and the padding of the header; the tensors are unchanged.
    assert checksum(tensors) == checksum(before[0])


def test_names_and_shapes_are_part_of_the_checksum():
    value = torch.arange(6.0)
    digests = {checksum({"a": value}), checksum({"b": value}), checksum({"a": value.view(2, 3)}), checksum({})}
    assert len(digests) == 4


def test_a_file_without_a_checksum_is_read(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors", {"state": "{}"})
    assert Checkpoint.read(tmp_path / "a.safetensors").state == {}


@pytest.mark.parametrize("read", [Checkpoint.read, VectorFile.load])
def test_readers_name_the_file(tmp_path, read):
    file = tmp_path / "a.safetensors"
    VectorFile(torch.eye(2), ["x", "y"]).save(file)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.safetensors.*its checksum does not match"):
        read(file)
    with pytest.raises(ValueError, match=r"gone\.safetensors.*No such file"):
        read(Path(tmp_path / "gone.safetensors"))


def test_an_interrupt_never_makes_a_whole_file_look_damaged(tmp_path):
    file = tmp_path / "many.safetensors"
    write_tensors(file, {f"tensor{k}": torch.ones(3) for k in range(2000)}, {"made by": "a test"})
    draw, ends = random.Random(0), Counter[str]()
    started = time.perf_counter()
    read_tensors(file)
    seconds = time.perf_counter() - started
    # Background shells ignore SIGINT, so a handler is set here.
    handlers = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGALRM: lambda number, frame: signal.raise_signal(signal.SIGINT),
    }
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        for _ in range(60):
            try:
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(0.0001, seconds))
                assert read_header(file)["made by"] == "a test"
                assert len(read_tensors(file)[0]) == 2000
                signal.setitimer(signal.ITIMER_REAL, 0)
                ends["read"] += 1
            except KeyboardInterrupt:
                ends["interrupted"] += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in previous.items():
            signal.signal(number, handler)
    assert ends["interrupted"] > 20, ends
