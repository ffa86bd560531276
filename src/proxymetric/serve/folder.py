"""A folder of images becomes an index that can be served, with or without a trained run."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path

from proxymetric.data.splits import MIN_CLASSES
from proxymetric.models.load import load, load_model
from proxymetric.models.model import Model
from proxymetric.models.place import Pretrained, RunFolder, place_of
from proxymetric.models.pretrained import pretrained_place
from proxymetric.search import Index
from proxymetric.search.manifest import Manifest, is_index
from proxymetric.system.text import visible

FEW_CLASSES = 20
"""classes below which a head that is trained on them often finds no more than the backbone alone"""
Say = Callable[[str], None]


def check_images(images: Path) -> None:
    """Refuse what holds a model where a folder of images is expected.

    Raises:
        ValueError: the folder is that of a run or of a shared model.
    """
    place = place_of(images)
    is_model = (images / "run.json").is_file() if isinstance(place, RunFolder) else images.is_dir()
    if is_model:
        raise ValueError(
            f"images: got {images}, which holds a model; expected a folder of images, or both: "
            f"`proxymetric index {shlex.quote(str(images))} IMAGES`"
        )


def model_of_words(
    run: str | None,
    target: Path,
    backbone: str | None = None,
    weights: Path | None = None,
    which: str = "best",
    device: str | None = None,
    say: Say | None = None,
) -> Model:
    """Load the model that a command names: a run; else the one that the index has; else a pre-trained backbone.

    Args:
        run: the place of a model; None: none is named.
        target: the index, which may not exist yet.
        backbone: the name of a pre-trained backbone; None: see `pretrained_place`.
        weights: a file with the weights of a backbone.
        which: which model of a run.
        device: where the model computes.
        say: called with a sentence about the model that is loaded.

    Raises:
        ValueError: names contradict each other, or the model cannot be loaded.
    """
    if run is not None:
        if backbone is not None:
            raise ValueError(f"--backbone: got {backbone} with the model {run}, expected one of them")
        return load_model(run, which, device, weights, say)
    if which != "best":
        raise ValueError(f"--which: got {which!r} without a RUN, expected it only with one")
    earlier = Manifest.read(target) if is_index(target) else None
    if earlier is None or not earlier.run.get("run") or backbone or weights:
        return load_model(pretrained_place(backbone, weights, device), "best", device, weights, say)
    place = place_of(earlier.run["run"])
    if not place.exists():
        raise ValueError(
            f"RUN: got none, and {place}, which made {target}, is missing; expected its new place: `proxymetric index "
            "RUN IMAGES`"
        )
    if say is not None:
        say(f"loading {place}, which made the index")
    return load(place, earlier.run.get("which", "best"), device, earlier.run.get("weights"))


def index_folder(
    images: Path,
    out: Path,
    backbone: str | None = None,
    weights: Path | None = None,
    device: str | None = None,
    *,
    say: Say | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Index:
    """Index a folder of images without a run, or bring its index up to date.

    Args:
        images: the folder; it needs no classes.
        out: the folder of the index.
        backbone: the pre-trained backbone of a new index; None: see `pretrained_place`.
        weights: a file with its weights; None: those of the model hub.
        device: where the model computes.
        say: called with a sentence about each stage of the work.
        progress: called with the number of images that are embedded and the number that are to be embedded.

    Returns:
        The index.

    Raises:
        ValueError: an argument is wrong, no image can be read, or the weights cannot be had.
    """
    tell = say or (lambda sentence: None)
    check_images(images)
    model = partial(model_of_words, None, out, backbone, weights, device=device, say=say)
    index = Index.build(out, images, model, say=tell, report=lambda line: None, progress=progress)
    if added := training_adds(index, images):
        tell(added)
    return index


def training_adds(index: Index, images: Path) -> str:
    """Say what training on the images of an index would add; empty if a trained model made it."""
    run = index.manifest.run
    place = place_of(run["run"]) if run.get("run") else None
    if not isinstance(place, Pretrained):
        return ""
    count = sum(number > 1 for number in index.classes.values())
    start = f"nothing was trained: similar is what {place.name} learnt to see in its pre-training"
    if count < MIN_CLASSES:
        return (
            f"{start}. Training learns what tells your classes apart; it needs {MIN_CLASSES} classes of two images or "
            f"more, a folder for each (here are {count}), and many more to gain much"
        )
    folder, out = shlex.quote(visible(str(images))), shlex.quote(f"runs/{visible(images.resolve().name)}")
    weights = f" --weights {shlex.quote(run['weights'])}" if run.get("weights") else ""
    doubt = f"; with fewer than {FEW_CLASSES} it often adds little, and says so" if count < FEW_CLASSES else ""
    return (
        f"{start}. Training learns what tells your {count} classes apart{doubt}:\n"
        f"  proxymetric train --data {folder} --frozen --backbone {place.name}{weights} --out {out}\n"
        f"  proxymetric index {out} {folder} --out {shlex.quote(visible(str(index.folder)))} --rebuild"
    )
