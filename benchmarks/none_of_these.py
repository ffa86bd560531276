"""Measures "none of these": false-accept rates asked and got, when half of the classes are in the index.

    python benchmarks/none_of_these.py RUN                a frozen run on CUB with half of the training classes held out

The run must not have been trained on the classes that are measured. In each of several draws, half of the test classes
of the run are in the index, with half of their images; the other images of these classes, and all images of the other
classes, are asked about. Beside `--identify` stand three plain rules: the nearest image with the run's threshold for
pairs, the nearest image with a quantile of the left-out classes, and the confidence of a softmax over the means of the
classes, with such a quantile. The score was chosen in the same way on the held-out classes of the run, never on its
test classes. Features are read from the feature cache, or computed. Results go to results/none-of-these.json.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import common
import numpy as np
import torch

import proxymetric as pm
from proxymetric.features.cache import cached_features
from proxymetric.metrics import interval
from proxymetric.models.features import FeatureModel
from proxymetric.runs.evaluation_set import evaluation_set
from proxymetric.runs.result import Result
from proxymetric.search import Identifier, Index
from proxymetric.search.class_centres import ClassCentres

RATES = (0.1, 0.01, 0.001)
SOFTMAX_SCALE = 32.0
RULES = ("identify", "nearest image, threshold for pairs", "nearest image, quantile", "softmax confidence, quantile")
CENTRES, WEIGHTS = (1, 2, 3, 5), (0.0, 0.3, 0.5, 1.0)


class Draw(NamedTuple):
    """Rows of vectors: what is in the index, and what is asked about."""

    index: np.ndarray
    known: np.ndarray
    unknown: np.ndarray


class Decision(NamedTuple):
    """Of one rule at one rate: accepted images of other classes, and images that are accepted and named rightly."""

    unknown: np.ndarray
    known: np.ndarray


def vectors_of(run: Path, part: str) -> tuple[torch.Tensor, np.ndarray, list[str]]:
    """Embed a part of a run's data; the features of a frozen backbone come from the cache."""
    model = pm.load(run, device="cpu")
    images, _ = evaluation_set(run, part=part)
    features = cached_features(model.encoder, images, model.view)
    return FeatureModel.of(model).vectors(features.vectors), images.labels[features.kept], images.classes


