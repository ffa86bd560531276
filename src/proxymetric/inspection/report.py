"""The inspection of a set of labelled images: what was found, as tables and in a folder."""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Iterator
from pathlib import Path

import torch

from proxymetric.data import ImageSet, open_data
from proxymetric.inspection.contents import Contents, Store, gather
from proxymetric.inspection.duplicates import find_duplicates, nearest_images, picture_of_rows
from proxymetric.inspection.findings import COLUMNS, MADE_BY, Findings
from proxymetric.inspection.lonely import find_lonely
from proxymetric.inspection.wrong_labels import LISTED_FROM, find_wrong_labels
from proxymetric.models.load import load
from proxymetric.models.model import Model
from proxymetric.system.files import read_json, replacing, write_json
from proxymetric.system.lock import locked
from proxymetric.system.watcher import Silent, Watcher

SUMMARY, PAGE, STORE = "inspection.json", "index.html", "vectors"
"""names in the folder of an inspection: the results, the page, and what is kept for the next inspection"""


class Inspection(Findings):
    """What was found in a set of labelled images, see `Findings`; it can be saved as tables and a page."""

    def save(self, folder: str | Path) -> Path:
        """Write four CSV files, `inspection.json` and the page `index.html`; each replaces an earlier file at once.

        Args:
            folder: the folder; it must be new, empty, or that of an earlier inspection.

        Returns:
            The page.

        Raises:
            ValueError: the folder holds something else.
        """
        from proxymetric.inspection.page import write_page

        folder = check_out(folder)
        for name, rows in self.tables().items():
            with (
                replacing(folder / f"{name}.csv") as temporary,
                temporary.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file,
            ):
                writer = csv.DictWriter(file, COLUMNS[name], lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
        write_page(folder / PAGE, self)
        write_json(folder / SUMMARY, self.summary())
        return folder / PAGE


def inspect(
    model: Model | str | Path,
    data: ImageSet | str | Path,
    *,
    out: str | Path | None = None,
    layout: str = "auto",
    listed_from: float = LISTED_FROM,
    watcher: Watcher | None = None,
) -> Inspection:
    """Inspect labelled images: find likely wrong labels, copies, lonely images and unreadable files.

    The lists are as long as the data asks for: labels that are more likely wrong than right, pictures that are the same
    after alignment, and images farther from all others than chance explains.

    Args:
        model: a model (`pm.load`), or the folder of a run or a slim file.
        data: the images, or a source as for `pm.open_data`.
        out: folder for the CSV files and the page. It also keeps the vectors: an inspection that was killed continues,
            and the next one embeds only new files. None: nothing is written.
        layout: layout of a source, as for `pm.open_data`.
        listed_from: the probability from which a label is listed as wrong.
        watcher: is told the progress.

    Returns:
        What was found.

    Raises:
        ValueError: an argument is wrong, or no image can be read.

    Example:
        >>> import numpy as np
        >>> import proxymetric as pm
        >>> from proxymetric.encoders import build
        >>> model = pm.Model(build("small", dim=8), normalise="l2", classes=[], view={"size": 16, "resize": 16})
        >>> pixels = np.random.default_rng(0).integers(0, 256, (6, 16, 16, 3), dtype=np.uint8)
        >>> pixels[5] = pixels[0]
        >>> images = ImageSet("noise", np.array([0, 0, 0, 1, 1, 1]), ["a", "b"], arrays=pixels)
        >>> inspection = pm.inspect(model, images)
        >>> [(group.rows, group.two_labels) for group in inspection.duplicates]
        [([0, 5], True)]
        >>> inspection.tables()["duplicates"][1]["match"]
        'same file'
    """
    if not 0 < listed_from < 1:
        raise ValueError(f"listed_from: got {listed_from}, expected a probability between 0 and 1")
    watcher = watcher or Silent()
    images = data if isinstance(data, ImageSet) else open_data(data, layout)
    with _folder(out) as folder:
        model = model if isinstance(model, Model) else load(model)
        store = Store(None if folder is None else folder / STORE, model.fingerprint())
        inspection = examine(gather(model, images, store, watcher), listed_from, watcher)
        if folder is not None:
            inspection.save(folder)
    return inspection


def examine(contents: Contents, listed_from: float = LISTED_FROM, watcher: Watcher | None = None) -> Inspection:
    """Make the lists from what is known of each image.

    Args:
        contents: the images.
        listed_from: the probability from which a label is listed as wrong.
        watcher: is told the progress.
    """
    watcher, steps = watcher or Silent(), 4
    labels = torch.from_numpy(contents.images.labels[contents.kept])
    watcher.work("comparing", 0, steps)
    nearest = nearest_images(contents.vectors, contents.digests)
    watcher.work("comparing", 1, steps)
    duplicates = find_duplicates(contents.vectors, contents.copies, contents.digests, labels, nearest)
    watcher.work("comparing", 2, steps)
    pictures = picture_of_rows(len(labels), duplicates)
    wrong_labels = find_wrong_labels(contents.vectors, labels, pictures, listed_from)
    watcher.work("comparing", 3, steps)
    lonely = find_lonely(contents.vectors, labels, pictures, nearest)
    watcher.work("comparing", steps, steps)
    return Inspection(contents, wrong_labels, duplicates, lonely)


def check_out(folder: str | Path) -> Path:
    """Refuse a folder that holds something other than an inspection.

    Raises:
        ValueError: the folder is a file, or holds other files.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"out: got {folder}, which is a file; expected a folder")
    if folder.is_dir() and any(file.name != ".lock" for file in folder.iterdir()):
        summary = folder / SUMMARY
        content = read_json(summary) if summary.is_file() else None
        if not isinstance(content, dict) or content.get("made_by") != MADE_BY:
            raise ValueError(
                f"out: got {folder}, which holds files that `{MADE_BY}` did not write; expected a new folder"
            )
    return folder


@contextlib.contextmanager
def _folder(out: str | Path | None) -> Iterator[Path | None]:
    """The folder of an inspection, marked as such and locked; None without one."""
    if out is None:
        yield None
        return
    folder = check_out(out)
    with locked(folder):
        if not (folder / SUMMARY).is_file():
            write_json(folder / SUMMARY, {"made_by": MADE_BY, "finished": False})
        yield folder
