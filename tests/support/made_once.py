"""Folders that all tests of a session read, made once for all workers of pytest-xdist."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The folder `name` of the session, which `make(folder)` fills if no worker has done so yet."""
    own = factory.getbasetemp()
    place = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "made_once"
    place.mkdir(exist_ok=True)
    folder, done = place / name, place / f"{name}.done"
    with open(place / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a worker that was killed
            make(folder)
            done.touch()
    return folder
