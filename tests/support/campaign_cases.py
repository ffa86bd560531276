"""Shared parts of the campaign's tests: which cases are run, and what counts as a failure."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from sampled import SHARE

SEED = 20261116
Case = TypeVar("Case")


def some(cases: Sequence[Case]) -> list[Case]:
    """The cases that are run: all of them, or a part drawn by the seed."""
    count = min(len(cases), max(1, round(SHARE * len(cases))))
    chosen = set(random.Random(SEED).sample(range(len(cases)), count))
    return [case for number, case in enumerate(cases) if number in chosen]


def check_sentence(text: str) -> None:
    """Check that a refusal is one sentence of this package, and not a traceback."""
    assert "Traceback" not in text, text
    assert "proxymetric: " in text, text


def contents(folder: Path) -> dict[str, bytes | str]:
    """The bytes of every file below a folder; the kind of everything that is not a regular file."""
    found: dict[str, bytes | str] = {}
    for path in sorted(folder.rglob("*")):
        name = os.fsencode(path.relative_to(folder)).decode("latin-1")
        if path.is_symlink():
            found[name] = f"link to {os.readlink(path)}"
        elif path.is_dir():
            found[name] = "folder"
        else:
            found[name] = path.read_bytes() if path.is_file() else "special"
    return found
