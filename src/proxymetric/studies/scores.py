"""The scores of a study by cell and seed, for its tables and plots."""

from __future__ import annotations

import statistics
import string

from proxymetric.runs.result import LAST_EPOCH, TRAINED, Result
from proxymetric.studies.inference import Mean, paired
from proxymetric.studies.spec import LABELS, Cell, Study

CHOSEN, LAST = TRAINED, LAST_EPOCH
"""rows of a result: the model of the chosen epoch, and the model of the last one"""
HELD_OUT = "held-out classes"
"""scores of the model of the chosen epoch on the training classes that chose it"""


class Results:
    """The results of a study, by row of the tables and seed.

    Args:
        study: the study.
        results: name of the run -> result.
    """

    def __init__(self, study: Study, results: dict[str, Result]) -> None:
        self.study = study
        self.runs: dict[Cell, dict[int, Result]] = {}
        for task in study.tasks():
            if task.name in results:
                self.runs.setdefault(task.cell, {})[task.seed] = results[task.name]

    def groups(self) -> list[tuple[str, list[Cell]]]:
        """The rows of each table, with its heading; a table has one data set, backbone and protocol."""
        groups: dict[tuple[str, str, str], list[Cell]] = {}
        for cell in self.study.cells():
            if cell in self.runs:
                groups.setdefault((cell.data, cell.backbone, cell.protocol), []).append(cell)
        return [(self.heading(*key), cells) for key, cells in groups.items()]

    def heading(self, data: str, backbone: str, protocol: str) -> str:
        """The heading of a table."""
        titles = (self.study.data[data].title, self.study.backbones[backbone].title)
        return f"{', '.join(filter(None, titles))}: {LABELS[protocol]}"

    def scores(self, cell: Cell, metric: str, row: str = CHOSEN) -> dict[int, float]:
        """The score of each seed, in per cent; `row` is `CHOSEN`, `LAST` or `HELD_OUT`."""
        scores_by_seed = {
            seed: run.validation if row == HELD_OUT else run.rows.get(row, {})
            for seed, run in self.runs.get(cell, {}).items()
        }
        return {seed: 100 * scores[metric] for seed, scores in scores_by_seed.items() if metric in scores}

    def baseline(self, cell: Cell) -> Cell | None:
        """The baseline of a cell; None if it has none, or if the baseline has no results."""
        name = self.study.rows[cell.row].baseline
        other = None if name is None else Cell(name, cell.data, cell.backbone, cell.protocol)
        return other if other in self.runs else None

    def difference(self, cell: Cell, metric: str, row: str = CHOSEN) -> Mean | None:
        """The mean of the differences to the baseline at equal seeds."""
        base = self.baseline(cell)
        return None if base is None else paired(self.scores(cell, metric, row), self.scores(base, metric, row))

    def claim(self, cell: Cell, metric: str) -> float | None:
        """The difference to the baseline that the paper claims: from `claim` of the row, or else from `paper`."""
        row = self.study.rows[cell.row]
        claim = row.claim.get(cell.data, {}).get(metric)
        if claim is not None or row.baseline is None:
            return claim
        ours = row.paper.get(cell.data, {}).get(metric)
        theirs = self.study.rows[row.baseline].paper.get(cell.data, {}).get(metric)
        return None if ours is None or theirs is None else ours - theirs

    def sizes(self, cell: Cell, metric: str) -> dict[tuple[int, str, int], dict[int, float]]:
        """The scores of smaller vectors, of nested runs: (dimensions, kind of numbers, bytes) -> seed -> per cent."""
        scores: dict[tuple[int, str, int], dict[int, float]] = {}
        for seed, run in self.runs.get(cell, {}).items():
            for each in run.sizes or []:
                if metric in each["scores"]:
                    key = each["dim"], each["vectors"], each["bytes"]
                    scores.setdefault(key, {})[seed] = 100 * each["scores"][metric]
        return scores

    def figures(self, cell: Cell) -> dict[str, dict[int, float]]:
        """The figures that the method reports about itself at the chosen epoch: name -> seed -> value."""
        figures: dict[str, dict[int, float]] = {}
        for seed, run in self.runs.get(cell, {}).items():
            for name, value in run.validation.get("figures", {}).items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    figures.setdefault(name, {})[seed] = float(value)
        return figures

    def why(self, cell: Cell) -> str:
        """The text `why` of a row with the means over the seeds; empty: there is no text, or the runs have no figures.

        Raises:
            ValueError: the text names a figure that the runs do not have.
        """
        text = " ".join(self.study.rows[cell.row].why.split())
        figures = self.figures(cell)
        means = {name: statistics.mean(values.values()) for name, values in figures.items()}
        if not text or cell not in self.runs:
            return ""
        for name, of in (("chosen epoch", cell), ("chosen epoch of the baseline", self.baseline(cell))):
            if of is not None:
                means[name] = statistics.mean(run.chosen_epoch for run in self.runs[of].values())
        if not figures and any(name not in means for _, name, _, _ in string.Formatter().parse(text) if name):
            return ""
        try:
            return text.format_map(means)
        except (KeyError, IndexError, ValueError) as error:
            known = ", ".join(means)
            raise ValueError(f"rows.{cell.row}.why: got {text!r} ({error}), expected figures among: {known}") from None
