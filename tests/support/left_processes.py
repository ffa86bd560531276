"""Processes that tests have started and not ended: they would keep the output of a finished run open."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

MARK = "PROXYMETRIC_TEST_SESSION"
"""an environment variable that a test session sets and every process that it starts inherits"""
GRACE = 15.0
"""seconds for helpers that end by themselves once their parent has ended"""


def mark_session() -> None:
    """Mark this process, unless the session that started it has done so."""
    os.environ.setdefault(MARK, f"{os.getpid()}-{time.time_ns()}")


def left_processes() -> dict[int, str]:
    """The processes of this session that are still alive, and their command lines; without this process."""
    mark = f"{MARK}={os.environ[MARK]}".encode()
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_ours = mark in (folder / "environ").read_bytes().split(b"\0")
            words = (folder / "cmdline").read_bytes().split(b"\0")  # empty for one that has ended
        except OSError:  # it has ended, or it is another user's
            continue
        if is_ours and any(words) and int(folder.name) != os.getpid():
            found[int(folder.name)] = b" ".join(words).decode(errors="replace").strip()
    return found


def end_left_processes() -> dict[int, str]:
    """Wait for the processes of this session to end, and kill those that do not; return those that were killed."""
    end = time.monotonic() + GRACE
    while (left := left_processes()) and time.monotonic() < end:
        time.sleep(0.1)
    for pid, command in left.items():
        print(f"left behind by a test and killed: {pid} {command[:200]}", file=sys.stderr)
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return left
