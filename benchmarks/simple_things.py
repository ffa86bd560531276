"""Measures whether `train --frozen` loses to something simple, on three photograph sets that nothing was tuned to.

    python benchmarks/photo_sets.py flowers CLONE SETS/flowers          and groceries, aerial: see photo_sets.py
    python benchmarks/simple_things.py SETS/flowers SETS/groceries SETS/aerial --work WORK \\
        --backbone resnet50=FILE --backbone vit_small_patch16_224=FILE

The sets are folders of class folders. In each of three splits, half of the classes are known and the others unseen. Six
simple rows are fitted on all known classes: raw pixels, the untrained backbone, PCA-whitening, whitening, LDA, and the
logits of a linear probe. Beside them stand `train --frozen`, which chooses its method, and Proxy-Anchor, with all their
defaults, which see the same photographs. All are scored on the unseen classes. The question is the difference between
our default and the simple row that a careful person would have taken: the one that has the best MAP@R when it is fitted
on three quarters of the known classes and scored on the fourth, over four such folds. Beside our default stands one
that it could be: the best of the untrained backbone, whitening and LDA on these folds. Differences are paired by query;
intervals are a bootstrap over classes, in which a class counts once, whatever the splits and backbones that scored it.

Features come from the feature cache. WORK keeps each finished split, so that a killed run continues. With --earlier,
all rows but `train --frozen` are those of an earlier WORK. Results go to results/simple-things.json.
`frozen_defaults.py` asks the same sets which default of `train --frozen` would be better.
"""

from __future__ import annotations

import argparse
import csv
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import common
import numpy as np
import torch
from torch import Tensor

import proxymetric as pm
from proxymetric.closed_forms import LinearHead
from proxymetric.core.normalisation import unit
from proxymetric.data import EvalFeed, EvalView, ImageSet, open_data
from proxymetric.features.cache import cached_features
from proxymetric.metrics import interval
from proxymetric.models.features import FeatureModel
from proxymetric.papers import closed_form
from proxymetric.runs import closed_form as choices
from proxymetric.runs import recipe as recipes
from proxymetric.runs.assemble import eval_view, make_encoder
from proxymetric.runs.comparison import score_queries
from proxymetric.runs.score import EmbeddedSet
from proxymetric.system.watcher import Silent

METRICS = ("MAP@R", "R@1")
SPLITS, FOLDS = 3, 4
PIXELS_SIDE = 32
PCA_DIM = 128
PROBE_C = 0.01
PIXELS, DEFAULT, TRAINED = "raw pixels", "train --frozen", "head trained by Proxy-Anchor"
CLOSED_FORM = "closed form chosen on folds"
"""a default that `train --frozen` could have: the best of the untrained backbone, whitening and LDA on the folds"""
Encode = Callable[[Tensor], Tensor]
"""from features (N, F) to vectors (N, D)"""
Scores = dict[str, Tensor]
"""metric -> the values (Q,) of the queries"""


class Backbone(NamedTuple):
    """A pre-trained backbone and the file of its weights; None: those of the hub.

    Example:
        >>> Backbone.of("resnet50=weights.safetensors").name, Backbone.of("resnet50").weights
        ('resnet50', None)
    """

    name: str
    weights: Path | None

    @classmethod
    def of(cls, text: str) -> Backbone:
        """Read NAME or NAME=FILE."""
        name, _, file = text.partition("=")
        return cls(name, Path(file) if file else None)


class Task(NamedTuple):
    """A set in one split: the features of the known and of the unseen classes."""

    known: EmbeddedSet
    unseen: EmbeddedSet
    seed: int


def features_of(images: ImageSet, backbone: Backbone) -> EmbeddedSet:
    """The features that `train --frozen` computes, from the feature cache."""
    weights = {} if backbone.weights is None else {"weights": str(backbone.weights)}
    recipe = recipes.check({"encoder": {"backbone": backbone.name} | weights, "train": {"frozen": True}})
    found = cached_features(make_encoder(recipe), images, EvalView(**eval_view(recipe)))
    return EmbeddedSet(images, found.vectors, found.kept)


def pixels_of(images: ImageSet) -> EmbeddedSet:
    """Photographs of 32 pixels as vectors."""
    feed = EvalFeed(images, EvalView(size=PIXELS_SIDE), 256, "none", torch.device("cpu"), 0)
    parts = [batch.images.flatten(1).float() for batch in feed if batch.images is not None]
    return EmbeddedSet(images, torch.cat(parts), feed.kept)


def of_classes(embedded: EmbeddedSet, classes: np.ndarray) -> EmbeddedSet:
    """The embeddings of some classes; the others stay in `images`, so that a class keeps its number."""
    rows = np.flatnonzero(np.isin(embedded.labels.numpy(), classes))
    return embedded._replace(vectors=embedded.vectors[torch.from_numpy(rows)], kept=embedded.kept[rows])


