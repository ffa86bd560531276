"""A study: methods x backbones x data x protocols x seeds, and the runs that it is made of."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from proxymetric.arguments.signatures import did_you_mean
from proxymetric.runs.protocol import CHOSEN_ON_TEST
from proxymetric.studies.ranges import SEARCH, Draw, Group, Range, Search, drawn

LABELS = {
    "held-out": "epoch chosen on held-out training classes",
    "last": "last epoch",
    "papers": CHOSEN_ON_TEST,
}
"""protocol -> which epoch was scored, as the tables call it"""


@dataclass(frozen=True)
class Data:
    """One data set of a study.

    `path` is absolute, relative to the data root, or the name of an embedded set such as "glyphs".
    """

    name: str
    path: str
    title: str
    settings: dict[str, Any]


@dataclass(frozen=True)
class Backbone:
    """One backbone of a study.

    `backbone` is its name in recipes; None: the recipe of each row chooses it.
    """

    name: str
    backbone: str | None
    weights: str | None
    title: str
    settings: dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One method of a study.

    `paper` holds the scores that the paper reports, `claim` the differences to its baseline, both as data set -> metric
    -> value in per cent. A claim of a paper that shows only a curve is "higher" or "lower" in the file and inf or -inf
    here. `why` says why the measured difference is as it is; `{name}` in it, or `{name:.2f}`, is the mean of a figure
    that the method reports about itself, of "chosen epoch", or of "chosen epoch of the baseline". `ranges` are the
    numbers that are searched; None: the row is not searched. `printed` is the row with the numbers as printed, of a row
    that trains with the best draw of a search; None for other rows.
    """

    name: str
    title: str
    recipe: str | None
    settings: dict[str, Any]
    baseline: str | None
    paper: dict[str, dict[str, float]]
    claim: dict[str, dict[str, float]]
    seeds: tuple[int, ...]
    protocols: tuple[str, ...]
    data: tuple[str, ...]
    backbones: tuple[str, ...]
    minutes: float | None
    why: str
    ranges: dict[str, Range] | None = None
    printed: str | None = None


@dataclass(frozen=True)
class Cell:
    """A row of the tables: a method on a data set with a backbone under a protocol, over all seeds."""

    row: str
    data: str
    backbone: str
    protocol: str


@dataclass(frozen=True)
class Task:
    """One run of a study."""

    cell: Cell
    seed: int
    recipe: Path | None = field(compare=False)
    settings: dict[str, Any] = field(compare=False, hash=False)
    """keys and values as for `--set`; the paths of data and weights are relative to the data root"""
    places: dict[str, str] = field(compare=False, hash=False)
    """the table of the study's file in which each setting is, such as "rows.vcpa.settings\""""
    draw: int | None = None
    """number of the draw of a search; None for other runs"""
    values: dict[str, Any] = field(default_factory=dict, compare=False, hash=False)
    """the numbers of the draw, or of the best draw"""
    waits: bool = field(default=False, compare=False)
    """whether the run needs the best draw of a search that is not done"""

    @property
    def name(self) -> str:
        """The name of the run and of its folder."""
        cell = self.cell
        number = f"seed{self.seed}" if self.draw is None else f"draw{self.draw:02d}"
        parts = (cell.row, cell.data, cell.backbone, cell.protocol, number)
        return "-".join(part for part in parts if part)


