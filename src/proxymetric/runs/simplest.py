"""Which model a run keeps: the best one that needs no training, unless the trained one is clearly better.

With few held-out classes the best of ten epochs is often luck, so the rule asks for more than a higher score
(`runs.clear_gain`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from proxymetric.metrics.names import parse
from proxymetric.papers import CLOSED_FORMS
from proxymetric.papers.closed_form import UNTRAINED
from proxymetric.runs import recipe as recipes
from proxymetric.runs.clear_gain import ClassScores, Kept, keep_simple
from proxymetric.runs.comparison import score_queries
from proxymetric.runs.recipe import Recipe
from proxymetric.runs.score import EmbeddedSet
from proxymetric.system.watcher import Silent, Watcher

TRAINED = "trained"
"""the candidate of the chosen epoch"""
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


def deciding_metric(monitor: str) -> str:
    """The metric that compares the candidates: the one that chooses the epoch, if it is a mean over queries.

    Example:
        >>> deciding_metric("R@1"), deciding_metric("NMI")
        ('R@1', 'MAP@R')
    """
    return METRIC if parse(monitor).whole or parse(monitor).of_pairs else monitor


def held_out_scores(metric: str, candidates: Mapping[str, EmbeddedSet]) -> ClassScores:
    """The scores of candidates that embed the same held-out images.

    Args:
        metric: a mean over queries.
        candidates: name -> the images as this candidate embeds them.
    """
    sums = {name: _sums(embedded, metric) for name, embedded in candidates.items()}
    queries = next((counts for counts, _ in sums.values()), [])
    return ClassScores(metric, queries, {name: values for name, (_, values) in sums.items()})


def simplest(scores: ClassScores, trained: EmbeddedSet) -> Kept | None:
    """The model that a run keeps, by `keep_simple`; None with fewer than `MIN_CLASSES` held-out classes.

    Args:
        scores: of the candidates that need no training, on the held-out classes.
        trained: the same images as the trained model embeds them.
    """
    if sum(count > 0 for count in scores.queries) < MIN_CLASSES:
        return None
    with_trained = scores._replace(sums=scores.sums | {TRAINED: _sums(trained, scores.metric)[1]})
    return keep_simple(with_trained, CLOSED_FORMS)


def closed_form_recipe(recipe: Recipe, name: str) -> Recipe:
    """The recipe of a closed form on the data and the backbone of a recipe."""
    given = recipe.changed
    tables = {
        table: {key: value for key, value in given.get(table, {}).items() if key not in without}
        for table, without in SAME_FOR_CLOSED_FORMS.items()
    }
    if name == UNTRAINED:
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


def as_candidates(stored: Any) -> ClassScores | None:
    """The scores that a checkpoint holds."""
    return None if stored is None else ClassScores(**stored)
