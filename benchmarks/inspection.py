"""How much of what is wrong with a data set `proxymetric inspect` finds, at the default length of its lists.

    python benchmarks/inspection.py cub --data CUB_200_2011 --weights vit.safetensors --work runs/inspection
    python benchmarks/inspection.py cars --data cars196/images --backbone small --size 64 --work runs/inspection

`cub` takes the training half of CUB-200-2011, changes 5 % of the labels to another class at random, and adds copies of
1 % of the images: compressed as JPEG with a random quality, a third of them scaled and a third cut by up to 5 % a side;
half of the copies get another label. It counts precision and recall of the lists for several seeds, with the vectors of
the untrained backbone and, for `--trained-seeds`, with those of a head that was trained on the wrong labels. CUB has
copies and wrong labels of its own; a wrong label of CUB that is found counts as a mistake here. The list of lonely
images is tested with photographs of another set (`--foreign`, a folder), put in one at a time.

`cars` counts the equal images of Cars196 (training and test half together) that have two labels. Copies are found by
the vectors of any network, also by those of a small one that was never trained.
Results are written to results/inspection-cpu.json after each seed; --work keeps the features.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from common import RESULTS, about, write
from PIL import Image

from proxymetric.core.normalisation import unit
from proxymetric.data import EvalView, ImageSet, open_data, read_image
from proxymetric.encoders import build
from proxymetric.encoders.encoder import Encoder
from proxymetric.features.cache import cached_features
from proxymetric.inspection import Inspection, find_duplicates, inspect, nearest_images, picture_of_rows
from proxymetric.inspection.contents import Contents, digest_of
from proxymetric.inspection.lonely import chauvenet_limit
from proxymetric.inspection.pixels import grey_copy
from proxymetric.inspection.report import examine
from proxymetric.models.features import FeatureModel
from proxymetric.models.load import load

FILE = RESULTS / "inspection-cpu.json"
CHANGED, COPIED = 0.05, 0.01
"""the share of labels that are changed, and of images that are copied"""
MAX_CUT, SCALES, QUALITIES = 0.05, (0.5, 1.5), (30, 96)
KINDS = ("compressed", "scaled", "cut")


class Damaged(NamedTuple):
    """A set with faults that are known.

    Attributes:
        images: the set, the copies at its end.
        right_labels: (N,) the labels before they were changed.
        sources: (N,) the image that each image shows: itself, or the source of a copy.
    """

    images: ImageSet
    right_labels: np.ndarray
    sources: np.ndarray


def damaged(images: ImageSet, folder: Path, seed: int) -> Damaged:
    """Change labels and add copies; the copies are written into `folder`."""
    random = np.random.default_rng(seed)
    count, classes = len(images), len(images.classes)
    labels = images.labels.copy()
    changed = random.choice(count, round(CHANGED * count), replace=False)
    labels[changed] = (labels[changed] + random.integers(1, classes, len(changed))) % classes
    sources = random.choice(count, round(COPIED * count), replace=False)
    folder.mkdir(parents=True, exist_ok=True)
    paths, copy_labels = [], []
    for number, source in enumerate(sources.tolist()):
        content = copied(images.read(source), KINDS[number % len(KINDS)], random)
        path = folder / f"{number:04d}-{KINDS[number % len(KINDS)]}.jpg"
        if not path.is_file() or path.read_bytes() != content:  # the same file again would be embedded again
            path.write_bytes(content)
        paths.append(path)
        shift = int(random.integers(1, classes)) if number % 2 else 0
        copy_labels.append((images.labels[source] + shift) % classes)
    assert images.paths is not None
    return Damaged(
        ImageSet(images.name, np.append(labels, copy_labels), images.classes, paths=[*images.paths, *paths]),
        np.append(images.labels, images.labels[sources]),
        np.append(np.arange(count), sources),
    )


def copied(image: Image.Image, kind: str, random: np.random.Generator) -> bytes:
    """A copy of an image as JPEG."""
    width, height = image.size
    if kind == "scaled":
        scale = random.uniform(*SCALES)
        image = image.resize((round(width * scale), round(height * scale)), Image.Resampling.BICUBIC)
    elif kind == "cut":
        left, top, right, bottom = random.uniform(0, MAX_CUT, 4)
        image = image.crop((round(left * width), round(top * height), round(width - right * width),
                            round(height - bottom * height)))  # fmt: skip
    buffer = io.BytesIO()
    image.save(buffer, "jpeg", quality=int(random.integers(*QUALITIES)))
    return buffer.getvalue()


class Base:
    """The features and grey copies of image files, made once."""

    def __init__(self, encoder: Encoder, size: int, batch: int) -> None:
        self.encoder, self.view, self.batch = encoder, EvalView(size), batch
        self._copies: dict[Path, np.ndarray] = {}

    def features(self, images: ImageSet) -> torch.Tensor:
        found = cached_features(self.encoder, images, self.view, batch=self.batch, progress=_progress())
        assert not found.bad, found.bad
        return found.vectors

    def contents(self, images: ImageSet, vectors: torch.Tensor) -> Contents:
        assert images.paths is not None
        for path in images.paths:
            if path not in self._copies:
                self._copies[path] = grey_copy(read_image(path))
        copies = torch.from_numpy(np.stack([self._copies[path] for path in images.paths]))
        digests = [digest_of(images, index) for index in range(len(images))]
        return Contents(images, np.arange(len(images)), digests, unit(vectors), copies, {})

    def forget(self, folder: Path) -> None:
        """Forget the grey copies of the files in a folder."""
        self._copies = {path: copy for path, copy in self._copies.items() if folder not in path.parents}


def _progress() -> Any:
    last = [time.monotonic()]

    def report(done: int, total: int) -> None:
        if time.monotonic() - last[0] > 30:
            last[0] = time.monotonic()
            print(f"features: {done} of {total}", flush=True)

    return report


def scores(found: Inspection, truth: Damaged, pictures: np.ndarray) -> dict[str, Any]:
    """Compare the lists with what is known.

    Args:
        found: the inspection of the damaged set.
        truth: the damaged set.
        pictures: (n,) the picture that each image of the undamaged set shows: CUB has copies of its own.
    """
    wrong = truth.images.labels != truth.right_labels
    listed = np.array([each.row for each in found.wrong_labels.listed], dtype=np.int64)
    suggestions = np.array([each.suggestion for each in found.wrong_labels.listed], dtype=np.int64)
    hits = wrong[listed]
    shown = pictures[truth.sources]
    pairs = [(a, b) for group in found.duplicates for n, a in enumerate(group.rows) for b in group.rows[n + 1 :]]
    group_of = {row: number for number, group in enumerate(found.duplicates) for row in group.rows}
    planted = [(int(source), row) for row, source in enumerate(truth.sources) if source != row]
    together = [source in group_of and group_of[source] == group_of.get(row) for source, row in planted]
    kinds = [truth.images.paths[row].stem.split("-")[1] for _, row in planted] if truth.images.paths else []
    right_pairs = sum(int(shown[a] == shown[b]) for a, b in pairs)
    return {
        "wrong labels": {
            "put in": int(wrong.sum()),
            "listed": len(listed),
            "right": int(hits.sum()),
            "precision": float(hits.mean()) if len(listed) else 1.0,
            "recall": float(hits.sum() / max(1, wrong.sum())),
            "right suggestions among the right ones": float(
                (suggestions == truth.right_labels[listed])[hits].mean() if hits.any() else 1.0
            ),
            "estimated share": found.wrong_labels.share,
        },
        "duplicates": {
            "put in": len(planted),
            "pairs listed": len(pairs),
            "pairs that are the same picture": right_pairs,
            "precision": right_pairs / max(1, len(pairs)),
            "recall": float(np.mean(together)),
            "recall by kind": {
                kind: float(np.mean([hit for hit, each in zip(together, kinds) if each == kind])) for kind in KINDS
            },
        },
        "lonely": {"listed": len(found.lonely.listed), "limit": found.lonely.limit},
    }


def train_head(truth: Damaged, folder: Path, options: argparse.Namespace, seed: int) -> FeatureModel:
    """Train a head on the damaged set with the labels as they are, and return its encoder."""
    import proxymetric as pm

    folder.mkdir(parents=True, exist_ok=True)
    assert truth.images.paths is not None
    with (folder / "labels.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("file", "class"))
        rows = zip(truth.images.paths, truth.images.labels.tolist())
        writer.writerows((path.resolve(), truth.images.classes[label]) for path, label in rows)
    pm.train(
        folder / "labels.csv", method="proxy-anchor", backbone=options.backbone, weights=options.weights,
        size=options.size, frozen=True, epochs=options.epochs, seed=seed, out=folder / "run", overwrite=True,
        report=False, settings={"data.validation": 0.0},
    )  # fmt: skip
    return FeatureModel.of(load(folder / "run", "last"))


def foreign_images(base: Base, folder: Path, own: torch.Tensor, count: int) -> dict[str, Any]:
    """How many photographs of another set are lonely, if each is put into the set alone."""
    images = open_data(folder)
    rows = np.sort(np.random.default_rng(0).choice(len(images), count, replace=False))
    strangers = unit(base.features(images.subset(rows)))
    own = unit(own)
    products = own @ own.T
    nearest = products.fill_diagonal_(-2.0).amax(dim=1)
    of_strangers = (strangers @ own.T).amax(dim=1)
    limits = [chauvenet_limit(torch.cat([nearest, each[None]])) for each in of_strangers]
    lonely = sum(bool(each < limit) for each, limit in zip(of_strangers, limits))
    return {"from": images.name, "put in, one at a time": count, "lonely": lonely, "recall": lonely / count}


def measure_cub(options: argparse.Namespace, record: dict[str, Any]) -> None:
    images = open_data(options.data, options.layout)
    half = images.of_classes([c for c in range(len(images.classes)) if c not in images.test_classes])
    encoder = build(options.backbone, weights=options.weights, size=options.size)
    base = Base(encoder, options.size, options.batch)
    features = base.features(half)
    clean = examine(base.contents(half, features))
    pictures = picture_of_rows(len(half), clean.duplicates).numpy()
    part: dict[str, Any] = {
        **about("inspection", "cpu"),
        "images": len(half),
        "classes": len(half.classes),
        "backbone": options.backbone,
        "weights": Path(options.weights).name if options.weights else None,
        "size": options.size,
        "labels changed": CHANGED,
        "copies put in": COPIED,
        "untouched": {
            "wrong labels listed": len(clean.wrong_labels.listed),
            "estimated share": clean.wrong_labels.share,
            "groups of duplicates": [[half.title(row).rpartition("/")[2] for row in g.rows] for g in clean.duplicates],
            "lonely listed": len(clean.lonely.listed),
        },
        "untrained": {},
        "trained on the wrong labels": {},
    }
    record["cub"] = part
    if options.foreign is not None:
        part["foreign"] = foreign_images(base, options.foreign, features, options.foreign_count)
    save(record)
    for seed in range(options.seeds):
        folder = options.work / f"copies-{seed}"
        truth = damaged(half, folder, seed)
        vectors = base.features(truth.images)
        contents = base.contents(truth.images, vectors)
        part["untrained"][seed] = scores(examine(contents), truth, pictures)
        print(seed, json.dumps(part["untrained"][seed]["wrong labels"]), flush=True)
        if seed < options.trained_seeds:
            head = train_head(truth, options.work / f"trained-{seed}", options, seed)
            trained = contents._replace(vectors=unit(head.vectors(vectors)))
            part["trained on the wrong labels"][seed] = scores(examine(trained), truth, pictures)
            print(seed, json.dumps(part["trained on the wrong labels"][seed]["wrong labels"]), flush=True)
        base.forget(folder)
        save(record)


def measure_cars(options: argparse.Namespace, record: dict[str, Any]) -> None:
    images = open_data(options.data, options.layout)
    torch.manual_seed(0)
    encoder = build(options.backbone, weights=options.weights, size=options.size)
    model = FeatureModel(encoder, normalise="l2", classes=[], view={"size": options.size})
    started = time.monotonic()
    found = inspect(model, images, out=options.work / "cars")
    seconds = time.monotonic() - started
    contents = found.contents
    labels = torch.from_numpy(images.labels[contents.kept])
    expected = equal_pairs(contents.digests, labels)
    # The same search without looking at bytes: each file counts as different, so that pixels must find the pairs.
    names = [str(row) for row in range(len(labels))]
    nearest = nearest_images(contents.vectors, names)
    by_pixels = find_duplicates(contents.vectors, contents.copies, names, labels, nearest)
    two_labels = {pair for pair in expected if labels[pair[0]] != labels[pair[1]]}
    record["cars"] = {
        **about("inspection", "cpu"),
        "images": len(images),
        "classes": len(images.classes),
        "backbone": options.backbone,
        "weights": Path(options.weights).name if options.weights else None,
        "size": options.size,
        "seconds, with what was embedded before": round(seconds, 1),
        "pairs of equal files with two labels": len(two_labels),
        "of these found": len(two_labels & in_groups(found.duplicates, two_only=True)),
        "of these found by pixels alone": len(two_labels & in_groups(by_pixels, two_only=True)),
        "pairs of equal files with one label": len(expected) - len(two_labels),
        "groups": len(found.duplicates),
        "groups with two labels": sum(group.two_labels for group in found.duplicates),
        "groups with two labels without equal files": [
            [images.title(int(contents.kept[row])).rpartition("/")[2] for row in group.rows]
            for group in found.duplicates
            if group.two_labels and all(pair.kind != "same file" for pair in group.copies)
        ],
    }
    save(record)
    print(json.dumps({key: value for key, value in record["cars"].items() if key not in ("machine",)}, indent=1))


def equal_pairs(digests: Sequence[str], labels: torch.Tensor) -> set[tuple[int, int]]:
    """All pairs of equal files."""
    rows: dict[str, list[int]] = {}
    for row, digest in enumerate(digests):
        rows.setdefault(digest, []).append(row)
    return {(a, b) for each in rows.values() for n, a in enumerate(each) for b in each[n + 1 :]}


def in_groups(groups: Sequence[Any], two_only: bool) -> set[tuple[int, int]]:
    """All pairs of images in one group."""
    return {
        (a, b)
        for group in groups
        if group.two_labels or not two_only
        for n, a in enumerate(group.rows)
        for b in group.rows[n + 1 :]
    }


def save(record: dict[str, Any]) -> None:
    """Write a part of the record; the other part stays as it is on disk."""
    write(FILE, (json.loads(FILE.read_text()) if FILE.is_file() else {"benchmark": "inspection"}) | record)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cub", "cars"))
    parser.add_argument("--data", required=True)
    parser.add_argument("--layout", default="auto")
    parser.add_argument("--backbone", default="vit_small_patch16_224")
    parser.add_argument("--weights", help="weights of the backbone; none for `small`")
    parser.add_argument("--size", type=int, default=160)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--trained-seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--foreign", type=Path)
    parser.add_argument("--foreign-count", type=int, default=100)
    parser.add_argument("--work", type=Path, required=True)
    options = parser.parse_args()
    (measure_cub if options.what == "cub" else measure_cars)(options, {})


if __name__ == "__main__":
    main()
