"""The choices of `--method auto` in a study: how far each one is below the best method that it tried."""

from __future__ import annotations

from typing import NamedTuple

from proxymetric.runs.auto_method import DEFAULT_METHOD, METRIC, Trial, decide
from proxymetric.studies.scores import Results
from proxymetric.studies.spec import Cell


class MethodChoice(NamedTuple):
    """What one run with `--method auto` chose, beside runs that differ from it in the method alone.

    Attributes:
        seed: the seed of the run.
        method: the method that it chose.
        method_now: the method that this version chooses from the same trials.
        score: the MAP@R of the run, in per cent.
        best: of the methods that it tried, the one whose own run has the highest MAP@R at this seed.
        best_score: that MAP@R, in per cent.
        default_score: the MAP@R of Proxy-Anchor at this seed; None if there is no such run.
        trial_share: the time of the trials as a share of the time of the run.
    """

    seed: int
    method: str
    method_now: str
    score: float
    best: str
    best_score: float
    default_score: float | None
    trial_share: float

    @property
    def regret(self) -> float:
        """How far the chosen method is below the best one, in points.

        >>> MethodChoice(0, "vcpa", "vcpa", 41.0, "mpa-ap", 42.0, 40.0, 0.1).regret
        1.0
        """
        return self.best_score - self.score

    @property
    def gain(self) -> float | None:
        """How far the chosen method is above Proxy-Anchor, in points.

        >>> MethodChoice(0, "vcpa", "vcpa", 41.0, "mpa-ap", 42.0, 40.0, 0.1).gain
        1.0
        """
        return None if self.default_score is None else self.score - self.default_score

    @property
    def label(self) -> str:
        """The method that was chosen, and the one that this version chooses if it is another one.

        >>> MethodChoice(0, "vcpa", "proxy-anchor", 41.0, "mpa-ap", 42.0, 40.0, 0.1).label
        'vcpa (now: proxy-anchor)'
        """
        return self.method if self.method_now == self.method else f"{self.method} (now: {self.method_now})"


def method_choices(results: Results, cells: list[Cell], auto: Cell) -> list[MethodChoice]:
    """The choices of the runs of a row; none if the row names its method.

    A seed is left out if no method that was tried has a run of its own at this seed.

    Args:
        results: the results of the study.
        cells: the rows of the table, among them the runs of the methods that were tried.
        auto: the row whose runs chose.
    """
    choices = []
    scores = results.scores(auto, METRIC)
    for seed, run in results.runs[auto].items():
        if run.auto is None or seed not in scores:
            continue
        tried_scores = _tried_scores(results, cells, auto, seed)
        if not tried_scores:
            continue
        best = max(tried_scores, key=tried_scores.__getitem__)
        trials = [Trial(**trial) for trial in run.auto["trials"]]
        method_now = decide(trials, run.recipe["train"]["frozen"])[0]
        choices.append(
            MethodChoice(
                seed, run.auto["method"], method_now, scores[seed], best, tried_scores[best],
                tried_scores.get(DEFAULT_METHOD), run.auto["seconds"] / run.seconds,
            )
        )  # fmt: skip
    return choices


def _tried_scores(results: Results, cells: list[Cell], auto: Cell, seed: int) -> dict[str, float]:
    """The score of each method that a run tried, at its seed, of rows that differ from it in the method alone."""
    tried = {trial["method"] for trial in (results.runs[auto][seed].auto or {}).get("trials", ())}
    tried_scores = {}
    for cell in cells:
        run, row = results.runs[cell].get(seed), results.study.rows[cell.row]
        is_other = row.recipe != results.study.rows[auto.row].recipe or bool(row.settings.keys() - {"method"})
        if run is None or run.auto is not None or is_other or seed not in (scores := results.scores(cell, METRIC)):
            continue
        method = run.recipe["method"]
        if not tried or method in tried:
            tried_scores[method] = scores[seed]
    return tried_scores
