"""The search of a study: ranges of a row's numbers, quasi-random draws of them, and the best draw of each row.

Every row gets the same number of draws, so that a method is compared with a baseline that was searched as much. A draw
is a short run that is scored on held-out classes, never on the test half.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxymetric.metrics.names import lower_is_better
from proxymetric.studies.ranges import Draw, Group, Search

if TYPE_CHECKING:
    from proxymetric.runs.result import Result
    from proxymetric.studies.spec import Row, Study, Task

SEARCHED = "-searched"
"""end of the name of the row that trains with the best draw of a row"""
DRAWS_FILE = "draws.jsonl"
"""the collected draws of a study, a line for each"""


def with_searched_rows(rows: Mapping[str, Row], search: Search | None) -> dict[str, Row]:
    """The rows of a study and, after each row with ranges, the row that trains with its best draw.

    Raises:
        ValueError: a row is searched and its baseline is not, or a row has nothing to search.
    """
    all_rows: dict[str, Row] = {}
    for row in rows.values():
        all_rows[row.name] = row
        if row.ranges is None:
            continue
        where = f"rows.{row.name}.search"
        if search is None:
            raise ValueError(f"{where}: got ranges, expected a table [search] with draws and epochs in the study, too")
        if not row.ranges:
            raise ValueError(f"{where}: got no range, expected some here or in [search.ranges]")
        if row.baseline is not None and rows[row.baseline].ranges is None:
            raise ValueError(
                f"{where}: got a search of this row alone, expected one of its baseline {row.baseline!r}, too: both "
                "are searched with the same number of draws"
            )
        name = f"{row.name}{SEARCHED}"
        if name in rows:
            raise ValueError(f"{where}: got a row named {name!r}, expected another name: it is that of the search")
        all_rows[name] = dataclasses.replace(
            row, name=name, title=f"{row.title}, searched, {search.draws} draws", printed=row.name, why="",
            baseline=None if row.baseline is None else f"{row.baseline}{SEARCHED}",
        )  # fmt: skip
    if search is not None and len(all_rows) == len(rows):
        raise ValueError("search: got no row to search, expected a table `search` in a row, such as `search = {}`")
    return all_rows


# Choose


def selection_score(result: Result) -> float | None:
    """The score by which a run's epoch was chosen, negative for an error rate; None if the run uses its last epoch."""
    if result.protocol == "last" or result.chosen_by == "last":
        return None
    monitor = result.recipe["train"]["monitor"]
    value = result.validation.get(monitor)
    return None if value is None else -float(value) if lower_is_better(monitor) else float(value)


def draw_of(task: Task, result: Result) -> Draw:
    """What came of a draw whose run is done."""
    numbers = {key: value for key, value in result.validation.items() if isinstance(value, float)}
    return Draw(
        **_identity(task), score=selection_score(result), metric=result.recipe["train"]["monitor"],
        validation={key: value for key, value in numbers.items() if key in result.recipe["train"]["metrics"]},
        epoch=result.chosen_epoch, seconds=result.seconds, identity=result.data.get("identity"), commit=result.commit,
    )  # fmt: skip


def failed_draw(task: Task, error: str) -> Draw:
    """What came of a draw whose run cannot be done with its numbers: it has no score."""
    return Draw(**_identity(task), score=None, error=(error.splitlines() or [""])[0])


def _identity(task: Task) -> dict[str, Any]:
    cell, number = task.cell, task.draw
    assert number is not None
    names = {"run": task.name, "row": cell.row, "data": cell.data, "backbone": cell.backbone}
    return {**names, "draw": number, "values": task.values}


def chosen(study: Study, draws: Iterable[Draw]) -> dict[Group, Draw]:
    """The best draw of each row, data set and backbone whose draws are all there; of equal ones, the first."""
    assert study.search is not None
    groups: dict[Group, list[Draw]] = {}
    for draw in sorted(draws, key=lambda draw: draw.draw):
        groups.setdefault(draw.group, []).append(draw)
    best = {}
    for group, members in groups.items():
        scored = [draw for draw in members if draw.score is not None]
        if len(members) == study.search.draws and scored:
            best[group] = max(scored, key=lambda draw: draw.score or -math.inf)
    return best


def resolved(study: Study, draws: Iterable[Draw]) -> Study:
    """The study whose searched rows have the numbers of their best draws, as far as these are known."""
    return study if study.search is None else dataclasses.replace(study, chosen=chosen(study, draws))


def short(identity: str | None) -> str:
    """The first digits of the hash of a data set's images.

    >>> short("1e14fb3c6a164db5"), short(None)
    ('1e14fb3c6a16', 'unknown')
    """
    return "unknown" if identity is None else identity[:12]


# Store


def as_lines(draws: Iterable[Draw]) -> str:
    """The content of `draws.jsonl`."""
    return "".join(json.dumps(dataclasses.asdict(draw), ensure_ascii=False) + "\n" for draw in draws)


def from_lines(text: str, file: str) -> list[Draw]:
    """Read `draws.jsonl`.

    Raises:
        ValueError: a line is damaged.
    """
    draws = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            draws.append(Draw(**json.loads(line)))
        except (ValueError, TypeError):
            raise ValueError(f"{file}: got a damaged line {number}, expected the draw of a search") from None
    return draws


def read_draws(file: Path) -> list[Draw]:
    """The draws of a file; none if there is no such file.

    Raises:
        ValueError: a line is damaged.
    """
    return from_lines(file.read_text(encoding="utf-8"), str(file)) if file.is_file() else []


def of_study(study: Study, draws: Iterable[Draw]) -> list[Draw]:
    """The draws that have the numbers of the study as it is written now."""
    values = {task.name: task.values for task in study.draws()}
    return [draw for draw in draws if draw.values == values.get(draw.run)]


def check_draws(study: Study, draws: Iterable[Draw], source: Path) -> None:
    """Refuse draws that the study as it is written now does not make.

    Raises:
        ValueError: a draw is unknown or has other numbers.
    """
    tasks = {task.name: task for task in study.draws()}
    for draw in draws:
        task = tasks.get(draw.run)
        if task is None:
            count = "no search" if study.search is None else f"{study.search.draws} draws of a row"
            raise ValueError(f"draws: got {source} with the draw {draw.run}, expected those of the study, with {count}")
        for key in {**task.values, **draw.values}:
            if draw.values.get(key) != task.values.get(key):
                raise ValueError(
                    f"draws: got {source} with the draw {draw.run}, in which {key} is {draw.values.get(key)!r}, not "
                    f"{task.values.get(key)!r}: its ranges, seed or names were others; expected draws of the study as "
                    "it is written now"
                )
