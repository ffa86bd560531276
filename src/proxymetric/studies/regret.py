"""The choices of `--method auto` in a study: how far each one is below the best method that it tried."""

from __future__ import annotations

from typing import NamedTuple

from proxymetric.runs.auto_method import DEFAULT_METHOD, METRIC, Candidate
from proxymetric.studies.scores import Results
from proxymetric.studies.spec import Cell


class MethodChoice(NamedTuple):
    """What one run with `--method auto` chose, beside runs that differ from it in the method alone.

    Attributes:
        seed: the seed of the run.
        method: the method that it chose, and the start of its head.
        is_earlier: an earlier rule chose it: among six losses, on one set of held-out classes.
        score: the MAP@R of the run, in per cent.
        best: of the methods that it tried, the one whose own run has the highest MAP@R at this seed.
        best_score: that MAP@R, in per cent.
        default_score: the MAP@R of Proxy-Anchor at this seed; None if there is no such run.
        trial_share: the time of the trials as a share of the time of the run.
    """

    seed: int
    method: str
    is_earlier: bool
    score: float
    best: str
    best_score: float
    default_score: float | None
    trial_share: float

    @property
    def regret(self) -> float:
        """How far the chosen method is below the best one, in points.

        >>> MethodChoice(0, "vcpa", False, 41.0, "mpa-ap", 42.0, 40.0, 0.1).regret
        1.0
        """
        return self.best_score - self.score

    @property
    def gain(self) -> float | None:
        """How far the chosen method is above Proxy-Anchor, in points.

        >>> MethodChoice(0, "vcpa", False, 41.0, "mpa-ap", 42.0, 40.0, 0.1).gain
        1.0
        """
        return None if self.default_score is None else self.score - self.default_score

    @property
    def label(self) -> str:
        """What was chosen, and whether an earlier rule chose it.

        >>> MethodChoice(0, "vcpa", True, 41.0, "mpa-ap", 42.0, 40.0, 0.1).label
        'vcpa (earlier rule)'
        """
        return f"{self.method} (earlier rule)" if self.is_earlier else self.method


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
        name = str(Candidate(run.auto["method"], run.auto.get("start")))
        choices.append(
            MethodChoice(
                seed, name, "folds" not in run.auto, scores[seed], best, tried_scores[best],
                tried_scores.get(DEFAULT_METHOD), run.auto["seconds"] / run.seconds,
            )
        )  # fmt: skip
    return choices


def _tried_scores(results: Results, cells: list[Cell], auto: Cell, seed: int) -> dict[str, float]:
    """The score of each candidate that a run tried, at its seed, of rows that differ from it in method and start."""
    trials = (results.runs[auto][seed].auto or {}).get("trials", ())
    tried = {str(Candidate(trial["method"], trial.get("start"))) for trial in trials}
    tried_scores = {}
    for cell in cells:
        run, row = results.runs[cell].get(seed), results.study.rows[cell.row]
        is_other = row.recipe != results.study.rows[auto.row].recipe
        is_other = is_other or bool(row.settings.keys() - {"method", "train.start"})
        if run is None or run.auto is not None or is_other or seed not in (scores := results.scores(cell, METRIC)):
            continue
        name = str(Candidate(run.recipe["method"], row.settings.get("train.start")))
        if not tried or name in tried:
            tried_scores[name] = scores[seed]
    return tried_scores