def draw(labels: np.ndarray, seed: int) -> Draw:
    """Put half of the images of half of the classes into the index."""
    generator = np.random.default_rng(seed)
    classes = generator.permutation(np.unique(labels))
    members = [generator.permutation(np.flatnonzero(labels == c)) for c in classes[: len(classes) // 2]]
    index = np.concatenate([rows[: len(rows) // 2] for rows in members])
    known = np.concatenate([rows[len(rows) // 2 :] for rows in members])
    return Draw(np.sort(index), np.sort(known), np.flatnonzero(np.isin(labels, classes[len(classes) // 2 :])))


def decisions(
    vectors: torch.Tensor, labels: np.ndarray, names: list[str], at: Draw, pair_thresholds: dict[float, float]
) -> dict[str, dict[float, Decision]]:
    """Decide by every rule at every rate."""
    found: dict[str, dict[float, Decision]] = {rule: {} for rule in RULES}
    with tempfile.TemporaryDirectory() as folder:
        index = Index.create(Path(folder) / "a.index", vectors.shape[1], map="none")
        ids = [f"{row:06}" for row in at.index]
        index.add(ids, vectors[at.index], labels=[names[labels[row]] for row in at.index])
        identifier = Identifier(index)
        for rate in RATES:
            answers = [[answer.label for answer in identifier(vectors[rows], rate)] for rows in (at.unknown, at.known)]
            right = [label == names[labels[row]] for label, row in zip(answers[1], at.known, strict=True)]
            found["identify"][rate] = Decision(np.array([x is not None for x in answers[0]]), np.array(right))
    present, codes = np.unique(labels[at.index], return_inverse=True)
    unit = torch.nn.functional.normalize(vectors.float(), dim=1)
    items, own = unit[at.index], torch.from_numpy(codes)
    means = torch.nn.functional.normalize(torch.zeros(len(present), unit.shape[1]).index_add_(0, own, items), dim=1)

    def nearest(rows: np.ndarray, is_left_out: bool) -> tuple[np.ndarray, np.ndarray]:
        similarities = unit[rows] @ items.T
        if is_left_out:
            similarities[own[:, None] == own] = -2
        best = similarities.max(dim=1)
        return best.values.numpy(), codes[best.indices.numpy()]

    def confidence(rows: np.ndarray, is_left_out: bool) -> tuple[np.ndarray, np.ndarray]:
        logits = SOFTMAX_SCALE * (unit[rows] @ means.T)
        if is_left_out:
            logits[torch.arange(len(rows)), own] = -torch.inf
        best = logits.softmax(dim=1).max(dim=1)
        return best.values.numpy(), best.indices.numpy()

    def by(rule: str, score: Callable[..., tuple[np.ndarray, np.ndarray]], thresholds: dict[float, float]) -> None:
        (values, answers), unknown = score(at.known, False), score(at.unknown, False)[0]
        is_right = present[answers] == labels[at.known]
        for rate, threshold in thresholds.items():
            found[rule][rate] = Decision(unknown > threshold, is_right & (values > threshold))

    by(RULES[1], nearest, pair_thresholds)
    for rule, score in ((RULES[2], nearest), (RULES[3], confidence)):
        left_out = score(at.index, True)[0]
        by(rule, score, {rate: float(np.quantile(left_out, 1 - rate, method="higher")) for rate in RATES})
    return found


def share(parts: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, Any]:
    """The mean of decisions over all draws, its interval over classes, and the mean of each draw."""
    values, groups = (np.concatenate(column) for column in zip(*parts, strict=True))
    low, high = interval(values.astype(float), groups)
    return {
        "value": round(float(values.mean()), 5),
        "interval": [round(low, 5), round(high, 5)],
        "draws": [round(float(part.mean()), 5) for part, _ in parts],
    }


def measured(run: Path, draws: int) -> dict[str, Any]:
    """All rules at all rates on the test classes of a run."""
    result = Result.read(run / "result.json")
    if result.thresholds is None:
        raise SystemExit(f"{run}: got a run without thresholds, expected one with at least 5 held-out classes")
    pair_thresholds = {point["asked"]: point["threshold"][0] for point in result.thresholds["points"]}
    vectors, labels, names = vectors_of(run, "test")
    draws_of = [draw(labels, seed) for seed in range(draws)]
    found = [decisions(vectors, labels, names, at, pair_thresholds) for at in draws_of]
    rules: dict[str, Any] = {}
    for rule in RULES:
        rules[rule] = {}
        for rate in RATES:
            pairs = [(each[rule][rate], at) for each, at in zip(found, draws_of, strict=True)]
            rules[rule][f"{rate:g}"] = {
                "false accepts": share([(decision.unknown, labels[at.unknown]) for decision, at in pairs]),
                "true accepts": share([(decision.known, labels[at.known]) for decision, at in pairs]),
            }
    return {
        "classes": len(names),
        "images": len(labels),
        "in the index": [len(np.unique(labels[draws_of[0].index])), len(draws_of[0].index)],
        "scores": {name: round(value, 4) for name, value in result.scores.items()},
        "rules": rules,
    }


def choice(run: Path, draws: int) -> dict[str, Any]:
    """True accepts at exact rates on the held-out classes, by centres a class and weight of the runner-up."""
    vectors, labels, _ = vectors_of(run, "validation")
    table: dict[str, list[list[float]]] = {}
    for seed in range(1000, 1000 + draws):
        at = draw(labels, seed)
        present = np.unique(labels[at.index])
        for number in CENTRES:
            texts = [f"{label:05}" for label in labels[at.index]]
            centres = ClassCentres.of(vectors[at.index], texts, number)
            known, unknown = (centres.scores(vectors[rows]).topk(2, dim=1) for rows in (at.known, at.unknown))
            is_right = present[known.indices[:, 0].numpy()] == labels[at.known]
            for weight in WEIGHTS:
                scores, others = (part.values[:, 0] - weight * part.values[:, 1] for part in (known, unknown))
                limits = [float(np.quantile(others.numpy(), 1 - rate, method="higher")) for rate in RATES]
                accepted = [float((is_right & (scores.numpy() > limit)).mean()) for limit in limits]
                table.setdefault(f"{number} centres, weight {weight:g}", []).append(accepted)
    return {name: [round(float(value), 4) for value in np.mean(rows, axis=0)] for name, rows in table.items()}


def main() -> None:
    """Measure, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--out", type=Path, default=common.RESULTS / "none-of-these.json")
    words = parser.parse_args()
    recipe = Result.read(words.run / "result.json").recipe
    record = common.about("none_of_these", "cpu") | {
        "run": {
            "data": Path(recipe["data"]["path"]).name,
            "method": recipe["method"],
            "backbone": recipe["encoder"]["backbone"],
            "weights": Path(recipe["encoder"]["weights"] or "hub").name,
            "frozen": recipe["train"]["frozen"],
            "size": recipe["view"]["size"],
        },
        "draws": words.draws,
        "choice": choice(words.run, words.draws),
        "test": measured(words.run, words.draws),
    }
    common.write(words.out, record)
    for rule, rates in record["test"]["rules"].items():
        for rate, shares in rates.items():
            got, named = shares["false accepts"], shares["true accepts"]
            print(f"{rule:36} asked {rate:>6}  got {got['value']:.4f} {got['interval']}  named {named['value']:.4f}")


if __name__ == "__main__":
    main()
