"""The best run of a row, by the score that chose its epoch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from proxymetric.metrics.names import lower_is_better
from proxymetric.studies.folder import RunStatus
from proxymetric.studies.spec import Cell, Study, Task

if TYPE_CHECKING:
    from proxymetric.runs.result import Result


def selection_score(result: Result) -> float | None:
    """The score by which a run's epoch was chosen, negative for an error rate; None if the run uses its last epoch."""
    if result.protocol == "last" or result.chosen_by == "last":
        return None
    monitor = result.recipe["train"]["monitor"]
    value = result.validation.get(monitor)
    return None if value is None else -float(value) if lower_is_better(monitor) else float(value)


def best_run(study: Study, cell: Cell, statuses: dict[str, RunStatus]) -> Task | None:
    """The finished run of a cell with the best selection score; the first seed if no epoch was chosen."""
    pairs = [
        (task, statuses[task.name].result) for task in study.tasks() if task.cell == cell and task.name in statuses
    ]
    scored = [(task, selection_score(result)) for task, result in pairs if result is not None]
    if not scored:
        return None
    return max(scored, key=lambda pair: -math.inf if pair[1] is None else pair[1])[0]
