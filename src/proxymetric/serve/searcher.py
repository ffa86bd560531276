"""What the service computes: the vectors of a batch of images, and what is similar to them."""

from __future__ import annotations

import asyncio
import functools
import os
import sqlite3
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from proxymetric.data.image_bytes import decode_image
from proxymetric.models.hub_client import is_address
from proxymetric.models.load import is_run, load
from proxymetric.models.model import Model
from proxymetric.models.proxies import RunProxies, load_proxies
from proxymetric.search import Answer, Hit, Index
from proxymetric.search.manifest import FILE

LOOK_SECONDS = 1.0
"""time between two looks at the index, which may have changed on disk"""


class Question(NamedTuple):
    """A search: pixels from `Searcher.pixels`, or the id of an item."""

    pixels: Tensor | None
    item: str | None
    k: int
    where: tuple[tuple[str, str], ...]
    far: float | None = None
    """the false-accept rate of a question for the class; None: a search"""


class UnknownItem(ValueError):
    """There is no item of this id."""


class Found(NamedTuple):
    """The results of a search, and the number of the state of the index that they belong to."""

    hits: list[Hit]
    generation: int
    answer: Answer | None = None
    """which class it is, where this was asked"""


class Searcher:
    """A model and an index; the index is opened again when it changes on disk.

    Args:
        folder: the folder of the index.
        run: the run that made it; None: as the index says.
        device: where the model computes.
        max_pixels: limit on the pixels of an image.

    Raises:
        ValueError: the index or the model cannot be opened, or the model did not make the index.
    """

    def __init__(self, folder: str, run: str | None, device: str | None, max_pixels: int) -> None:
        self.index = Index(folder)
        self.model = model_of(self.index, run, device)
        self.max_pixels = max_pixels
        self._fingerprint = self.model.fingerprint()
        self._seen = self._stamp()
        self._run = run

    @functools.cached_property
    def proxies(self) -> RunProxies | None:
        """The proxies of the run; None if it has none, or none that can be read."""
        try:
            run = run_of(self.index, self._run)
            return load_proxies(run, self.index.dim, which_of(self.index, run))
        except ValueError:
            return None

    def pixels(self, content: bytes) -> Tensor:
        """Decode an uploaded image and cut it as the model needs it.

        Raises:
            BadImage: it cannot be read.
        """
        return self.model.view(decode_image(content, self.max_pixels))

    def answer(self, questions: list[Question]) -> list[Found | Exception]:
        """Answer a batch of questions with one pass of the model, and one search for those with equal conditions."""
        index = self.index
        vectors: list[Tensor | None] = [None] * len(questions)
        answers: list[Found | Exception | None] = [None] * len(questions)
        images = [row for row, question in enumerate(questions) if question.pixels is not None]
        if images:
            pixels = torch.stack([question.pixels for question in questions if question.pixels is not None])
            for row, vector in zip(images, self.model.embed(pixels), strict=True):
                vectors[row] = vector
        for row, question in enumerate(questions):
            if question.item is not None:
                try:
                    vectors[row] = index.vector(question.item)
                except KeyError:
                    answers[row] = UnknownItem(f"id: got {question.item!r}, expected the id of an item of the index")
        groups: dict[tuple[tuple[str, str], ...], list[int]] = {}
        for row, question in enumerate(questions):
            if (vector := vectors[row]) is not None and question.far is not None:
                try:
                    answer = index.identify(vector[None], question.far)[0]
                    answers[row] = Found([], index.manifest.generation, answer)
                except ValueError as error:  # too few classes
                    answers[row] = error
            elif answers[row] is None:
                groups.setdefault(question.where, []).append(row)
        for where, rows in groups.items():
            queries = torch.stack([vector for row in rows if (vector := vectors[row]) is not None])
            try:
                found = index.search(
                    queries, max(questions[row].k for row in rows), dict(where), [questions[row].item for row in rows]
                )
            except ValueError as error:  # an unknown column
                for row in rows:
                    answers[row] = error
                continue
            for row, hits in zip(rows, found, strict=True):
                answers[row] = Found(hits[: questions[row].k], index.manifest.generation)
        return [answer for answer in answers if answer is not None]

    async def keep_up(self) -> None:
        """Look at the index again and again, and open it in a thread when it has changed; ends when it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await asyncio.to_thread(self._look)

    def _look(self) -> None:
        """Open the index again if it has changed; a state of another model is not opened."""
        stamp = self._stamp()
        if stamp == self._seen:
            return
        try:
            self.index = Index(self.index.folder, self._fingerprint)
        except (ValueError, OSError, sqlite3.Error):
            return  # it is being replaced, or another model made it: the state that is open stays
        self._seen = stamp

    def _stamp(self) -> tuple[int, int]:
        try:
            status = os.stat(self.index.folder / FILE)
        except OSError:
            return (0, 0)
        return status.st_mtime_ns, status.st_ino


def model_of(index: Index, run: str | Path | None, device: str | None) -> Model:
    """Load the model that made the vectors of an index.

    Args:
        index: the index.
        run: the run; None: as the index says.
        device: where the model computes.

    Raises:
        ValueError: the run is unknown or missing, or it is not the one that made the index.
    """
    place = run_of(index, run)
    weights = index.manifest.run.get("weights") if Path(place).is_file() else None
    model = load(place, which_of(index, place), device, weights)
    if index.dim < model.dim:
        model = model.cut_to(index.dim, warn=False)
    index.check_model(model)
    return model


def run_of(index: Index, run: str | Path | None) -> str | Path:
    """Return where the run that made an index is: a path, or an address on the hub.

    Args:
        index: the index.
        run: the run; None: as the index says.

    Raises:
        ValueError: the run is unknown or missing.
    """
    source = index.manifest.run
    if run is None and not source.get("run"):
        raise ValueError(f"--run: got none, and {index.folder} does not say which run made it; expected a run")
    place = source["run"] if run is None else run
    if not is_address(place) and not Path(place).exists():
        raise ValueError(f"--run: {place}, which made {index.folder}, is missing; expected its new place with --run")
    return place


def which_of(index: Index, run: str | Path) -> str:
    """Return which model of a run made an index; a slim file and a shared model hold a single one."""
    return index.manifest.run.get("which", "best") if is_run(run) else "best"