@dataclass(frozen=True)
class Study:
    """A study whose keys and values have been checked.

    Example:
        >>> from proxymetric.studies import parse
        >>> study = parse({"name": "two", "data": {"glyphs": {"path": "glyphs"}},
        ...                "rows": [{"name": "a"}, {"name": "b", "baseline": "a"}], "seeds": [0, 1]})
        >>> [task.name for task in study.tasks()]
        ['a-glyphs-held-out-seed0', 'b-glyphs-held-out-seed0', 'a-glyphs-held-out-seed1', 'b-glyphs-held-out-seed1']
    """

    name: str
    title: str
    metrics: tuple[str, ...]
    embeddings: tuple[str, ...]
    settings: dict[str, Any]
    data: dict[str, Data]
    backbones: dict[str, Backbone]
    rows: dict[str, Row]
    folder: Path
    search: Search | None = None
    chosen: dict[Group, Draw] = field(default_factory=dict)
    """the best draws, as far as they are known: see `search.resolved`"""

    def cells(self) -> list[Cell]:
        """The rows of the tables. Data sets, backbones, protocols and methods have the order of the file."""
        protocols = dict.fromkeys(protocol for row in self.rows.values() for protocol in row.protocols)
        return [
            Cell(row.name, data, backbone, protocol)
            for data, backbone, protocol in itertools.product(self.data, self.backbones, protocols)
            for row in self.rows.values()
            if data in row.data and backbone in row.backbones and protocol in row.protocols
        ]

    def tasks(self) -> list[Task]:
        """All runs, seed by seed, so that an interrupted study has complete pairs of method and baseline.

        The draws of a search are not among them: see `draws`.
        """
        return list(self._tasks)

    def draws(self) -> list[Task]:
        """The short runs of the search, row by row; none without a search."""
        return list(self._draws)

    def group(self, cell: Cell) -> Group | None:
        """The search that gives the runs of a row their numbers; None for a row as printed."""
        printed = self.rows[cell.row].printed
        if printed is None or self.search is None:
            return None
        return printed, self.search.data or cell.data, cell.backbone

    @functools.cached_property
    def _tasks(self) -> list[Task]:
        cells = self.cells()
        seeds = sorted({seed for row in self.rows.values() for seed in row.seeds}, key=self._place)
        return [self._task(cell, seed) for seed in seeds for cell in cells if seed in self.rows[cell.row].seeds]

    def group_of_draw(self, task: Task) -> Group | None:
        """The search of a draw; None for other runs."""
        return None if task.draw is None else (task.cell.row, task.cell.data, task.cell.backbone)

    @functools.cached_property
    def _draws(self) -> list[Task]:
        groups = dict.fromkeys(filter(None, map(self.group, self.cells())))
        tasks = []
        for row, data, backbone in sorted(groups, key=lambda group: list(self.rows).index(group[0])):
            cell, search, ranges = Cell(row, data, backbone, SEARCH), self.search, self.rows[row].ranges
            assert search is not None
            assert ranges is not None
            for number, values in enumerate(drawn(self.name, row, ranges, search)):
                task = self._task(cell, search.seed)
                short = {"protocol": "held-out", "train.epochs": search.epochs, "train.refit": False}
                places = task.places | dict.fromkeys(values, f"rows.{row}.search")
                tasks.append(
                    replace(task, settings=task.settings | values | short, places=places, draw=number, values=values)
                )
        return tasks

    def _place(self, seed: int) -> tuple[int, int]:
        return min(row.seeds.index(seed) for row in self.rows.values() if seed in row.seeds), seed

    def _task(self, cell: Cell, seed: int) -> Task:
        row, data, backbone = self.rows[cell.row], self.data[cell.data], self.backbones[cell.backbone]
        chosen = {} if backbone.backbone is None else {"encoder.backbone": backbone.backbone}
        tables = {
            "settings": self.settings,
            f"data.{data.name}.settings": data.settings,
            f"backbones.{backbone.name}": chosen,
            f"backbones.{backbone.name}.settings": backbone.settings,
            f"rows.{row.name}.settings": row.settings,
        }
        # A study compares trainings, so its runs keep the trained model.
        settings = {"train.keep": "trained"} | {key: value for table in tables.values() for key, value in table.items()}
        places = {key: place for place, table in tables.items() for key in table}
        settings |= {"data.path": data.path, "protocol": cell.protocol, "seed": seed}
        if backbone.weights is not None:
            settings["encoder.weights"] = backbone.weights
        task, group = Task(cell, seed, self._recipe(row, cell), settings, places), self.group(cell)
        if group is None:
            return task
        if (best := self.chosen.get(group)) is None:
            return replace(task, waits=True)
        return replace(task, settings=settings | best.values, values=best.values)

    def _recipe(self, row: Row, cell: Cell) -> Path | None:
        if row.recipe is None:
            return None
        name = row.recipe.replace("{data}", cell.data).replace("{backbone}", cell.backbone)
        files = [folder / name for folder in (self.folder, Path(), *self.folder.absolute().parents)]
        file = next((file for file in files if file.is_file()), None)
        if file is not None:
            return file
        from proxymetric.runs.recipe import find

        try:
            return find(name)
        except ValueError:
            raise ValueError(
                f"rows.{row.name}.recipe: got {name!r}, expected a file in {self.folder} or the working folder, or the "
                "name of a shipped recipe"
            ) from None


def narrowed(study: Study, only: Iterable[str] = (), seeds: Iterable[int] = (), data: Iterable[str] = ()) -> list[Task]:
    """The runs of the given rows, seeds and data sets, after the draws that they need; an empty argument selects all.

    Raises:
        ValueError: the study has no such row, seed or data set, or no run that has all of them.

    Example:
        >>> from proxymetric.studies import parse
        >>> study = parse({"name": "two", "data": {"g": {"path": "glyphs"}}, "rows": [{"name": "a"}, {"name": "b"}]})
        >>> [task.name for task in narrowed(study, only=["b"])]
        ['b-g-held-out-seed0']
    """
    only, seeds, data, tasks = list(only), list(seeds), list(data), study.tasks()
    for flag, kind, names, known_names in (
        ("--only", "rows", only, list(study.rows)), ("--data", "data sets", data, list(study.data))
    ):  # fmt: skip
        for name in names:
            if name not in known_names:
                listed = ", ".join(known_names)
                raise ValueError(
                    f"{flag}: got {name!r}, expected {kind} of the study ({listed}){did_you_mean(name, known_names)}"
                )
    known = sorted({task.seed for task in tasks})
    for seed in seeds:
        if seed not in known:
            raise ValueError(f"--seeds: got {seed}, expected one of {', '.join(map(str, known))}")
    chosen = [
        task
        for task in tasks
        if (not only or task.cell.row in only)
        and (not seeds or task.seed in seeds)
        and (not data or task.cell.data in data)
    ]
    if not chosen:
        asked = {"--only": only, "--seeds": [str(seed) for seed in seeds], "--data": data}
        words = " ".join(f"{flag} {','.join(names)}" for flag, names in asked.items() if names)
        raise ValueError(
            f"{words}: got no run of the study, expected rows, seeds and data sets that have runs together"
        )
    needed = {study.group(task.cell) for task in chosen}
    draws = [task for task in study.draws() if study.group_of_draw(task) in needed]
    return draws + chosen
