"""The best run of a row, by the score that chose its epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxymetric.studies.folder import RunStatus
from proxymetric.studies.spec import Cell, Study, Task

if TYPE_CHECKING:
    from proxymetric.runs.result import Result


def selection_score(result: Result) -> float | None:
    """The score by which a run's epoch was chosen; None if the run uses its last epoch."""
    if result.protocol == "last" or result.chosen_by == "last":
        return None
    value = result.validation.get(result.recipe["train"]["monitor"])
    return None if value is None else float(value)


def best_run(study: Study, cell: Cell, statuses: dict[str, RunStatus]) -> Task | None:
    """The finished run of a cell with the best selection score; the first seed if no epoch was chosen."""
    pairs = [
        (task, statuses[task.name].result) for task in study.tasks() if task.cell == cell and task.name in statuses
    ]
    scored = [(task, selection_score(result)) for task, result in pairs if result is not None]
    if not scored:
        return None
    return max(scored, key=lambda pair: -1.0 if pair[1] is None else pair[1])[0]
