"""Compare the trained encoder with the untrained one, or two runs: scores, intervals, the difference in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from proxymetric.metrics import breakdown, interval
from proxymetric.metrics.names import lower_is_better, parse
from proxymetric.metrics.verification_intervals import Resamples, ends, resample
from proxymetric.papers import CLOSED_FORMS
from proxymetric.papers.closed_form import UNTRAINED as UNTRAINED_METHOD
from proxymetric.runs.result import PIXELS, TRAINED, UNTRAINED, Result
from proxymetric.runs.score import EmbeddedSet, rates_below_one_pair, score, search_task
from proxymetric.training.options import TrainOptions

MIN_CLASSES = 5
"""fewest classes for which intervals are computed: with fewer classes, an interval would be too narrow"""
UNTRAINED_MEANS = (
    "The untrained encoder is the backbone before training, without the new head: its features are compared directly."
)
FIRST_METRICS = ("MAP@R", "R@1")
"""metrics that are compared in words, where they were computed"""


class Difference(NamedTuple):
    """Trained minus untrained, or a run minus another, as a fraction, with its interval if there are enough classes.

    Example:
        >>> print(Difference(0.064, 0.041, 0.087))
        +6.4 (4.1 to 8.7)
    """

    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        span = "" if self.low is None or self.high is None else f" ({100 * self.low:.1f} to {100 * self.high:.1f})"
        return f"{100 * self.value:+.1f}{span}"


@dataclass(frozen=True)
class Comparison:
    """The scores of one set by one or two encoders.

    Attributes:
        metrics: names, in the order in which they were asked for.
        rows: by encoder, the metrics as fractions.
        intervals: by encoder and metric, the ends of the 95 % interval over classes; none for a metric that is neither
            a mean over queries nor an error rate of pairs, or with fewer than `MIN_CLASSES` classes.
        differences: by metric, trained minus untrained, paired by query or by class; empty with one encoder.
        classes: the number of classes.
        titles: what the two rows are called, the one that is subtracted first.
    """

    metrics: tuple[str, ...]
    rows: dict[str, dict[str, float]]
    intervals: dict[str, dict[str, tuple[float, float]]] = field(default_factory=dict)
    differences: dict[str, Difference] = field(default_factory=dict)
    classes: int = 0
    titles: tuple[str, str] = (UNTRAINED, TRAINED)

    @property
    def has_intervals(self) -> bool:
        """Whether there were enough classes for intervals."""
        return any(self.intervals.values())

    def verdict(self) -> list[str]:
        """Sentences that say whether training helped, or which run is better; empty with one encoder."""
        names = [name for name in FIRST_METRICS if name in self.differences]
        names = names or [name for name in self.differences if not parse(name).whole or parse(name).of_pairs][:1]
        sentences = [verdict(name, self.differences[name], self.titles) for name in names]
        if sentences and not self.has_intervals:
            sentences.append(f"no intervals: {self.classes} classes are too few, expected at least {MIN_CLASSES}")
        return sentences

    @property
    def helped(self) -> bool:
        """False if the first metric did not rise, or if its interval holds 0."""
        first = next((self.differences[name] for name in FIRST_METRICS if name in self.differences), None)
        return first is None or (first.value > 0 and (first.low is None or first.low > 0))


def verdict(metric: str, difference: Difference, titles: tuple[str, str] = (UNTRAINED, TRAINED)) -> str:
    """Say whether training helped, or which of two runs is better.

    Example:
        >>> verdict("R@1", Difference(0.064, 0.041, 0.087))
        'training gained +6.4 R@1 (4.1 to 8.7)'
        >>> verdict("R@1", Difference(0.004, -0.012, 0.02))
        'the trained encoder is not clearly better than the untrained one: +0.4 R@1 (-1.2 to 2.0)'
        >>> verdict("R@1", Difference(-0.03, -0.05, -0.01))
        'the trained encoder is worse than the untrained one: -3.0 R@1 (-5.0 to -1.0)'
        >>> verdict("EER", Difference(-0.03, -0.05, -0.01))
        'training lowered the error: -3.0 EER (-5.0 to -1.0)'
        >>> verdict("R@1", Difference(0.004, -0.012, 0.02), ("runs/a", "runs/b"))
        'runs/b is not clearly better than runs/a: +0.4 R@1 (-1.2 to 2.0)'
    """
    value, low, high = difference
    span = "" if low is None or high is None else f" ({100 * low:.1f} to {100 * high:.1f})"
    amount = f"{100 * value:+.1f} {metric}{span}"
    trained = titles == (UNTRAINED, TRAINED)
    first, second = ("the untrained one", "the trained encoder") if trained else titles
    gained = "training gained" if trained else f"{second} is better than {first}:"
    if lower_is_better(metric):
        gained, value = "training lowered the error:" if trained else gained, -value
        low, high = (None, None) if low is None or high is None else (-high, -low)
    if value > 0 and (low is None or low > 0):
        return f"{gained} {amount}"
    if value < 0 and (high is None or high < 0):
        return f"{second} is worse than {first}: {amount}"
    clearly = "clearly " if value > 0 else ""
    return f"{second} is not {clearly}better than {first}: {amount}"


def compare(
    trained: EmbeddedSet,
    untrained: EmbeddedSet | None,
    metrics: Sequence[str],
    distance: str = "cosine",
    titles: tuple[str, str] = (UNTRAINED, TRAINED),
) -> Comparison:
    """Score a set as embedded by one or two encoders.

    Args:
        trained: the set, embedded by the trained encoder.
        untrained: the same set, embedded by the untrained one, or by another run; None leaves it out.
        metrics: names, as for `metrics.evaluate`.
        distance: "cosine" or "euclidean".
        titles: what `untrained` and `trained` are called.

    Returns:
        Scores, intervals and differences, without the metrics that the set has too few pairs for.

    Raises:
        ValueError: a metric is unknown, no query has anything to find, or the two sets hold different images.
    """
    if untrained is not None and not np.array_equal(trained.kept, untrained.kept):
        raise ValueError(
            "images: got files that changed while they were embedded, expected the same images for both encoders"
        )
    first, second = titles
    absent = rates_below_one_pair(trained, metrics)
    metrics = [name for name in metrics if name not in absent]
    means = [name for name in metrics if not parse(name).whole]
    set_metrics = [name for name in metrics if parse(name).whole]
    of_pairs = [parse(name) for name in metrics if parse(name).of_pairs]
    resamples: dict[str, Resamples] = {}
    classes = len(np.unique(trained.images.labels[trained.kept]))
    rows: dict[str, dict[str, float]] = {}
    queries: dict[str, dict[str, Tensor]] = {}
    intervals: dict[str, dict[str, tuple[float, float]]] = {}
    groups: Any = None
    for name, embedded in ((first, untrained), (second, trained)):
        if embedded is None:
            continue
        queries[name], groups = score_queries(embedded, means, distance)
        scores = {metric: float(values.mean()) for metric, values in queries[name].items()}
        scores |= score(embedded, set_metrics, distance) if set_metrics else {}
        rows[name] = {metric: scores[metric] for metric in metrics}
        intervals[name] = {
            metric: interval(values, groups) for metric, values in queries[name].items() if classes >= MIN_CLASSES
        }
        if of_pairs and classes >= MIN_CLASSES:
            rates = [metric.fmr for metric in of_pairs if metric.fmr is not None]
            resamples[name] = resample(search_task(embedded), rates)
            intervals[name] |= {metric.name: ends(resamples[name].of(metric)) for metric in of_pairs}
    differences = {}
    if untrained is not None:
        for metric in metrics:
            value = rows[second][metric] - rows[first][metric]
            span: tuple[float, ...] = ()
            if metric in means and classes >= MIN_CLASSES:
                span = interval(queries[second][metric] - queries[first][metric], groups)
            elif parse(metric).of_pairs and resamples:
                span = ends(resamples[second].of(parse(metric)) - resamples[first].of(parse(metric)))
            differences[metric] = Difference(value, *span)
    return Comparison(tuple(metrics), rows, intervals, differences, classes, titles)


def score_queries(
    embedded: EmbeddedSet, metrics: Sequence[str], distance: str = "cosine"
) -> tuple[dict[str, Tensor], Tensor]:
    """Compute the metrics of each query of an embedded set.

    Args:
        embedded: the set.
        metrics: names of metrics that are means over queries.
        distance: "cosine" or "euclidean".

    Returns:
        Metric -> (Q,) values, and the labels (Q,) of the queries.
    """
    sides = embedded.sides()
    if not metrics:
        return {}, sides["labels"][:0]
    parts = breakdown(**sides, metrics=metrics, worst=0, pairs=0, distance=distance)
    return parts.scores, sides["labels"][parts.queries]


def advice(recipe: dict[str, Any], classes: int | None = None) -> str:
    """What to try when training did not help.

    Args:
        recipe: the recipe of the run, by table.
        classes: number of training classes; None if unknown.

    Example:
        >>> advice({"train": {"lr": None, "frozen": False}}, 8)
        'try another learning rate (--lr 1e-05 or 0.001), --frozen, and more training classes (there were 8)'
    """
    train = recipe["train"]
    steps = []
    rate = TrainOptions(lr=train.get("lr"), frozen=bool(train.get("frozen"))).base_rates[0]
    steps.append(f"another learning rate (--lr {rate / 10:g} or {rate * 10:g})")
    steps.append("training the backbone too (without --frozen)" if train.get("frozen") else "--frozen")
    steps.append("more training classes" + (f" (there were {classes})" if classes else ""))
    return f"try {', '.join(steps[:-1])}, and {steps[-1]}"


def remarks(result: Result) -> list[str]:
    """Sentences that explain a result: epoch 0 was chosen, training did not help, or some metrics fell.

    If the run keeps a simpler model, that is all there is to say.

    Example:
        >>> rows = {"untrained encoder": {"MAP@R": 0.384}, "trained encoder": {"MAP@R": 0.268}}
        >>> recipe = {"train": {"lr": 1e-4, "frozen": False}}
        >>> for line in remarks(Result(rows=rows, recipe=recipe, chosen_epoch=3)):
        ...     print(line)
        the trained encoder is worse than the untrained one: -11.6 MAP@R
        try another learning rate (--lr 1e-05 or 0.001), --frozen, and more training classes
    """
    sentences = []
    if result.kept is not None and result.kept["name"] != "trained":
        return _simpler_kept(result)
    is_computed = result.recipe.get("method") in CLOSED_FORMS
    epoch_chose = result.chosen_by != "last" and result.refit is None and not is_computed
    if epoch_chose and not result.chosen_epoch and result.rows:
        head = "with a new, random head"
        if result.closed_form is not None:
            head = f"with the head of {result.closed_form['name']} that the training started from"
        sentences.append(
            "epoch 0 was chosen: no epoch scored higher than the model before training. The trained encoder is "
            f"therefore the untrained backbone {head}"
        )
    untrained, trained = result.rows.get(UNTRAINED, {}), result.rows.get(TRAINED, {})
    shared = [name for name in trained if name in untrained and not parse(name).whole]
    first = next((name for name in FIRST_METRICS if name in shared), next(iter(shared), None))
    if first is None:
        return sentences
    change = {name: trained[name] - untrained[name] for name in shared}
    pixels = result.rows.get(PIXELS, {})
    if pixels.get(first, 0.0) > trained[first]:
        sentences.append(f"raw pixels score higher than the trained encoder: {100 * pixels[first]:.1f} {first}")
    if change[first] <= 0 and result.recipe.get("method") != UNTRAINED_METHOD:
        sentences.append(verdict(first, Difference(change[first])))
    higher = [name for name in CLOSED_FORMS if result.rows.get(name, {}).get(first, 0.0) > trained[first]]
    if higher:
        best = max(higher, key=lambda name: result.rows[name][first])
        value = f"{100 * result.rows[best][first]:.1f} {first}"
        start = "" if is_computed else f", or --start {best} for a head that begins with it"
        sentences.append(
            f"{best}, which takes seconds, scores higher than the trained encoder: {value}; try --method {best}{start}"
        )
    drops = [f"{name} {100 * untrained[name]:.1f} to {100 * trained[name]:.1f}" for name in shared if change[name] < 0]
    if change[first] > 0 and drops and result.chosen_epoch:
        sentences.append(f"training raised {first}, but these metrics fell: {', '.join(drops)}")
    if change[first] <= 0 and not is_computed:
        sentences.append(advice(result.recipe, result.data.get("train", {}).get("classes")))
    return sentences


def _simpler_kept(result: Result) -> list[str]:
    """Sentences about a run that keeps a simpler model than the trained one."""
    assert result.kept is not None
    name = result.kept_row
    metric = next((each for each in FIRST_METRICS if each in result.scores), None)
    trained = result.rows.get(TRAINED, {})
    sentences = [
        f"the {name if name == UNTRAINED else f'head of {name}'} is this run's best model: on the held-out classes "
        "training did not gain more than chance may; the trained one stays in the folder (--which chosen)"
    ]
    if metric is not None and metric in trained:
        sentences.append(verdict(metric, Difference(trained[metric] - result.scores[metric]), (name, TRAINED)))
    return [*sentences, advice(result.recipe, result.data.get("train", {}).get("classes"))]
