"""What several of the README's tables are made with."""

from __future__ import annotations

import statistics
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
T95 = {3: 4.303, 4: 3.182, 5: 2.776}
"""Student's t for a 95 % interval, by the number of runs"""


def score(run: dict, name: str) -> float:
    return run["rows"]["trained encoder"][name]


def interval(values: list[float], sign: str = "") -> str:
    mean = f"{100 * statistics.mean(values):{sign}.1f}"
    if len(values) < 3:
        return mean  # no interval that says anything
    return f"{mean} ± {100 * T95[len(values)] * statistics.stdev(values) / len(values) ** 0.5:.1f}"


def paragraph(words: str) -> str:
    """Words in lines as the README has them."""
    return textwrap.fill(words, 118, break_on_hyphens=False)
