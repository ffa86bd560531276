"""The state of an engine before a change, from which the next state can be made."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Earlier(NamedTuple):
    """The state of an engine before a change."""

    settings: dict[str, Any]
    """its settings with facts"""
    folder: Path
    """where its files are"""
    rows: np.ndarray
    """(N,) for each vector after the change, its row before; -1 for a new vector"""
