"""Compares settings of `train --frozen` on the sets of simple_things.py, on held-out classes first.

    python benchmarks/frozen_defaults.py SETS/flowers SETS/groceries SETS/aerial --work WORK \\
        --backbone resnet50=FILE --backbone vit_small_patch16_224=FILE

A candidate is untrained, a closed form, or a head that Proxy-Anchor trains on cached features with some settings: its
start, features of length 1 or raw, the learning rate, how long, the proxies' start, and whether a second training on
all known classes follows (`train.refit`). Each is fitted on three quarters of the known classes and scored on the
fourth, in each of some folds; a trained candidate chooses its epoch on a fifth of the classes that it is fitted on, as
`train` does. The unseen classes are scored too, and kept apart: what is chosen is chosen on the folds.

Rules are scored beside the candidates. "simplest within one standard error" takes the first of untrained, whitening,
LDA and, in another row, the last trained candidate whose MAP@R on the folds is at most one standard error of the
difference (paired over classes) below the best. "best" takes the best of them. The two rules are also asked with as few
classes as a run holds out: some of the classes of the folds choose between untrained, whitening and LDA, and the MAP@R
on the other ones says what the choice loses to the best.

WORK keeps each finished candidate of a split. Results go to results/frozen-defaults.json.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import common
import numpy as np
import torch
from simple_things import (
    METRICS,
    Backbone,
    Encode,
    Scores,
    Task,
    computed,
    estimate,
    features_of,
    folds,
    head_of,
    of_classes,
    queries_of,
    scores,
    task,
    unchanged,
)
from torch import Tensor

from proxymetric.core.normalisation import unit
from proxymetric.data import Batches, open_data
from proxymetric.encoders import build
from proxymetric.encoders.head import make_head
from proxymetric.papers import method as make_method
from proxymetric.runs import recipe as recipes
from proxymetric.runs.assemble import FeatureFeed
from proxymetric.runs.clear_gain import standard_error
from proxymetric.runs.closed_form import Fit
from proxymetric.runs.score import EmbeddedSet, score
from proxymetric.system.checkpoint import Checkpoint
from proxymetric.system.watcher import Silent
from proxymetric.training.learner import Learner
from proxymetric.training.trainer import Trainer

METHOD = "proxy-anchor"
DIM = 512
HELD_OUT_SHARE = 0.2
SPLITS, FOLDS = 3, 4
FEW_CLASSES = (4, 6, 8)
"""held-out classes of a small run"""
DRAWS = 200
"""of the few classes, in each split"""
PARTS = ("held-out", "unseen")
CPU = torch.device("cpu")


class Settings(NamedTuple):
    """The settings of a trained candidate; the defaults are those of `train --frozen`."""

    start: str | None = None
    normalises: bool = False
    lr: float = 1e-3
    epochs: int = 40
    patience: int = 10
    proxies: str = "random"
    """"random", or "means": the means of the classes under the first head"""
    refits: bool = False

    def __str__(self) -> str:
        words = [self.start or "random start", "" if self.normalises or self.start else "raw features", f"{self.lr:g}"]
        words += [f"{self.epochs} epochs" if self.epochs != 40 else "", "" if self.proxies == "random" else "means"]
        return ", ".join(word for word in [*words, "refit" if self.refits else ""] if word)


TRAINED = (
    Settings(),
    Settings(lr=1e-4),
    Settings(normalises=True),
    Settings(normalises=True, lr=3e-4),
    Settings("lda"),
    Settings("lda", lr=1e-4),
    Settings("whitening"),
    Settings("whitening", epochs=10, patience=3),
    Settings("whitening", lr=1e-4, proxies="means"),
    Settings("whitening", lr=1e-4),
    Settings("whitening", lr=3e-4),
)
"""each is scored without and with a second training on all known classes; the rules choose it only if it is the last"""
SIMPLE: dict[str, Callable[[EmbeddedSet, int], Encode]] = {
    "untrained": unchanged,
    "whitening": lambda known, seed: computed("whitening", known, seed),
    "LDA": lambda known, seed: computed("lda", known, seed),
}
"""from the simplest"""


def numbered(labels: Tensor) -> np.ndarray:
    """Labels from 0 without gaps."""
    return np.unique(labels.numpy(), return_inverse=True)[1]


def train_head(
    settings: Settings,
    known: EmbeddedSet,
    held_out: EmbeddedSet | None,
    seed: int,
    fit: Fit | None = None,
    epochs: float | None = None,
) -> tuple[Encode, Fit | None, float]:
    """Train a head on features as `train --frozen` does, with the same trainer.

    Args:
        settings: of the candidate.
        known: the features to train on.
        held_out: those that choose the epoch; None: the last epoch is taken.
        seed: of all random numbers.
        fit: the closed form that an earlier training on fewer classes began with.
        epochs: instead of those of the settings.

    Returns:
        The trained head, the closed form that it began with, and the chosen epoch.
    """
    torch.manual_seed(seed)
    width, labels = known.vectors.shape[1], numbered(known.labels)
    # The backbone has no part in the training; a small one keeps the checkpoints small.
    encoder = build("small", dim=DIM, size=32, normalise_features=settings.normalises or settings.start is not None)
    encoder.head = make_head("linear", width, DIM, normalise_features=settings.normalises or settings.start is not None)
    if settings.start is not None:
        state = torch.get_rng_state()
        fit, head = head_of(settings.start, known, held_out, seed, starts=True, fit=fit)
        head = head.widened(min(DIM, width)) if len(head.weight) < min(DIM, width) else head
        encoder.set_head(head.weight, head.bias)
        torch.set_rng_state(state)
    options = recipes.check(
        {
            "method": METHOD,
            "train": {
                "frozen": True, "lr": settings.lr, "epochs": settings.epochs, "patience": settings.patience,
                "metrics": ["MAP@R"], "device": "cpu",
            },
        }
    ).train  # fmt: skip
    criterion = make_method(METHOD, classes=int(labels.max()) + 1, dim=encoder.dim)
    learner = Learner(encoder, criterion, frozen=True)
    if settings.proxies == "means":
        with torch.no_grad():
            vectors = unit(encoder.head(known.vectors))
            means = torch.zeros(int(labels.max()) + 1, encoder.dim).index_add_(0, torch.from_numpy(labels), vectors)
            (proxies,) = (value for value in criterion.parameters() if value.shape == means.shape)
            # The length of a random proxy: the step size depends on it.
            proxies.copy_(unit(means) * proxies.norm(dim=1, keepdim=True))
    feed = FeatureFeed(known.vectors, labels, Batches(labels, options.batch, None, seed), CPU)

    def encode(features: Tensor) -> Tensor:
        encoder.eval()
        with torch.no_grad():
            return criterion.normalised(encoder.head(features).float())

    def score_held_out() -> dict[str, float]:
        assert held_out is not None
        return score(held_out._replace(vectors=encode(held_out.vectors)), options.metrics)

    with tempfile.TemporaryDirectory() as folder:
        scorer = None if held_out is None else score_held_out
        trainer = Trainer(
            learner, feed, options, Path(folder), Silent(), score=scorer, stop_after=epochs, device=CPU
        )  # fmt: skip
        trainer.run()
        if held_out is not None:
            Checkpoint.read(Path(folder) / "best.safetensors").load_into(encoder, "encoder.", what="the encoder")
    return encode, fit, trainer.chosen["epoch"]


def trained(settings: Settings, known: EmbeddedSet, seed: int) -> tuple[Encode, Encode, float]:
    """A candidate without and with the second training on all known classes, and the epoch that was chosen."""
    classes = np.unique(known.labels.numpy())
    count = max(2, round(HELD_OUT_SHARE * len(classes)))
    held_out = np.random.default_rng([seed, len(classes)]).choice(classes, count, replace=False)
    parts = of_classes(known, np.setdiff1d(classes, held_out)), of_classes(known, held_out)
    encode, fit, epoch = train_head(settings, *parts, seed)
    again = encode
    if epoch or settings.start is not None:
        again = train_head(settings, known, None, seed, fit, epoch)[0]
    return encode, again, epoch


def measured(at: Task, name: str, settings: Settings | None, count: int) -> dict[str, Any]:
    """A candidate of a split: the queries of the folds and of the unseen classes, with and without refit."""
    parts = [(known, scored) for known, scored in folds(at.known, at.seed, count)] + [(at.known, at.unseen)]
    found: dict[str, list[Scores]] = {}
    epochs = []
    for known, scored in parts:
        if settings is None:
            encoders = {name: SIMPLE[name](known, at.seed)}
        else:
            once, again, epoch = trained(settings, known, at.seed)
            encoders = {str(settings): once, str(settings._replace(refits=True)): again}
            epochs.append(epoch)
        for key, encode in encoders.items():
            found.setdefault(key, []).append(scores(scored, encode))
    return {
        "epochs": epochs,
        "held-out classes": torch.cat([queries_of(scored) for _, scored in parts[:-1]]),
        "classes": queries_of(at.unseen),
        "rows": {
            key: {
                "held-out": {metric: torch.cat([part[metric] for part in values[:-1]]) for metric in METRICS},
                "unseen": values[-1],
            }
            for key, values in found.items()
        },
    }


def simplest(order: Sequence[str], values: dict[str, Tensor], classes: Tensor, errors: float = 1.0) -> str:
    """The first candidate that is at most some standard errors of the difference below the best.

    Args:
        order: the candidates, from the simplest.
        values: of each, the MAP@R of the queries.
        classes: of the queries.
        errors: 0 takes the best.
    """
    means = {name: float(values[name].mean()) for name in order}
    best = max(order, key=means.__getitem__)
    numbers = np.unique(classes.numpy(), return_inverse=True)[1]

    def error(name: str) -> float:
        return standard_error(np.bincount(numbers, (values[best] - values[name]).numpy()), np.bincount(numbers))

    return next(name for name in order if means[best] - means[name] <= errors * error(name) + 1e-12)


def regret_of_few_classes(values: dict[str, Tensor], classes: Tensor, seed: int) -> dict[str, dict[str, float]]:
    """What each rule loses on the other classes when few classes choose between the simple candidates, in points.

    Args:
        values: of each candidate, the MAP@R of the queries.
        classes: of the queries.
        seed: of the draws.
    """
    random, known = np.random.default_rng([seed, 44]), np.unique(classes.numpy())
    found: dict[str, dict[str, float]] = {"simplest within one standard error": {}, "best": {}}
    for count in FEW_CLASSES:
        lost = dict.fromkeys(found, 0.0)
        for _ in range(DRAWS):
            chooses = torch.from_numpy(np.isin(classes.numpy(), random.choice(known, count, replace=False)))
            on_few = {name: values[name][chooses] for name in SIMPLE}
            means = {name: float(values[name][~chooses].mean()) for name in SIMPLE}
            for errors, rule in ((1.0, "simplest within one standard error"), (0.0, "best")):
                taken = simplest(list(SIMPLE), on_few, classes[chooses], errors)
                lost[rule] += 100 * (max(means.values()) - means[taken]) / DRAWS
        for rule, points in lost.items():
            found[rule][str(count)] = round(points, 2)
    return found


def with_rules(rows: dict[str, Any], classes: Tensor, last: str | None) -> dict[str, Any]:
    """Rows with those of rules that choose among the simple candidates, and among these and a trained one.

    Args:
        rows: of a split.
        classes: of the queries of the folds.
        last: the trained candidate, the least simple one; None: there is none.
    """
    values = {name: row["held-out"][METRICS[0]] for name, row in rows.items()}
    orders = {"closed forms": list(SIMPLE)} | ({f"closed forms and {last}": [*SIMPLE, last]} if last else {})
    chosen = {}
    for title, order in orders.items():
        chosen[f"simplest within one standard error of {title}"] = simplest(order, values, classes)
        chosen[f"best of {title}"] = simplest(order, values, classes, errors=0)
    return {"rows": rows | {title: rows[name] for title, name in chosen.items()}, "chosen": chosen}


def candidate_of(
    make_task: Callable[[], Task], name: str, settings: Settings | None, count: int, file: Path
) -> dict[str, Any]:
    """A candidate of a split, measured now or by an earlier process."""
    if file.is_file():
        return torch.load(file, weights_only=True)
    found = measured(make_task(), name, settings, count)
    temporary = file.with_suffix(".part")
    torch.save(found, temporary)
    temporary.replace(file)
    return found


def differences(cells: dict[str, list[dict[str, Any]]], row: str, other: str, part: str) -> dict[str, Any]:
    """The difference of two rows over some cells, paired by query; a class of a set counts once."""
    sets = sorted({name.split(",")[0] for name in cells})
    found = {}
    for metric in METRICS:
        values, classes = [], []
        for name, splits in cells.items():
            for split in splits:
                values.append(split["rows"][row][part][metric] - split["rows"][other][part][metric])
                key = "classes" if part == "unseen" else "held-out classes"
                classes.append(split[key] + 10_000 * sets.index(name.split(",")[0]))
        found[metric] = estimate(torch.cat(values), torch.cat(classes))
    return found


def make_tasks(folder: Path, backbone: Backbone) -> Callable[[int], Task]:
    """A function that divides a set for a seed; the features are read when they are first needed."""
    features = functools.cache(lambda: features_of(open_data(folder), backbone))
    return lambda seed: task(features(), seed)


def summary(splits: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The means of the rows of some splits, and what the rules chose."""

    def mean(name: str, part: str, metric: str) -> float:
        return round(100 * float(np.mean([split["rows"][name][part][metric].mean() for split in splits])), 2)

    rows = {
        name: {part: {metric: mean(name, part, metric) for metric in METRICS} for part in PARTS}
        for name in splits[0]["rows"]
    }
    epochs = {name: [split["epochs"][name] for split in splits] for name in splits[0]["epochs"]}
    regrets = [split["few classes"] for split in splits]
    few = {
        rule: {count: round(float(np.mean([each[rule][count] for each in regrets])), 2) for count in counts}
        for rule, counts in regrets[0].items()
    }
    return {"rows": rows, "chosen": [split["chosen"] for split in splits], "epochs": epochs, "few classes": few}


