"""The best run of a row, by the score that chose its epoch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from proxymetric.studies.folder import RunStatus
from proxymetric.studies.search import selection_score
from proxymetric.studies.spec import Cell, Study, Task

if TYPE_CHECKING:
    pass


def best_run(study: Study, cell: Cell, statuses: dict[str, RunStatus]) -> Task | None:
    """The finished run of a cell with the best selection score; the first seed if no epoch was chosen."""
    pairs = [
        (task, statuses[task.name].result) for task in study.tasks() if task.cell == cell and task.name in statuses
    ]
    scored = [(task, selection_score(result)) for task, result in pairs if result is not None]
    if not scored:
        return None
    return max(scored, key=lambda pair: -math.inf if pair[1] is None else pair[1])[0]
