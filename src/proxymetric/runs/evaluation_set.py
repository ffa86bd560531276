"""Which images a trained model is evaluated on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from proxymetric.arguments.signatures import one_of
from proxymetric.data import ImageSet, open_data, split
from proxymetric.data.splits import Split, altered
from proxymetric.models.load import is_refitted, is_run, load, read_run
from proxymetric.runs.protocol import CHOSEN_ON_TEST
from proxymetric.runs.score import EmbeddedSet
from proxymetric.system.watcher import Watcher

CHANGED = "has changed since the run was trained"
"""how a note says that the images are no longer those of the run"""
PARTS = ("auto", "all", "test", "validation", "train")


def evaluation_set(
    run: str | Path, data: str | Path | None = None, layout: str = "auto", part: str = "auto", which: str = "best"
) -> tuple[ImageSet, str]:
    """Open the images that a run is evaluated on.

    Args:
        run: folder of a run, or a slim file. A slim file does not record its training data.
        data: a source as for `open_data`; None means the data that the run was trained on.
        layout: layout of `data`, as for `open_data`.
        part: "all"; or the "test", "validation" or "train" classes of the run's split. "auto" means the classes that
            the run was not trained on; for data other than the run's, the test images if there are any, else all.
        which: the model, as for `load`.

    Returns:
        The images, and a note on which of their classes the model was trained on; the note may be empty.

    Raises:
        ValueError: the data has no such part, or a slim file is given without data.
    """
    one_of("split", part, PARTS)
    if not is_run(run):
        if data is None or part not in ("auto", "all"):
            raise ValueError(
                f"run: got {run}, a slim file or a shared model, which does not record the data of its training; "
                "expected --data, without --split or with --split all"
            )
        return _test_images(open_data(data, layout), part)
    description = read_run(run)
    options = description["recipe"]["data"]
    is_own = data is None or str(data) == options["path"]
    if data is None:
        data, layout = options["path"], options["layout"]
    images = open_data(data, layout)
    same_data, changed = images.identity() == description["data"]["identity"], ""
    if is_own and not same_data:
        changed = f"; {images.name} {CHANGED}"
        same_data = _has_the_classes_of(description, images)
        if not same_data and part not in ("auto", "all"):
            raise ValueError(
                f"split: got {part!r}, but the classes of {images.name} have changed since the run was trained, and "
                "which of them are held out is no longer known; expected --split all"
            )
    if part == "all" or (part == "auto" and not same_data):
        if same_data:
            return images, f"some of them trained on{changed}"
        chosen, words = _test_images(images, part)
        return chosen, f"{words}{changed}" if words else changed.removeprefix("; ")
    validation = options["validation"] if same_data else 0.0
    parts = split(images, validation, options["test"], description["recipe"]["seed"])
    chosen, words = _part(run, description, images, parts, part, which, same_data)
    return chosen, f"{words}{changed}"


def _has_the_classes_of(description: dict[str, Any], images: ImageSet) -> bool:
    """Whether the run's own data, some images of which changed, still has the training classes of the run."""
    options = description["recipe"]["data"]
    try:
        training = split(images, options["validation"], options["test"], description["recipe"]["seed"]).train
    except ValueError:
        return False
    return set(training.classes) == set(description["classes"])


def _part(
    run: str | Path, description: dict[str, Any], images: ImageSet, parts: Split, part: str, which: str, same_data: bool
) -> tuple[ImageSet, str]:
    """The part of data that is divided as for the run, and a note; see `evaluation_set`."""
    refitted = is_refitted(run, which)
    if part == "auto":
        if parts.test is not None:
            part = "test"
        elif parts.validation is not None and not refitted:
            part = "validation"
        else:
            return images, "all of them trained on"
    chosen: ImageSet | None = getattr(parts, part)
    if chosen is None:
        raise ValueError(f"split: got {part!r}, but {images.name} has no {part} classes; expected --split all")
    if not same_data:
        return chosen, ""
    if part == "train":
        return _altered(chosen, description), "all of them trained on"
    if part == "test" and description["recipe"].get("protocol") == "papers":
        return chosen, f"none of them trained on, but the {CHOSEN_ON_TEST}"
    known = known_classes(chosen, parts.train)
    if part == "validation" and refitted:
        return chosen, "all of them trained on"
    if known:
        return chosen, f"images not trained on; {known} of their {len(chosen.classes)} classes are training classes"
    chose_epoch = part == "validation" and which != "last"
    return chosen, "none of them trained on, but they chose the epoch" if chose_epoch else "none of them trained on"


