"""The scores of a study by row and seed: what its tables and plots are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxymetric.studies.inference import Mean, paired
from proxymetric.studies.spec import LABELS, Cell, Study

if TYPE_CHECKING:
    from proxymetric.runs.result import Result

CHOSEN, LAST = "trained encoder", "last epoch"


class Results:
    """The scores of a study in per cent, by row of the tables and seed.

    Args:
        study: what was run.
        results: the results by the name of the run.
    """

    def __init__(self, study: Study, results: dict[str, Result]) -> None:
        self.study = study
        self.runs: dict[Cell, dict[int, Result]] = {}
        for task in study.tasks():
            if task.name in results:
                self.runs.setdefault(task.cell, {})[task.seed] = results[task.name]

    def groups(self) -> list[tuple[str, list[Cell]]]:
        """Rows of the tables that belong together: of one data set, backbone and protocol, with a heading."""
        groups: dict[tuple[str, str, str], list[Cell]] = {}
        for cell in self.study.cells():
            if cell in self.runs:
                groups.setdefault((cell.data, cell.backbone, cell.protocol), []).append(cell)
        return [(self.heading(*key), cells) for key, cells in groups.items()]

    def heading(self, data: str, backbone: str, protocol: str) -> str:
        """What is compared, in words."""
        places = (self.study.data[data].title, self.study.backbones[backbone].title)
        return f"{', '.join(filter(None, places))}: {LABELS[protocol]}"

    def scores(self, cell: Cell, metric: str, row: str = CHOSEN) -> dict[int, float]:
        """By seed, in per cent."""
        runs = self.runs.get(cell, {})
        return {seed: 100 * run.rows[row][metric] for seed, run in runs.items() if metric in run.rows.get(row, {})}

    def baseline(self, cell: Cell) -> Cell | None:
        """The row that this one is paired with, where it was run too."""
        name = self.study.rows[cell.row].baseline
        other = None if name is None else Cell(name, cell.data, cell.backbone, cell.protocol)
        return other if other in self.runs else None

    def difference(self, cell: Cell, metric: str, row: str = CHOSEN) -> Mean | None:
        """The mean of the differences to the baseline at equal seeds."""
        base = self.baseline(cell)
        return None if base is None else paired(self.scores(cell, metric, row), self.scores(base, metric, row))

    def claim(self, cell: Cell, metric: str) -> float | None:
        """The paper's difference to its baseline: as written down, else that of the two papers' figures."""
        row = self.study.rows[cell.row]
        told = row.claim.get(cell.data, {}).get(metric)
        if told is not None or row.baseline is None:
            return told
        ours = row.paper.get(cell.data, {}).get(metric)
        theirs = self.study.rows[row.baseline].paper.get(cell.data, {}).get(metric)
        return None if ours is None or theirs is None else ours - theirs

    def figures(self, cell: Cell) -> dict[str, dict[int, float]]:
        """What the method says of its inside at the chosen epoch: by name and seed."""
        found: dict[str, dict[int, float]] = {}
        for seed, run in self.runs.get(cell, {}).items():
            for name, value in run.validation.get("figures", {}).items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    found.setdefault(name, {})[seed] = float(value)
        return found
