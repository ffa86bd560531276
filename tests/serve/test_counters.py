"""The counters of a process of the service outlive a full disk, and so does the process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from proxymetric.serve.counters import Counters

SEARCHES = 'requests_total{route="search",status="200"}'

COUNT = """
import os, sys
from pathlib import Path
from proxymetric.serve.counters import Counters

def fill():
    for block in (4096, 1):
        try:
            with open(folder / "full", "ab", buffering=0) as file:
                while file.write(bytes(block)):
                    pass
        except OSError:
            pass

folder, is_full_at_first = Path(sys.argv[1]), sys.argv[2] == "first"
if is_full_at_first:
    fill()
counters = Counters(folder)
fill()
for _ in range(3):
    counters.pending(1)
    counters.batched(1)
    counters.answered("search", 200, seconds=0.02)
    counters.pending(-1)
assert 'requests_total{route="search",status="200"} 3' in counters.text(items=1), counters.text(items=1)
(folder / "full").unlink()
counters.answered("search", 200, seconds=0.02)
counters.folder.joinpath(f"{os.getpid()}.counters").rename(folder / "other.counters")
print(Counters(folder).text(items=1))
"""


def has_loop_devices() -> bool:
    """Whether a file can be mounted as a disk here."""
    if os.geteuid() != 0 or not shutil.which("mkfs.ext4") or not shutil.which("losetup"):
        return False
    return subprocess.run(["losetup", "--find"], capture_output=True).returncode == 0


def can_mount() -> bool:
    try:
        return subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not can_mount(), reason="a small disk needs the rights of root and `unshare`")
@pytest.mark.parametrize("full", ["first", "later"])
@pytest.mark.parametrize("disk", ["tmpfs", "ext4"])
def test_a_full_disk_kills_nothing_and_loses_no_count(disk, full, tmp_path):
    """On ext4 with blocks of 1 KB, a part of a mapped file had no room: the process was killed by SIGBUS."""
    place = tmp_path / "small"
    place.mkdir()
    mount = f"mount -t tmpfs -o size=64k tmpfs {place}"
    if disk == "ext4":
        if not has_loop_devices():
            pytest.skip("needs mkfs.ext4 and a loop device")
        image = tmp_path / "image"
        image.write_bytes(bytes(400 * 1024))
        subprocess.run(["mkfs.ext4", "-q", "-b", "1024", image], check=True, capture_output=True)
        mount = f"mount -o loop {image} {place}"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh", sys.executable, "-c", COUNT, place, full],
        capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done
    assert f"{SEARCHES} 4" in done.stdout, "there is room again"
    assert "proxymetric_pending_searches 0\n" in done.stdout
    named = [line for line in done.stderr.splitlines() if "No space left" in line]
    assert len(named) == (1 if full == "first" else 0), done.stderr
    assert all("small/" in line and "/metrics" in line for line in named)


TRUNCATE = """
import os, sys
from proxymetric.serve.counters import Counters
counters = Counters(sys.argv[1])
os.truncate(os.path.join(sys.argv[1], f"{os.getpid()}.counters"), 0)
counters.answered("search", 200, seconds=0.02)
"""


def test_a_file_that_somebody_truncates(tmp_path):
    """A mapped file killed the process, as it does where a full disk has no room for a page."""
    words = [sys.executable, "-c", TRUNCATE, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done
    assert f"{SEARCHES} 1" in Counters(tmp_path).text(items=1)


def test_a_file_that_cannot_be_written_is_named_once_and_tried_again(tmp_path, caplog):
    folder = tmp_path / "gone"
    counters = Counters(folder)
    counters.answered("search", 200, seconds=0.02)
    assert f"{SEARCHES} 1" in counters.text(items=1)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"counters: could not save {folder}")
    folder.mkdir()
    counters.answered("search", 200, seconds=0.02)
    (file,) = folder.iterdir()
    file.rename(folder / "other.counters")
    assert f"{SEARCHES} 2" in Counters(folder).text(items=1)