def class_notes(run: str | Path, images: ImageSet, trained_on: Sequence[str]) -> list[str]:
    """Say how many classes have the name of a class that the run was trained on, or that chose its epoch.

    Args:
        run: folder of a run, or a slim file.
        images: the data that is evaluated; not the data of the run.
        trained_on: names of the classes that the model was trained on.

    Returns:
        Sentences; an empty list if no class has such a name.
    """
    training_names = set(trained_on)
    present = {images.classes[label] for label in np.unique(images.labels)}
    held_out: set[str] = set()
    if is_run(run):
        held_out = _held_out(read_run(run)) if present - training_names else set()
    notes = []
    if present & training_names:
        notes.append(
            f"{len(present & training_names)} of these {len(present)} classes were trained on (same names): the scores "
            "are not those of new classes"
        )
    if choosing := (present - training_names) & held_out:
        notes.append(f"{len(choosing)} of these {len(present)} classes chose the epoch (same names)")
    return notes


def _held_out(description: dict[str, Any]) -> set[str]:
    """Names of the classes that chose the epoch of a run; empty if the data of the run cannot be opened."""
    options = description["recipe"]["data"]
    try:
        images = open_data(options["path"], options["layout"])
        validation = split(images, options["validation"], options["test"], description["recipe"]["seed"]).validation
    except (OSError, ValueError):
        return set()
    return set() if validation is None else set(validation.classes)


def _test_images(images: ImageSet, part: str) -> tuple[ImageSet, str]:
    """The test images of data that is already split, else its validation images, else all images; and a note."""
    mask = images.test_images if images.test_images is not None else images.validation_images
    if part == "all" or mask is None:
        return images, ""
    chosen = images.subset(mask)
    kind = "test" if images.test_images is not None else "validation"
    return chosen.of_classes(np.unique(chosen.labels)), f"its {kind} images; --split all scores all of them"


def known_classes(images: ImageSet, training: ImageSet) -> int:
    """The number of classes of `images` that have the name of a training class.

    Example:
        >>> grey = np.zeros((2, 8, 8), np.uint8)
        >>> pair = [ImageSet("dots", np.arange(2), names, arrays=grey) for names in (["a", "b"], ["b", "c"])]
        >>> known_classes(*pair)
        1
    """
    return len(set(images.classes) & set(training.classes))


def seen_set(run: str | Path) -> ImageSet:
    """The images that a run's model was trained on; for a refitted model, those of all classes but the test classes."""
    description = read_run(run)
    options = description["recipe"]["data"]
    validation = 0.0 if is_refitted(run) else options["validation"]
    images = open_data(options["path"], options["layout"])
    return _altered(split(images, validation, options["test"], description["recipe"]["seed"]).train, description)


def _altered(training: ImageSet, description: dict[str, Any]) -> ImageSet:
    """The training images as the run saw them: a part of them, or some with wrong labels."""
    recipe = description["recipe"]
    options = recipe["data"]
    return altered(training, options.get("fraction", 1.0), options.get("wrong_labels", 0.0), recipe["seed"])


def unseen_vectors(run: str | Path, watcher: Watcher, part: str = "test", which: str = "best") -> EmbeddedSet:
    """Embed the test (or validation) images of a run with its model; images that cannot be read are left out."""
    images, note = evaluation_set(run, part=part, which=which)
    if CHANGED in note:
        watcher.say(note.rpartition("; ")[2])
    vectors, indices = load(run, which).embed(
        images, errors="skip", progress=lambda done, total: watcher.work("embedding", done, total)
    )
    return EmbeddedSet(images, vectors, np.asarray(indices, dtype=np.int64))
