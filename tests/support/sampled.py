"""Cases of which each commit runs a part, another one than the commit before; `make test-all` runs all of them."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

SHARE = float(os.environ.get("PROXYMETRIC_TEST_SHARE", "0.1"))
"""part of the cases that are run; 1 for all of them"""
SEED_VARIABLE = "PROXYMETRIC_TEST_SEED"
Case = TypeVar("Case")


def seed() -> str:
    """What the cases are drawn by: that of the environment, or the commit."""
    if SEED_VARIABLE not in os.environ:
        words = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD"]
        try:
            os.environ[SEED_VARIABLE] = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):  # the source without its history
            os.environ[SEED_VARIABLE] = "0"
    return os.environ[SEED_VARIABLE]


def some(cases: Sequence[Case], share: float = SHARE) -> list[Case]:
    """The cases that are run, in their order: a part of at least one."""
    count = min(len(cases), max(1, round(max(share, SHARE) * len(cases))))
    chosen = set(random.Random(seed()).sample(range(len(cases)), count))
    return [case for number, case in enumerate(cases) if number in chosen]
