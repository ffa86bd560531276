"""Which images a trained model should be measured on."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from proxymetric.core.watcher import Watcher
from proxymetric.data import ImageSet, open_data, split
from proxymetric.models.load import described, is_refitted, load
from proxymetric.protocol import CHOSEN_ON_TEST

PARTS = ("auto", "all", "test", "validation", "train")


def evaluation_set(
    run: str | Path, data: str | Path | None = None, layout: str = "auto", part: str = "auto", which: str = "best"
) -> tuple[ImageSet, str]:
    """The images to measure a run on, and in words which classes those are.

    data: a source as for `open_data`; None: the data that the run was trained on. part: "all", or the "test",
    "validation" or "train" classes of the run's own split; "auto": of the data that the run was trained on, the classes
    it has not seen, and all classes of any other data. which: the model, as for `load`. A slim file knows of no data.
    """
    if part not in PARTS:
        raise ValueError(f"split: got {part!r}, expected one of {', '.join(PARTS)}")
    if Path(run).is_file():
        if data is None or part not in ("auto", "all"):
            raise ValueError(
                f"data: {run} does not say what it was trained on; expected --data, and all of its classes"
            )
        return open_data(data, layout), ""
    about = described(run)
    options = about["recipe"]["data"]
    if data is None:
        data, layout = options["path"], options["layout"]
    images = open_data(data, layout)
    own = images.identity() == about["data"]["identity"]
    if part == "all" or (part == "auto" and not own):
        return images, "some of them trained on" if own else ""
    parts = split(images, options["validation"] if own else 0.0, options["test"], about["recipe"]["seed"])
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
        raise ValueError(f"split: {images.name} has no {part} classes; expected --split all")
    seen = part == "train" or (part == "validation" and refitted)
    if own and part == "test" and about["recipe"].get("protocol") == "papers":
        return chosen, f"none of them trained on, but the {CHOSEN_ON_TEST}"
    return chosen, "all of them trained on" if own and seen else "none of them trained on" if own else ""


def seen_set(run: str | Path) -> ImageSet:
    """The images that a run's model was trained on, of all classes but the test's where it was refitted."""
    about = described(run)
    options = about["recipe"]["data"]
    validation = 0.0 if is_refitted(run) else options["validation"]
    images = open_data(options["path"], options["layout"])
    return split(images, validation, options["test"], about["recipe"]["seed"]).train


def unseen_vectors(run: str | Path, watcher: Watcher, part: str = "test") -> tuple[Tensor, ImageSet]:
    """What a run's model makes of its test (or validation) images: vectors (N, D), and the N images."""
    images, _ = evaluation_set(run, part=part)
    vectors, kept = load(run).embed(images, errors="skip", progress=lambda i, n: watcher.work("embedding", i, n))
    return vectors, images.subset(kept)