def task(embedded: EmbeddedSet, seed: int) -> Task:
    """Divide the classes into two halves."""
    order = np.random.default_rng([seed, 42]).permutation(len(embedded.images.classes))
    half = len(order) // 2
    return Task(of_classes(embedded, order[:half]), of_classes(embedded, order[half:]), seed)


def folds(known: EmbeddedSet, seed: int, count: int = FOLDS) -> Iterator[tuple[EmbeddedSet, EmbeddedSet]]:
    """Divide the known classes again and again into those to fit on and those to score."""
    order = np.random.default_rng([seed, 43]).permutation(np.unique(known.labels.numpy()))
    for fold in range(count):
        scored = order[fold::count]
        yield of_classes(known, np.setdiff1d(order, scored)), of_classes(known, scored)


def unchanged(known: EmbeddedSet, seed: int) -> Encode:
    """The features themselves."""
    return lambda features: features


def pca_whitening(known: EmbeddedSet, seed: int) -> Encode:
    """The leading principal directions, each divided by its standard deviation; it needs no labels."""
    vectors = unit(known.vectors.float()).double()
    mean = vectors.mean(0)
    _, values, directions = torch.linalg.svd(vectors - mean, full_matrices=False)
    kept = min(PCA_DIM, int((values > 1e-6 * values[0]).sum()))
    head = LinearHead(directions[:kept] / values[:kept, None], torch.zeros(kept, dtype=torch.float64))
    return lambda features: head((unit(features.float()).double() - mean).float())


def head_of(
    name: str, known: EmbeddedSet, held_out: EmbeddedSet | None, seed: int, starts: bool = False,
    fit: choices.Fit | None = None,
) -> tuple[choices.Fit, LinearHead]:  # fmt: skip
    """A closed form as the library chooses and fits it.

    Args:
        name: "whitening" or "lda".
        known: the features that it is fitted on.
        held_out: features of the classes that choose, if there are enough; None: folds of the known classes choose.
        seed: of the folds.
        starts: the head is the start of a training.
        fit: what was chosen earlier; None: it is chosen now.
    """
    form = closed_form(name)
    assert form is not None
    features = unit(known.vectors.float()).double()
    # All directions that it can choose lie in the span of the features; in a basis of it, few images cost little.
    basis = torch.linalg.qr(features.T)[0] if len(features) < features.shape[1] else torch.eye(features.shape[1])
    known = known._replace(vectors=(features @ basis.double()).float())
    if held_out is not None:
        held_out = held_out._replace(vectors=(unit(held_out.vectors.double()) @ basis.double()).float())
    if fit is None:
        limits = choices.Limits(None, min(choices.MAX_PRINCIPAL, basis.shape[1]), starts)
        fit = choices.choose(name, form, choices.make_folds(known, held_out, seed), limits)
    fit, head = choices.fitted(fit, form, choices.scatter_of([known]))
    return fit, LinearHead(head.weight @ basis.double().T, head.bias)


def computed(name: str, known: EmbeddedSet, seed: int) -> Encode:
    """A closed form, chosen on folds of the known classes."""
    head = head_of(name, known, None, seed)[1]
    return lambda features: head(unit(features.float()))


