"""Measures what `--method auto --frozen` chooses from few and from many known classes, what it costs, and its regret.

    python benchmarks/auto_choice.py CUB glyphs --weights FILE --out-runs FOLDER       CUB: folder of CUB-200-2011

Of each set, ten images of each class are taken: the known classes are drawn from the first 100 training classes, the
unseen ones are the first 100 test classes. For each number of known classes, the first draws are frozen runs with
`--method auto`, without a report; further draws only choose. The choice is compared with the other candidates: each
learns from the same known classes and is scored on the unseen ones. The regret is the highest MAP@R of a candidate on
the unseen classes, less that of the chosen one, in points. The cost is the processor time of the choice as a share of
the rest of the run, whose features were computed before. Results go to results/auto-choice-SET.json.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from PIL import Image

import proxymetric as pm
from proxymetric.data import ImageSet, open_data, split
from proxymetric.encoders import Encoder
from proxymetric.runs import recipe as recipes
from proxymetric.runs.assemble import RunContext, embed_features, make_encoder, open_split
from proxymetric.runs.auto_method import FROZEN_CANDIDATES, choose_method
from proxymetric.runs.closed_form import joined
from proxymetric.runs.trials import Candidate, Task, run_trial, tried_recipe
from proxymetric.system.watcher import Silent
from proxymetric.training.process_group import ProcessGroup

COMPARED = FROZEN_CANDIDATES[:7]
"""the candidates that are scored on the unseen classes, besides those that a run tried"""
EPOCHS = 20
"""of a candidate that is trained, on all known classes"""
SPENT_SECONDS = 5.0
"""what a run has taken before it chooses, about; the time that the trials may take depends on it"""
COSTS = ("CPU seconds of the choice", "CPU seconds of the run", "share")
Part = dict[str, list[Path]]


def lay_out(found: ImageSet, folder: Path, images: int, classes: int) -> tuple[Part, Part]:
    """The files of some images of the first training classes and of the first test classes."""
    random = np.random.default_rng(0)
    test = sorted(found.test_classes)[:classes]
    known = [label for label in range(len(found.classes)) if label not in found.test_classes][:classes]
    parts = [
        {found.classes[label]: files_of(found, label, folder / name, images, random) for label in labels}
        for name, labels in (("train", known), ("test", test))
    ]
    return parts[0], parts[1]


def files_of(found: ImageSet, label: int, folder: Path, images: int, random: np.random.Generator) -> list[Path]:
    """The first files of a class; of a drawn class, some of its images, which are written as files."""
    rows = np.flatnonzero(found.labels == label)
    if found.arrays is None:
        assert found.paths is not None
        return [Path(found.paths[row]).resolve() for row in rows[:images]]
    rows = random.permutation(rows)[:images]
    files = [folder / f"{label:04}" / f"{number}.png" for number in range(len(rows))]
    for row, file in zip(rows, files, strict=True):
        if not file.exists():  # the time of a file is a part of the key of its features
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(found.arrays[row]).save(file)
    return files


def write_table(file: Path, known: Part, unseen: Part) -> None:
    """Write the images of a run as a CSV."""
    with open(file, "w", newline="") as table:
        writer = csv.writer(table)
        writer.writerow(["file", "class", "split"])
        for split_name, part in (("train", known), ("test", unseen)):
            writer.writerows([path, name, split_name] for name, paths in part.items() for path in paths)


def flat_keys(tables: dict[str, Any]) -> dict[str, Any]:
    """The keys of tables as `train` takes them."""
    inner = {key: value for key, value in tables.items() if isinstance(value, dict)}
    flat = {f"{name}.{key}": value for name, table in inner.items() for key, value in table.items()}
    return flat | {key: value for key, value in tables.items() if key not in inner}


def unseen_scores(
    table: Path, settings: dict[str, Any], candidates: list[Candidate], encoder: Encoder
) -> dict[str, float]:
    """MAP@R of each candidate on the unseen classes, after it learnt from all known ones; in per cent."""
    recipe = recipes.check(recipes.merged({"data": {"path": str(table)}}, settings))
    context = RunContext(recipe, torch.device("cpu"), ProcessGroup(), Silent(), {})
    parts = split(open_data(table), 0.0)
    known, unseen = (embed_features(context, encoder, part, "images") for part in (parts.train, parts.test))
    task, scores = Task(joined([known]), unseen, recipe.seed), {}
    for candidate in candidates:
        values = run_trial(context, encoder, tried_recipe(recipe, candidate), task, EPOCHS)
        scores[str(candidate)] = round(100 * float(values.mean()), 2)
    return scores


def chosen_in_run(table: Path, settings: dict[str, Any], out: Path, encoder: Encoder) -> dict[str, Any]:
    """What a whole run chooses, and what its choice costs: the processor time of the same choice alone."""
    started = time.process_time()
    run = pm.train(
        table, method="auto", settings=flat_keys(settings), out=out, overwrite=True, report=False, watcher=Silent()
    )
    whole = time.process_time() - started
    started = time.process_time()
    chosen_alone(table, settings, encoder)
    choice = time.process_time() - started - reading_seconds(table, settings, encoder)
    cost = {
        "score of the run": round(100 * run.scores["MAP@R"], 2),
        "CPU seconds of the choice": round(choice, 2),
        "CPU seconds of the run": round(whole, 2),
        "share": round(choice / (whole - choice), 3),
    }
    return run.result.auto | cost


def reading_seconds(table: Path, settings: dict[str, Any], encoder: Encoder) -> float:
    """The processor time in which a choice opens the images and reads their features, which does not count."""
    recipe = recipes.check(recipes.merged({"data": {"path": str(table)}}, settings))
    context = RunContext(recipe, torch.device("cpu"), ProcessGroup(), Silent(), {})
    started = time.process_time()
    for part in open_split(recipe, context.watcher)[1][:2]:
        embed_features(context, encoder, part, "images")
    return time.process_time() - started


def chosen_alone(table: Path, settings: dict[str, Any], encoder: Encoder) -> dict[str, Any]:
    """What a run would choose, without the rest of the run."""
    recipe = recipes.check(recipes.merged({"data": {"path": str(table)}}, settings))
    context = RunContext(recipe, torch.device("cpu"), ProcessGroup(), Silent(), {})
    _, parts = open_split(recipe, context.watcher)
    return choose_method(context, parts.train, parts.validation, spent=SPENT_SECONDS, encoder=encoder).as_dict()


def measured(table: Path, settings: dict[str, Any], auto: dict[str, Any], encoder: Encoder) -> dict[str, Any]:
    """A choice and its regret."""
    tried = [Candidate(trial["method"], trial["start"]) for trial in auto["trials"]]
    chosen = Candidate(auto["method"], auto["start"])
    scores = unseen_scores(table, settings, list(dict.fromkeys([*COMPARED, *tried, chosen])), encoder)
    best = max(scores, key=scores.__getitem__)
    names = ("reason", "folds", "divisions", "dropped", "score of the run", *COSTS)
    return {
        "chosen": str(chosen),
        "best": best,
        "regret": round(scores[best] - scores[str(chosen)], 2),
        "scores": scores,
        "on folds": {
            str(candidate): round(100 * trial["score"], 2)
            for candidate, trial in zip(tried, auto["trials"], strict=True)
        },
    } | {name: auto[name] for name in names if name in auto}


def summary(draws: list[dict[str, Any]]) -> dict[str, Any]:
    """The means over the draws of known classes; the share is that of the runs."""
    shares = [draw["share"] for draw in draws if "share" in draw]
    return {
        "chosen": [draw["chosen"] for draw in draws],
        "regret": round(statistics.fmean(draw["regret"] for draw in draws), 2),
        "share": round(statistics.fmean(shares), 3) if shares else None,
    }


def main() -> None:
    """Measure, and write the record after each draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="+", help="folder of CUB-200-2011, glyphs, or other data with test classes")
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--backbone", default="vit_small_patch16_224")
    parser.add_argument("--classes", type=int, nargs="+", default=[6, 20, 50, 100])
    parser.add_argument("--images", type=int, default=10, help="of each class")
    parser.add_argument("--of", type=int, default=100, help="classes that are drawn from, and unseen ones")
    parser.add_argument("--draws", type=int, default=3, help="of the known classes")
    parser.add_argument("--runs", type=int, default=1, help="draws that are whole runs, which show the cost")
    parser.add_argument("--out-runs", type=Path, required=True, help="folder for the runs and for drawn images")
    parser.add_argument("--out", type=Path, default=common.RESULTS, help="folder for the records")
    words = parser.parse_args()
    model = {"encoder": {"backbone": words.backbone, "weights": str(words.weights)}, "train": {"frozen": True}}
    encoder = make_encoder(recipes.check(model))
    for source in words.sets:
        found = open_data(source)
        folder = words.out_runs / found.name
        folder.mkdir(parents=True, exist_ok=True)
        known, unseen = lay_out(found, folder, words.images, words.of)
        record = common.about("auto_choice", "cpu") | {
            "set": found.name,
            "backbone": words.backbone,
            "weights": words.weights.name,
            "images of each class": words.images,
            "unseen classes": len(unseen),
            "known classes": {},
        }
        for draw in range(words.draws):
            for classes in words.classes:
                names = np.random.default_rng([draw, classes]).permutation(sorted(known))[:classes]
                table = folder / f"{classes}-{draw}.csv"
                write_table(table, {name: known[name] for name in sorted(names.tolist())}, unseen)
                settings, out = model | {"seed": draw}, folder / f"{classes}-{draw}"
                if draw < words.runs:
                    auto = chosen_in_run(table, settings, out, encoder)
                else:
                    auto = chosen_alone(table, settings, encoder)
                new = measured(table, settings, auto, encoder)
                entry = record["known classes"].setdefault(str(classes), {"draws": []})
                entry["draws"].append(new)
                entry["mean"] = summary(entry["draws"])
                common.write(words.out / f"auto-choice-{found.name}.json", record)
                share = f", {100 * new['share']:.0f} % of the run" if "share" in new else ""
                what = f"{new['chosen']}, regret {new['regret']}, best {new['best']}{share}"
                print(f"{found.name} {classes} classes: {what}", flush=True)


if __name__ == "__main__":
    main()
