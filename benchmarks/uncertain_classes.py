"""Measures "none of these" with a run that knows its uncertainty (VCPA): the rate asked and got, with and without it.

    python benchmarks/uncertain_classes.py               CPU, a minute for each seed

Drawn characters, in folders: VCPA trains a small network from scratch on some of them, and others are held out. The
verbs `index`, `index add-class` and `search --identify` are run as a person would run them, and what they say is
recorded. Then the index has half of the images of the training classes, and of some new classes, which have no
uncertainty. Asked about are the other images of these classes, and all images of classes that nobody has seen. Images
of training classes are images that the network was trained on, so their rates are optimistic. Results go to
results/uncertain-classes.json.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch

import proxymetric as pm
from proxymetric.data import glyphs
from proxymetric.search import Identifier, Index
from proxymetric.search.run_knowledge import run_knowledge, write_knowledge

CHARACTERS, TRAINING, NEW = 120, 60, 20
"""characters; of these, classes to train on and to hold out; new classes that are added to the index"""
RATES = (0.1, 0.01)
SHOWN = 3
"""images of each kind that `search --identify` is asked about on the command line"""


def write_images(folder: Path) -> list[list[Path]]:
    """Write the characters as PNG files: `known` to train on, `others` of new and unknown classes; files by class."""
    images = glyphs(CHARACTERS)
    files: list[list[Path]] = [[] for _ in range(CHARACTERS)]
    for index in range(len(images)):
        label = images.label_of(index)
        place = folder / ("known" if label < TRAINING else "others") / f"c{label:03}"
        place.mkdir(parents=True, exist_ok=True)
        files[label].append(place / f"{len(files[label]):02}.png")
        images.read(index).save(files[label][-1])
    return files


def said(*words: object) -> list[str]:
    """What a verb prints, line by line, without the places of files."""
    done = subprocess.run([sys.executable, "-m", "proxymetric", *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout.splitlines()


def by_hand(run: Path, files: list[list[Path]], folder: Path) -> dict[str, list[str]]:
    """Run the verbs on the images, and return what they say."""
    index, new, unknown = folder / "hand.index", files[TRAINING], files[-1]
    trained = [c for c in range(TRAINING) if f"c{c:03}" in set(run_knowledge(run).trained)]
    asked = [files[trained[0]][0], *new[10 : 10 + SHOWN], *unknown[:SHOWN]]
    return {
        name: [line.replace(f"{folder}/", "") for line in said(*words)]
        for name, words in {
            "index": ("index", run, folder / "known", "--out", index, "--map", "none"),
            "add-class": ("index", "add-class", index, "a new class", *new[:10]),
            "identify": ("search", "--identify", index, *asked, "--far", 0.1),
        }.items()
    }


def rates(run: Path, files: list[list[Path]], folder: Path) -> dict[str, Any]:
    """The rates with and without the uncertainty of the run."""
    model, knowledge = pm.load(run, device="cpu"), run_knowledge(run)
    vectors = model.embed([file for of_class in files for file in of_class])
    labels = np.repeat(np.arange(CHARACTERS), [len(of_class) for of_class in files])
    names = np.array([f"c{label:03}" for label in labels])
    is_even = np.arange(len(labels)) % 2 == 0
    trained = np.isin(names, knowledge.trained)
    added = (labels >= TRAINING) & (labels < TRAINING + NEW)
    rows = np.flatnonzero((trained | added) & is_even)
    index = Index.create(folder / "rates.index", model.dim, model, map="none")
    index.add([f"{row:05}" for row in rows], vectors[rows], labels=names[rows].tolist())
    plain = folder / "without"
    plain.mkdir()
    write_knowledge(plain, knowledge._replace(uncertainty={}))
    asked = {
        "unknown classes, accepted": labels >= TRAINING + NEW,
        "training classes, named rightly": trained & ~is_even,
        "new classes, named rightly": added & ~is_even,
    }
    found: dict[str, Any] = {}
    for way, place in (("with uncertainty", run), ("without", plain)):
        identifier = Identifier(index, run=place)
        for far in RATES:
            shares = {}
            for name, mask in asked.items():
                answers = identifier(vectors[torch.from_numpy(np.flatnonzero(mask))], far)
                right = [a.label is not None and (mask is asked["unknown classes, accepted"] or a.label == n)
                         for a, n in zip(answers, names[mask], strict=True)]  # fmt: skip
                shares[name] = round(float(np.mean(right)), 4)
            found.setdefault(way, {})[f"{far:g}"] = shares
        if way == "with uncertainty":
            found["offsets, lowest and highest"] = [round(float(v), 4) for v in identifier.offsets.aminmax()]
            found["note"] = identifier.note
    return found


def measure(seed: int, epochs: int, with_verbs: bool) -> dict[str, Any]:
    """Train a run, and measure it."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        files = write_images(folder)
        settings = {"train.warmup": 0, "train.lr": 1e-3, "train.batch": 40, "train.device": "cpu", "data.workers": 0,
                    "data.validation": 0.25, "encoder.backbone": "small", "train.epochs": epochs}  # fmt: skip
        done = pm.train(folder / "known", method="vcpa", out=folder / "run", seed=seed, settings=settings, report=False)
        record: dict[str, Any] = {"seed": seed, "scores": done.result.scores, "uncertainty": done.result.uncertainty}
        record |= rates(folder / "run", files, folder)
        if with_verbs:
            record["said"] = by_hand(folder / "run", files, folder)
        return record


def main() -> None:
    """Measure some seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--out", type=Path, default=common.RESULTS / "uncertain-classes.json")
    options = parser.parse_args()
    record = common.about("uncertain-classes", "cpu") | {"epochs": options.epochs, "runs": []}
    for seed in range(options.seeds):
        record["runs"].append(measure(seed, options.epochs, with_verbs=seed == 0))
        print(record["runs"][-1])
        common.write(options.out, record)


if __name__ == "__main__":
    main()