def probe(known: EmbeddedSet, seed: int) -> Encode:
    """The logits of a logistic regression on standardised features: how a linear probe is used for a search."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = make_pipeline(StandardScaler(), LogisticRegression(C=PROBE_C, max_iter=1000))
    model.fit(known.vectors.numpy(), known.labels.numpy())
    return lambda features: torch.from_numpy(model.decision_function(features.numpy())).float()


SIMPLE: dict[str, Callable[[EmbeddedSet, int], Encode]] = {
    "untrained": unchanged,
    "PCA-whitening": pca_whitening,
    "whitening": partial(computed, "whitening"),
    "LDA": partial(computed, "lda"),
    "linear probe, logits": probe,
}
"""row -> how it is fitted on known classes"""


def trained(method: str | None, known: EmbeddedSet, seed: int, backbone: Backbone, work: Path) -> Encode:
    """`train --frozen` with all its defaults on the known classes; with a method, the head that this one trains."""
    table, run = work / "known.csv", work / "run"
    images = known.images
    assert images.paths is not None
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["file", "class"])
        writer.writerows((Path(images.paths[row]).resolve(), images.classes[images.labels[row]]) for row in known.kept)
    # fmt: off
    pm.train(
        table, frozen=True, method=method, backbone=backbone.name, weights=backbone.weights, seed=seed, device="cpu",
        settings={} if method is None else {"train.keep": "trained"}, out=run, overwrite=True, report=False,
        watcher=Silent(),
    )
    # fmt: on
    encode = FeatureModel.of(pm.load(run, device="cpu")).vectors
    shutil.rmtree(run)
    return encode


def scores(embedded: EmbeddedSet, encode: Encode) -> Scores:
    """The metrics of each query."""
    found = score_queries(embedded._replace(vectors=encode(embedded.vectors)), METRICS)[0]
    return {metric: values.cpu() for metric, values in found.items()}


def queries_of(embedded: EmbeddedSet) -> Tensor:
    """The classes of the queries, in the order of `scores`."""
    return score_queries(embedded, METRICS[:1])[1]


def measured(at: Task, pixels: Task, backbone: Backbone, methods: dict[str, str | None], work: Path) -> dict[str, Any]:
    """All rows of one split: scores of the unseen queries, and MAP@R on the folds of the known classes."""
    rows: dict[str, Scores] = {PIXELS: scores(pixels.unseen, lambda vectors: vectors)}
    held_out: dict[str, list[Tensor]] = {PIXELS: []}
    for _, scored in folds(pixels.known, at.seed):
        held_out[PIXELS].append(scores(scored, lambda vectors: vectors)[METRICS[0]])
    for name, fit in SIMPLE.items():
        rows[name] = scores(at.unseen, fit(at.known, at.seed))
        parts = folds(at.known, at.seed)
        held_out[name] = [scores(scored, fit(fitted, at.seed))[METRICS[0]] for fitted, scored in parts]
    for name, method in methods.items():
        rows[name] = scores(at.unseen, trained(method, at.known, at.seed, backbone, work))
    means = {name: float(torch.cat(values).mean()) for name, values in held_out.items()}
    return {"classes": queries_of(at.unseen), "rows": rows, "held-out": means}


def difference(splits: Sequence[dict[str, Any]], row: str, other: str | None, metric: str, offset: int = 0) -> tuple:
    """The differences of the queries of some splits between a row and another, and their classes.

    Args:
        splits: as `measured` returns them.
        row: a row.
        other: another one; None: the simple row that the held-out classes choose, split by split.
        metric: of the queries.
        offset: added to the numbers of the classes, so that those of several sets differ.
    """
    values = [
        split["rows"][row][metric] - split["rows"][best(split["held-out"]) if other is None else other][metric]
        for split in splits
    ]
    return torch.cat(values), torch.cat([split["classes"] for split in splits]) + offset


def best(held_out: dict[str, float]) -> str:
    """The row that the held-out classes choose.

    Example:
        >>> best({"untrained": 0.4, "whitening": 0.5})
        'whitening'
    """
    return max(held_out, key=held_out.__getitem__)


def with_closed_form(split: dict[str, Any]) -> dict[str, Any]:
    """A split with the row `CLOSED_FORM`."""
    chosen = best({name: split["held-out"][name] for name in ("untrained", "whitening", "LDA")})
    return split | {"rows": split["rows"] | {CLOSED_FORM: split["rows"][chosen]}}


def estimate(values: Tensor, classes: Tensor) -> dict[str, Any]:
    """A mean in points, and its interval over classes."""
    low, high = interval(values, classes)
    return {"value": round(100 * float(values.mean()), 2), "interval": [round(100 * low, 2), round(100 * high, 2)]}


def summary(splits: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a record says about a set with a backbone: the means of the splits, what was chosen, and differences."""
    names = list(splits[0]["rows"])

    simple = splits[0]["held-out"]

    def mean(values: Sequence[float]) -> float:
        return round(100 * float(np.mean(values)), 2)

    rows = {}
    for name in names:
        rows[name] = {metric: mean([split["rows"][name][metric].mean() for split in splits]) for metric in METRICS}
        if name in simple:
            rows[name]["held-out"] = mean([split["held-out"][name] for split in splits])
    found: dict[str, Any] = {
        "splits": len(splits),
        "rows": rows,
        "chosen": [best(split["held-out"]) for split in splits],
    }
    found["less the chosen row"] = {
        name: {metric: estimate(*difference(splits, name, None, metric)) for metric in METRICS} for name in names
    }
    return found


def pooled(cells: dict[tuple[str, str], list[dict[str, Any]]], row: str, metric: str) -> dict[str, Any]:
    """The difference between a row and the chosen one over several sets and backbones; a class counts once."""
    names = sorted({name for name, _ in cells})
    parts = [difference(splits, row, None, metric, 10_000 * names.index(name)) for (name, _), splits in cells.items()]
    values, classes = zip(*parts, strict=True)
    return estimate(torch.cat(values), torch.cat(classes))


