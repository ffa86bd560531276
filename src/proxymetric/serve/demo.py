"""The index of a demo: its held-out images as files, so that they can be searched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from proxymetric.data import open_data
from proxymetric.models.load import load
from proxymetric.search import Index
from proxymetric.search.manifest import is_index
from proxymetric.system.files import read_json


def index_demo(run: Path, device: str | None = None, progress: Callable[[int, int], None] | None = None) -> Index:
    """Write the images that a demo was not trained on as files, and index them.

    Args:
        run: folder of the demo's run; the files lie in its folder `search`.
        device: where the model computes.
        progress: called with the number of images that are embedded and the number that are to be embedded.

    Returns:
        The index.
    """
    images = open_data(read_json(run / "run.json")["said"]["data"]["path"])
    if images.test_classes:
        images = images.of_classes(images.test_classes)
    folder, target = run / "search" / "images", run / "search" / "demo.index"
    for number in range(len(images)):
        name = images.classes[images.label_of(number)]
        file = folder / name.replace("/", "slash") / f"{number:05d}.png"
        if not file.is_file():
            file.parent.mkdir(parents=True, exist_ok=True)
            images.read(number).save(file)
    model = load(run, device=device)
    # The demo was trained again: what was added to the index of the earlier one cannot be embedded by this model.
    is_other = is_index(target) and Index(target).model != model.fingerprint()
    return Index.build(target, folder, model, rebuild=is_other, drop_added=is_other, progress=progress)
