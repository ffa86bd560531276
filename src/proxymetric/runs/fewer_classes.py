"""How many classes make a score easy: a score among fewer classes of the gallery, and what it says in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from proxymetric.metrics import fewer_classes
from proxymetric.runs.result import Result
from proxymetric.runs.score import EmbeddedSet

PLACES = 5
"""decimal places of the fractions in a result"""
MOST_NAMED = 4
"""numbers of classes that a sentence names"""


def among_fewer(embedded: EmbeddedSet, scores: Mapping[str, float], distance: str = "cosine") -> list[dict[str, Any]]:
    """Score a set among 2, 4, 8, ... and all classes of its gallery.

    Args:
        embedded: the set.
        scores: its metrics. Among all classes, these count: of large sets, `metrics.fewer_classes` ranks some queries.
        distance: "cosine" or "euclidean".

    Returns:
        Records of `classes` and, for R@1 and MAP@R, mean and range of sets of so many classes; see
        `metrics.fewer_classes`. Empty if there are too few classes or images for two numbers of classes.

    Example:
        >>> import numpy as np, torch
        >>> from proxymetric.data import ImageSet
        >>> labels = np.arange(20) % 4
        >>> dots = ImageSet("dots", labels, list("abcd"), arrays=np.zeros((20, 8, 8), np.uint8))
        >>> among_fewer(EmbeddedSet(dots, torch.eye(4)[labels], np.arange(20)), {})[0]
        {'classes': 2, 'R@1': [1.0, 1.0, 1.0], 'MAP@R': [1.0, 1.0, 1.0]}
    """
    records: list[dict[str, Any]] = []
    for classes, values in fewer_classes(**embedded.sides(), distance=distance):
        rounded = {name: [round(value, PLACES) for value in estimate] for name, estimate in values.items()}
        records.append({"classes": classes} | rounded)
    if len(records) < 2:
        return []
    records[-1] |= {name: 3 * [round(scores[name], PLACES)] for name in records[-1] if name in scores}
    return records


def score_sentences(
    scores: Mapping[str, float], records: Sequence[Mapping[str, Any]], classes: str, chosen: bool = False
) -> list[str]:
    """Say what R@1 means, and how it falls with the number of classes.

    Args:
        scores: the metrics of the set.
        records: see `among_fewer`.
        classes: which classes are scored, with their numbers.
        chosen: these classes chose the epoch, so that new ones score lower.

    Example:
        >>> records = [{"classes": n, "R@1": [r, r, r]} for n, r in ((2, 0.992), (4, 0.967), (8, 0.875))]
        >>> for sentence in score_sentences({"R@1": 0.875}, records, "8 held-out classes (120 images)", chosen=True):
        ...     print(sentence)
        R@1 87.5 %: of 100 images of the 8 held-out classes (120 images), 88 find an image of their own class first
        new classes, and more of them, score lower: R@1 is 99.2 among 2 of these classes, 96.7 among 4, 87.5 among all 8
        >>> print(score_sentences({}, [{"classes": n, "R@1": [1, 1, 1]} for n in (2, 4)], "4 classes")[-1])
        R@1 is 100.0 among 2 of these classes and among all 4: too easy to show how much lower more classes score
    """
    sentences = []
    if "R@1" in scores:
        share = 100 * scores["R@1"]
        hundredths = round(share) if share in (0, 100) else min(max(round(share), 1), 99)
        sentences.append(
            f"R@1 {share:.1f} %: of 100 images of the {classes}, {hundredths} find an image of their own class first"
        )
    if len(records) < 2:
        return sentences
    step = -(-len(records) // MOST_NAMED)
    named = [(each["classes"], f"{100 * each['R@1'][0]:.1f}") for each in reversed(records[::-1][::step])]
    (first, easiest), *others = named
    if easiest == named[-1][1]:
        ends = f"R@1 is {easiest} among {first} of these classes and among all {named[-1][0]}"
        return [*sentences, f"{ends}: too easy to show how much lower more classes score"]
    whose = "new classes, and more of them," if chosen else "more classes"
    steps = [f"{value} among {'all ' if number == named[-1][0] else ''}{number}" for number, value in others]
    start = f"{whose} score lower: R@1 is {easiest} among {first} of these classes"
    return [*sentences, ", ".join([start, *steps])]


def result_sentences(result: Result) -> list[str]:
    """`score_sentences` of the model that a run keeps."""
    records = (result.fewer_classes or {}).get(result.kept_row, [])
    chosen = result.evaluated_on == "validation" or result.protocol == "papers"
    return score_sentences(result.scores, records, result.named_classes, chosen)