def main() -> None:
    """Measure the candidates, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", type=Path, nargs="+", help="folders of class folders")
    parser.add_argument("--backbone", type=Backbone.of, action="append", required=True, metavar="NAME[=FILE]")
    parser.add_argument("--work", type=Path, required=True, help="folder for finished candidates")
    parser.add_argument("--splits", type=int, nargs="+", default=list(range(SPLITS)))
    parser.add_argument("--folds", type=int, default=FOLDS)
    parser.add_argument("--candidates", type=int, nargs="*", default=list(range(len(TRAINED))), help="of TRAINED")
    parser.add_argument("--out", type=Path, default=common.RESULTS / "frozen-defaults.json")
    words = parser.parse_args()
    words.work.mkdir(parents=True, exist_ok=True)
    wanted: list[tuple[str, Settings | None]] = [(name, None) for name in SIMPLE]
    wanted += [(str(TRAINED[number]), TRAINED[number]) for number in words.candidates]
    record = common.about("frozen_defaults", "cpu") | {"splits": words.splits, "folds": words.folds, "cells": {}}
    cells: dict[str, list[dict[str, Any]]] = {}
    for folder in words.sets:
        for backbone in words.backbone:
            key, tasks = f"{folder.name}, {backbone.name}", make_tasks(folder, backbone)
            for seed in words.splits:
                parts = {}
                for name, settings in wanted:
                    file = words.work / f"{folder.name} {backbone.name} {seed} {name} {words.folds}.pt"
                    make = functools.partial(tasks, seed)
                    parts[name] = candidate_of(make, name, settings, words.folds, file)
                    print(key, seed, name, parts[name]["epochs"], flush=True)
                split = next(iter(parts.values())) | {
                    "rows": {name: row for part in parts.values() for name, row in part["rows"].items()},
                    "epochs": {name: part["epochs"] for name, part in parts.items() if part["epochs"]},
                }
                last = str(TRAINED[words.candidates[-1]]._replace(refits=True)) if words.candidates else None
                simple = {name: split["rows"][name]["held-out"][METRICS[0]] for name in SIMPLE}
                split["few classes"] = regret_of_few_classes(simple, split["held-out classes"], seed)
                split |= with_rules(split["rows"], split["held-out classes"], last)
                cells.setdefault(key, []).append(split)
            record["cells"][key] = summary(cells[key])
            common.write(words.out, record)
    names = list(next(iter(cells.values()))[0]["rows"])
    others = [*SIMPLE, *[str(TRAINED[0])] * (0 in words.candidates)]
    record["differences"] = {
        part: {
            f"less {other}": {name: differences(cells, name, other, part) for name in names if name != other}
            for other in others
        }
        for part in PARTS
    }
    common.write(words.out, record)
    print(f"\n{'MAP@R on held-out classes, on unseen ones':86}" + "".join(f"{name[:22]:>24}" for name in cells))
    for name in names:
        shown = [record["cells"][key]["rows"][name] for key in cells]
        print(f"{name:86}" + "".join(f"{c['held-out']['MAP@R']:12.1f}{c['unseen']['MAP@R']:12.1f}" for c in shown))


if __name__ == "__main__":
    main()
