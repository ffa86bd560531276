"""Cases of which the tests of a version run a part; another seed draws others, and `make test-all` runs all of them."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import TypeVar

from proxymetric.system.version import __version__

SHARE = float(os.environ.get("PROXYMETRIC_TEST_SHARE", "0.1"))
"""part of the cases that are run; 1 for all of them"""
SEED_VARIABLE = "PROXYMETRIC_TEST_SEED"
Case = TypeVar("Case")


def seed() -> str:
    """What the cases are drawn by: that of the environment, or the version, so that no commit meets new cases alone."""
    return os.environ.setdefault(SEED_VARIABLE, __version__)


def some(cases: Sequence[Case], share: float = SHARE) -> list[Case]:
    """The cases that are run, in their order: a part of at least one."""
    return drawn(cases, max(1, round(max(share, SHARE) * len(cases))))


def examples(count: int) -> int:
    """The examples that hypothesis draws for a property: a third of them; all in `make test-all`."""
    return count if SHARE == 1 else count // 3


def drawn(cases: Sequence[Case], count: int, name: str = "") -> list[Case]:
    """That many cases, in their order, drawn for this name; all cases if all are run."""
    count = len(cases) if SHARE == 1 else min(len(cases), count)
    chosen = set(random.Random(seed() + name).sample(range(len(cases)), count))
    return [case for number, case in enumerate(cases) if number in chosen]
