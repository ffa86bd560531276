"""A full disk while an index changes: one sentence that names it, and the index stays as it was."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image

from proxymetric.search.index import Index
from proxymetric.search.manifest import FILE
from proxymetric.system.files import NotSaved
from terminal import bytes_of, finished_run, proxymetric

FULL = "the disk is full, or a limit on file size is reached"


@pytest.fixture
def index(tmp_path: Path) -> Index:
    index = Index.create(tmp_path / "x.index", dim=64)
    index.add([f"{n:03}" for n in range(100)], torch.randn(100, 64), thumbnails=[bytes(100)] * 100)
    return index


@pytest.fixture
def limit() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def refused_change(index: Index, file_size: int) -> str:
    """Add items while no file may become larger than `file_size`; return the error."""
    before, room = bytes_of(index.folder), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, room[1]))
    try:
        with pytest.raises(NotSaved) as caught:
            index.add([f"new {n}" for n in range(50)], torch.randn(50, 64), thumbnails=[bytes(10_000)] * 50)
    finally:
        # Remove the limit at once: it also applies to the file that the output of the tests may go to.
        resource.setrlimit(resource.RLIMIT_FSIZE, room)
    assert bytes_of(index.folder) == before, "no half-written file is left"
    assert len(Index.open(index.folder)) == len(index) == 100
    return str(caught.value)


@pytest.mark.usefixtures("limit")
def test_a_file_that_cannot_grow(index):
    sentences = {size: refused_change(index, size) for size in (100, 1_000, 10_000, 20_000, 100_000)}
    for size in (100, 1_000, 10_000, 20_000):  # the vectors do not fit
        assert sentences[size] == f"could not save {index.folder}: {FULL}; its earlier state is unchanged"
    assert f"could not save {index.folder}: " in sentences[100_000], "the thumbnails do not fit"
    index.add(["new 0"], torch.randn(1, 64))
    assert "new 0" in Index.open(index.folder)


def test_a_manifest_that_cannot_be_written(index):
    """All other files are written: the new generation is removed again."""
    before = bytes_of(index.folder)
    (index.folder / f".{FILE}.{os.getpid()}.part").mkdir()
    with pytest.raises(NotSaved, match=rf"could not save {index.folder}/{FILE}: .*; the earlier file is unchanged"):
        index.add(["new"], torch.randn(1, 64), thumbnails=[bytes(100)])
    assert bytes_of(index.folder) == before
    assert len(Index.open(index.folder)) == 100


def can_mount() -> bool:
    try:
        return subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]).returncode == 0
    except FileNotFoundError:
        return False


needs_a_disk = pytest.mark.skipif(not can_mount(), reason="a small disk needs the rights of root and `unshare`")


def on_a_small_disk(place: Path, kilobytes: int, script: str, *words: object) -> subprocess.CompletedProcess[str]:
    """Run a shell script in a separate mount namespace, where `place` is a disk of this size."""
    place.mkdir(exist_ok=True)
    mount = f"mount -t tmpfs -o size={kilobytes}k tmpfs {place} && {script}"
    environment = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        ["unshare", "--mount", "sh", "-c", mount, "sh", *map(str, words)],
        capture_output=True, text=True, timeout=120, env=environment,
    )  # fmt: skip


DISKS = [("float32", 80), ("float32", 700), ("float32", 900), ("float32", 1100)]
DISKS += [(kind, size) for kind in ("int8", "binary") for size in (80, 300)]
ADD = """
import sys, subprocess, torch
from proxymetric.search.index import Index
disk, *sizes = sys.argv[1:]
for case in sizes:
    kind, kilobytes = case.split()
    subprocess.run(["mount", "-o", f"remount,size={kilobytes}k", disk], check=True)
    index = Index.create(f"{disk}/x.index", dim=64, vectors=kind)
    index.add(["a"], torch.randn(1, 64))
    try:
        index.add([f"{n:05}" for n in range(3000)], torch.randn(3000, 64), thumbnails=[bytes(100)] * 3000)
    except OSError as error:
        print(case, type(error).__name__, error)
    assert Index.open(f"{disk}/x.index").ids == ["a"], case
    del index
    subprocess.run(["rm", "-r", f"{disk}/x.index"], check=True)
"""


@needs_a_disk
def test_a_disk_without_room_for_vectors_items_or_thumbnails(tmp_path):
    """A mapped file killed the process here (SIGBUS)."""
    small, cases = tmp_path / "small", [f"{kind} {kilobytes}" for kind, kilobytes in DISKS]
    done = on_a_small_disk(small, 80, '"$PYTHON" -c "$@"', ADD, small, *cases)
    assert done.returncode == 0, done
    sentence = f"NotSaved could not save {small / 'x.index'}: {FULL}; its earlier state is unchanged"
    assert done.stdout.splitlines() == [f"{case} {sentence}" for case in cases], done


@needs_a_disk
@pytest.mark.slow
def test_the_verbs_that_change_an_index(photos, tmp_path):
    run, small = finished_run(photos, tmp_path / "run"), tmp_path / "small"
    index, whole = small / "x.index", tmp_path / "whole.index"
    assert proxymetric("index", run, photos, "--out", whole).code == 0
    expected = bytes_of(whole)
    script = (
        f"cp -r {whole} {index}; cat /dev/zero > {small}/rest 2> /dev/null; "
        f'"$PYTHON" -m proxymetric "$@"; code=$?; rm {small}/rest; cp -r {index} {tmp_path}/after; '
        "exit $code"
    )
    Image.effect_mandelbrot((32, 32), (-2, -2, 2, 2), 50).save(tmp_path / "new.png")
    for words in (
        ("index", "remove", index, "--class", "class1"),
        ("index", "add-class", index, "new", tmp_path / "new.png"),
    ):
        done = on_a_small_disk(small, 2000, script, *words)
        after = bytes_of(tmp_path / "after")
        subprocess.run(["rm", "-r", str(tmp_path / "after")], check=True)
        assert done.returncode == 1, done
        sentence = done.stderr.splitlines()[-1]
        assert sentence.startswith(f"proxymetric: could not save {index}"), done
        assert FULL in sentence
        assert "shared memory" not in done.stderr
        assert after == expected