def verdict(cells: dict[tuple[str, str], list[dict[str, Any]]]) -> dict[str, Any]:
    """Of each row: its difference to the chosen row in each set and over all of them.

    A row that was not measured with every backbone is compared where it was.
    """
    found: dict[str, Any] = {}
    for row in dict.fromkeys(name for splits in cells.values() for name in splits[0]["rows"]):
        has_row = {key: splits for key, splits in cells.items() if row in splits[0]["rows"]}
        found[row] = {}
        for name in dict.fromkeys(name for name, _ in has_row):
            part = {key: splits for key, splits in has_row.items() if key[0] == name}
            found[row][name] = {metric: pooled(part, row, metric) for metric in METRICS}
        found[row]["all sets"] = {metric: pooled(has_row, row, metric) for metric in METRICS}
    return found


def file_of(work: Path, folder: Path, backbone: Backbone, seed: int) -> Path:
    """Where a finished split is kept."""
    return work / f"{folder.name} {backbone.name} {seed}.pt"


def split_of(
    folder: Path, backbone: Backbone, seed: int, methods: dict[str, str | None], work: Path, earlier: Path | None = None
) -> dict[str, Any]:
    """One split of a set with a backbone, measured now or by an earlier process.

    Args:
        folder: of the set.
        backbone: its features are used.
        seed: of the split.
        methods: row -> the method that is trained.
        work: where finished splits are kept.
        earlier: those of an earlier commit, of which all rows but `DEFAULT` are taken.
    """
    file = file_of(work, folder, backbone, seed)
    if file.is_file():
        return torch.load(file, weights_only=True)
    images = open_data(folder)
    at = task(features_of(images, backbone), seed)
    if earlier is None:
        found = measured(at, task(pixels_of(images), seed), backbone, methods, work)
    else:
        found = torch.load(file_of(earlier, folder, backbone, seed), weights_only=True)
        found["rows"][DEFAULT] = scores(at.unseen, trained(None, at.known, seed, backbone, work))
    temporary = file.with_suffix(".part")
    torch.save(found, temporary)
    temporary.replace(file)
    return found


def main() -> None:
    """Measure all sets with all backbones, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", type=Path, nargs="+", help="folders of class folders")
    parser.add_argument("--backbone", type=Backbone.of, action="append", required=True, metavar="NAME[=FILE]")
    parser.add_argument("--work", type=Path, required=True, help="folder for finished splits")
    parser.add_argument("--earlier", type=Path, help="WORK of an earlier commit: its rows are kept, but the default's")
    parser.add_argument("--splits", type=int, default=SPLITS)
    parser.add_argument("--finished", action="store_true", help="only the splits that WORK has, to look at a long run")
    parser.add_argument("--without-default", action="store_true", help="leave the row out that chooses its method")
    parser.add_argument("--out", type=Path, default=common.RESULTS / "simple-things.json")
    words = parser.parse_args()
    words.work.mkdir(parents=True, exist_ok=True)
    methods: dict[str, str | None] = {TRAINED: "proxy-anchor"} | ({} if words.without_default else {DEFAULT: None})
    record = common.about("simple_things", "cpu") | {"splits": words.splits, "sets": {}, "cells": {}}
    record |= {"measured": "all rows" if words.earlier is None else DEFAULT}
    cells: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for folder in words.sets:
        images = open_data(folder)
        record["sets"][folder.name] = {"classes": len(images.classes), "photographs": len(images)}
        for backbone in words.backbone:
            files = {seed: file_of(words.work, folder, backbone, seed) for seed in range(words.splits)}
            seeds = [seed for seed, file in files.items() if file.is_file() or not words.finished]
            made = (split_of(folder, backbone, seed, methods, words.work, words.earlier) for seed in seeds)
            splits = [with_closed_form(split) for split in made]
            if not splits:
                continue
            cells[folder.name, backbone.name] = splits
            record["cells"][f"{folder.name}, {backbone.name}"] = found = summary(splits)
            print(f"\n{folder.name}, {backbone.name}: chosen {', '.join(found['chosen'])}")
            for name, row in found["rows"].items():
                print(f"{name:28} " + "  ".join(f"{metric} {row[metric]:5.1f}" for metric in METRICS), flush=True)
            common.write(words.out, record)
    record["verdict"] = verdict(cells)
    common.write(words.out, record)
    print("\nless the chosen row, MAP@R")
    for row, parts in record["verdict"].items():
        spans = {name: (part[METRICS[0]]["value"], *part[METRICS[0]]["interval"]) for name, part in parts.items()}
        shown = [f"{name} {value:+.1f} ({low:.1f} to {high:.1f})" for name, (value, low, high) in spans.items()]
        print(f"{row:28} " + "  ".join(shown), flush=True)


if __name__ == "__main__":
    main()
