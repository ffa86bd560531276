"""Which model a run keeps: the simplest one within one standard error of the best, on the held-out classes.

With few held-out classes the best of ten epochs is often luck (Breiman et al. 1984, section 3.4.3, the 1-SE rule).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from proxymetric.metrics.names import parse
from proxymetric.papers import CLOSED_FORMS
from proxymetric.runs import recipe as recipes
from proxymetric.runs.comparison import score_queries
from proxymetric.runs.recipe import Recipe
from proxymetric.runs.score import EmbeddedSet
from proxymetric.system.watcher import Silent, Watcher

TRAINED = "trained"
"""the candidate of the chosen epoch"""
LEVELS = (("untrained",), ("whitening", "lda"), (TRAINED,))
"""the candidates, the simplest first; the two closed forms are equally simple"""
ORDER = tuple(name for level in LEVELS for name in level)
METRIC = "MAP@R"
"""decides where `train.monitor` is no mean over queries"""
MIN_CLASSES = 3
"""fewest held-out classes whose scores say how much they differ"""
SAME_FOR_CLOSED_FORMS = {
    "data": {"cache": None, "decode": None},
    "view": {"transform": None, "stored": None},
    "encoder": {"tuning": None, "checkpointing": None, "head": None, "layer_norm": None, "normalise_features": None},
}
"""table of a recipe -> its keys that a closed form does not take over"""
TRAIN_KEYS = ("metrics", "monitor", "device", "deterministic")
"""keys of `[train]` that a closed form takes over"""


class HeldOutScores(NamedTuple):
    """A metric of some candidates on the held-out classes.

    Attributes:
        metric: its name, a mean over queries.
        queries: the number of queries of each class.
        sums: candidate -> the sum of the metric over the queries of each class.
    """

    metric: str
    queries: list[int]
    sums: dict[str, list[float]]

    def with_candidate(self, name: str, embedded: EmbeddedSet) -> HeldOutScores:
        """Add a candidate by its embeddings of the same images."""
        return self._replace(sums=self.sums | {name: _sums(embedded, self.metric)[1]})


class Kept(NamedTuple):
    """The model that a run keeps.

    Attributes:
        name: a candidate of `ORDER`.
        metric: what decided.
        classes: held-out classes with queries.
        scores: candidate -> its score.
        behind: candidate -> how far it is behind the best one.
        errors: candidate -> the standard error of that difference, over classes.
    """

    name: str
    metric: str
    classes: int
    scores: dict[str, float]
    behind: dict[str, float]
    errors: dict[str, float]

    @property
    def best(self) -> str:
        """The candidate with the highest score."""
        return max(self.scores, key=self.scores.__getitem__)

    def __str__(self) -> str:
        values = ", ".join(f"{name} {100 * self.scores[name]:.1f}" for name in ORDER if name in self.scores)
        table = f"{self.metric} on {self.classes} held-out classes: {values}"
        if self.name == self.best:
            return f"{table}; {self.name} is kept"
        behind, error = 100 * self.behind[self.name], 100 * self.errors[self.name]
        return (
            f"{table}; {self.name} is kept: {self.best} is higher by {behind:.1f}, not more than one standard error "
            f"({error:.1f})"
        )


def deciding_metric(monitor: str) -> str:
    """The metric that compares the candidates: the one that chooses the epoch, if it is a mean over queries.

    Example:
        >>> deciding_metric("R@1"), deciding_metric("NMI")
        ('R@1', 'MAP@R')
    """
    return METRIC if parse(monitor).whole or parse(monitor).of_pairs else monitor


def held_out_scores(metric: str, candidates: Mapping[str, EmbeddedSet]) -> HeldOutScores:
    """The scores of candidates that embed the same held-out images.

    Args:
        metric: a mean over queries.
        candidates: name -> the images as this candidate embeds them.
    """
    sums = {name: _sums(embedded, metric) for name, embedded in candidates.items()}
    queries = next((counts for counts, _ in sums.values()), [])
    return HeldOutScores(metric, queries, {name: values for name, (_, values) in sums.items()})


def standard_error(sums: np.ndarray, counts: np.ndarray) -> float:
    """The standard error of a mean over queries when classes are drawn: images of one class depend on each other.

    ``d = sum_c d_c / N,  SE(d)^2 = C / (C - 1) * sum_c (d_c - n_c d)^2 / N^2``

    Args:
        sums: (C,) d_c, the sum over the queries of each class.
        counts: (C,) n_c, the number of its queries; their sum is N.

    Example:
        >>> standard_error(np.array([0.0, 2.0]), np.array([2, 2])), standard_error(np.ones(2), np.array([2, 2]))
        (0.5, 0.0)
    """
    total, classes = counts.sum(), len(counts)
    squares = ((sums - counts * sums.sum() / total) ** 2).sum() * classes / max(1, classes - 1)
    return math.sqrt(squares) / float(total)


def simplest(scores: HeldOutScores) -> Kept | None:
    """The simplest candidate within one standard error of the best; None with fewer than `MIN_CLASSES` classes.

    Of equally simple candidates it is the better one.

    Example:
        >>> easy = HeldOutScores("R@1", [10] * 4, {"untrained": [9.0, 9, 8, 8], "trained": [9.0, 10, 8, 8]})
        >>> print(simplest(easy))
        R@1 on 4 held-out classes: untrained 85.0, trained 87.5; untrained is kept: trained is higher by 2.5, not more
        than one standard error (2.5)
        >>> simplest(easy._replace(sums={"untrained": [5.0, 6, 5, 5], "trained": [9.0, 10, 8, 8]})).name
        'trained'
    """
    counts = np.array(scores.queries, dtype=np.float64)
    is_scored = counts > 0
    if is_scored.sum() < MIN_CLASSES or len(scores.sums) < 2:
        return None
    counts, total = counts[is_scored], counts.sum()
    sums = {name: np.array(values)[is_scored] for name, values in scores.sums.items()}
    means = {name: float(values.sum() / total) for name, values in sums.items()}
    best = max(means, key=means.__getitem__)
    behind, errors = {}, {}
    for name, values in sums.items():
        differences = sums[best] - values
        behind[name], errors[name] = float(differences.sum() / total), standard_error(differences, counts)
    level = next(level for level in LEVELS if any(behind[name] <= errors[name] for name in level if name in sums))
    name = max((name for name in level if name in sums), key=means.__getitem__)
    return Kept(name, scores.metric, len(counts), means, behind, errors)


def closed_form_recipe(recipe: Recipe, name: str) -> Recipe:
    """The recipe of a closed form on the data and the backbone of a recipe."""
    given = recipe.changed
    tables = {
        table: {key: value for key, value in given.get(table, {}).items() if key not in without}
        for table, without in SAME_FOR_CLOSED_FORMS.items()
    }
    if name == "untrained":
        tables["encoder"].pop("dim", None)  # the features are kept as they are
    train = {key: value for key, value in given.get("train", {}).items() if key in TRAIN_KEYS}
    raw = {"method": name, "protocol": recipe.protocol, "seed": recipe.seed, **tables, "train": train}
    return recipes.check(recipes.merged(raw, {"encoder": {"pooling": recipe.encoder["pooling"]}}))


def may_keep_another(recipe: Recipe) -> bool:
    """Whether the rule applies to a run: it has held-out classes, and its user did not name a closed form."""
    keeps_simplest = recipe.train.keep == "simplest" and recipe.method not in CLOSED_FORMS
    return keeps_simplest and recipe.protocol == "held-out"


class OnlyProgress(Silent):
    """Shows the progress of work and no messages: those of the run around it have said what matters."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher

    def work(self, what: str, done: int, total: int) -> None:
        """Show the progress of work."""
        self.watcher.work(what, done, total)


def _sums(embedded: EmbeddedSet, metric: str) -> tuple[list[int], list[float]]:
    """The number of queries of each class, and the sum of a metric over them."""
    values, labels = score_queries(embedded, [metric])
    numbers, classes = labels.cpu().numpy(), len(embedded.images.classes)
    sums = np.bincount(numbers, values[metric].double().cpu().numpy(), minlength=classes)
    return np.bincount(numbers, minlength=classes).tolist(), sums.tolist()


def as_candidates(stored: Any) -> HeldOutScores | None:
    """The scores that a checkpoint holds."""
    return None if stored is None else HeldOutScores(**stored)
