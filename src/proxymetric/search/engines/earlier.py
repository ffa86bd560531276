"""The engine of the state before a change, from which the next one can be made."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Earlier(NamedTuple):
    """The engine of the state before a change."""

    settings: dict[str, Any]
    """its settings with facts"""
    folder: Path
    """where its files are"""
    files: Collection[str]
    """the names of the files of the map and of the engine before"""
    rows: np.ndarray
    """(count,) for each item after the change, in the order of its rows, its row before; -1 for a new one"""
