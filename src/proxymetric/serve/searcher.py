"""What the service computes: the vectors of a batch of images, and what is similar to them."""

from __future__ import annotations

import asyncio
import copy
import logging
import sqlite3
import threading
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image as PillowImage
from torch import Tensor

from proxymetric.models.load import load
from proxymetric.models.model import Model
from proxymetric.models.place import Place, Pretrained, RunFolder, SlimFile, place_of
from proxymetric.models.proxies import RunProxies, load_proxies
from proxymetric.search import Answer, Hit, Index
from proxymetric.search.questions import mean_query
from proxymetric.search.searching import SearchQuestion

LOOK_SECONDS = 0.25
"""time between two looks at the index, which may have changed on disk"""
RETRY_SECONDS = 30.0
"""time between two attempts to load the model of a new state, if the first one failed"""
STALE = "the index has changed, but its new state cannot be opened: the log of the service says why"
"""what `/healthz` says, which needs no token: without the names of files"""
log = logging.getLogger("proxymetric.serve")


@dataclass(frozen=True, eq=False)
class State:
    """A state of the index, and the model that made its vectors."""

    index: Index
    """it stays as it is when the index changes"""
    model: Model
    run: str | None
    """the run that made it; None: as the index says"""


class Images(NamedTuple):
    """The pixels of images, and the state for whose model they were cut."""

    state: State
    pixels: list[Tensor]


class Question(NamedTuple):
    """What is asked of images from `Searcher.cut`, or of items; of several, their mean vector is the query.

    Attributes:
        images: images; None: items are.
        items: ids of items, which are left out of the results.
        search: find what is similar.
        far: the false-accept rate of a question for the class. With neither, only the vector is returned.
    """

    images: Images | None = None
    items: tuple[str, ...] = ()
    search: SearchQuestion | None = None
    far: float | None = None


class UnknownItem(ValueError):
    """There is no item of this id."""


class Found(NamedTuple):
    """The answer to a question.

    Attributes:
        generation: the number of the state of the index that it belongs to.
        vector: of the query, (1, D).
        model: the fingerprint of the model that made the vector.
        hits: the results of a search.
        has_more: whether there are further results behind them.
        answer: which class it is, where this was asked.
    """

    generation: int
    vector: Tensor
    model: str
    hits: Sequence[Hit] = ()
    has_more: bool = False
    answer: Answer | None = None


class Searcher:
    """A model and an index; both are opened again when the index changes on disk.

    Args:
        folder: the folder of the index.
        run: the run that made it; None: as the index says.
        device: where the model computes.

    Raises:
        ValueError: the index or the model cannot be opened, or the model did not make the index.
    """

    def __init__(self, folder: str, run: str | None, device: str | None) -> None:
        self._seen: Hashable = None  # the first look opens it again: a change while it was opened is noticed
        self.newest = Index(folder)
        """the index as this process has opened it last; `Writer` changes it"""
        self.state = State(copy.copy(self.newest), model_of(self.newest, run, device), run)
        self.stale: str | None = None
        """a sentence if the index has a newer state that cannot be opened"""
        self._run, self._device = run, device
        self._proxies: tuple[Model, RunProxies | None] | None = None
        self._said: Hashable = None
        self._next_attempt = 0.0
        self._looking = threading.Lock()

    @property
    def index(self) -> Index:
        """The index, in the state that is open."""
        return self.state.index

    def proxies(self, state: State) -> RunProxies | None:
        """The proxies of the run that made a state; None if it has none, or none that can be read."""
        if self._proxies is None or self._proxies[0] is not state.model:
            try:
                run = run_of(state.index, state.run)
                proxies = load_proxies(run, state.index.dim, which_of(state.index, run))
            except ValueError:
                proxies = None
            self._proxies = state.model, proxies
        return self._proxies[1]

    def cut(self, images: Sequence[PillowImage.Image]) -> Images:
        """Cut images in RGB as the model needs them."""
        state = self.state
        return Images(state, [state.model.view(image) for image in images])

    def answer(self, questions: list[Question]) -> list[Found | Exception]:
        """Answer a batch of questions with one pass of the model, and one search for those with equal conditions.

        What was cut for the model of an earlier state is answered from that state.
        """
        now = self.state
        states: dict[State, list[int]] = {}
        for row, question in enumerate(questions):
            images = question.images
            state = now if images is None or images.state.model is now.model else images.state
            states.setdefault(state, []).append(row)
        answers: dict[int, Found | Exception] = {}
        for state, rows in states.items():
            answers |= zip(rows, _answer(state, [questions[row] for row in rows]), strict=True)
        return [answers[row] for row in range(len(questions))]

    async def keep_up(self) -> None:
        """Look at the index again and again, and open it in a thread when it has changed; ends when it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await asyncio.to_thread(self.look)

    def look(self) -> None:
        """Open the index again if it has changed, and the model too if another one made the new state."""
        with self._looking:
            self._look()

    def _look(self) -> None:
        folder, before = self.index.folder, self.state
        stamp = self.newest.newest()
        if stamp == self._seen or (stamp == self._said and time.monotonic() < self._next_attempt):
            return
        try:
            self.newest.reload()
            index = copy.copy(self.newest)
            if index.model == before.index.model:
                self.state = State(index, before.model, before.run)
            else:
                self.state = self._with_its_model(index)
                log.warning(
                    "%s: opened state %d, which another model made: %s",
                    folder,
                    index.manifest.generation,
                    self.state.run or index.manifest.run.get("run"),
                )
        except (ValueError, OSError, RuntimeError, sqlite3.Error) as error:
            # It is being replaced, or its model cannot be loaded: the state that is open stays.
            if stamp != self._said:
                log.warning(
                    "%s: has changed, and its new state cannot be opened (%s); the service stays with state %d and "
                    "tries again",
                    folder,
                    error,
                    before.index.manifest.generation,
                )
            self._said, self.stale, self._next_attempt = stamp, STALE, time.monotonic() + RETRY_SECONDS
            return
        self._seen, self._said, self.stale = stamp, None, None

    def _with_its_model(self, index: Index) -> State:
        """Load the model of a new state: that of the run that the service was given, or the one that the index says."""
        try:
            return State(index, model_of(index, self._run, self._device), self._run)
        except ValueError:
            if self._run is None:
                raise
            return State(index, model_of(index, None, self._device), None)


def _answer(state: State, questions: list[Question]) -> list[Found | Exception]:
    """Answer questions from one state of the index."""
    index = state.index
    generation = index.manifest.generation
    answers: dict[int, Found | Exception] = {}
    groups: dict[str, list[int]] = {}
    vectors = _vectors(state, questions)
    for row, (question, vector) in enumerate(zip(questions, vectors, strict=True)):
        if isinstance(vector, Exception):
            answers[row] = vector
        elif question.search is not None:
            groups.setdefault(repr(question.search._replace(k=0)), []).append(row)
        elif question.far is not None:
            try:
                answer = index.identify(vector, question.far, [next(iter(question.items), None)])[0]
                answers[row] = Found(generation, vector, index.model, answer=answer)
            except ValueError as error:  # too few classes
                answers[row] = error
        else:
            answers[row] = Found(generation, vector, index.model)
    for rows in groups.values():
        queries = [vector for row in rows if isinstance(vector := vectors[row], Tensor)]
        wanted = [search for row in rows if (search := questions[row].search) is not None]
        try:
            hit_lists = index.search(
                torch.cat(queries),
                1 + max(search.k for search in wanted),
                wanted[0].conditions,
                [questions[row].items for row in rows],
                offset=wanted[0].offset,
                min_similarity=wanted[0].min_similarity,
                one_per=wanted[0].one_per,
            )
        except ValueError as error:  # a column that this state does not have
            answers |= dict.fromkeys(rows, error)
            continue
        for row, vector, search, hits in zip(rows, queries, wanted, hit_lists, strict=True):
            answers[row] = Found(generation, vector, index.model, hits[: search.k], len(hits) > search.k)
    return [answers[row] for row in range(len(questions))]


def _vectors(state: State, questions: list[Question]) -> list[Tensor | Exception]:
    """The query of each question, (1, D), with one pass of the model for all images."""
    pixels = [each for question in questions if question.images is not None for each in question.images.pixels]
    embedded = iter(state.model.embed(torch.stack(pixels)) if pixels else ())
    vectors: list[Tensor | Exception] = []
    for question in questions:
        try:
            if question.images is not None:
                parts = [next(embedded) for _ in question.images.pixels]
            else:
                parts = [state.index.vector(item) for item in question.items]
        except KeyError:
            unknown = next(item for item in question.items if item not in state.index)
            vectors.append(UnknownItem(f"id: got {unknown[:200]!r}, expected the id of an item of the index"))
            continue
        vectors.append(parts[0][None] if len(parts) == 1 else mean_query(torch.stack(parts)))
    return vectors


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
    weights = index.manifest.run.get("weights") if isinstance(place, SlimFile | Pretrained) else None
    if weights is not None and not Path(weights).exists():
        raise ValueError(
            f"--weights: {weights}, with which {index.folder} was made, is missing; expected its new place: "
            f"`proxymetric index IMAGES --out {index.folder} --weights FILE` keeps it in mind"
        )
    model = load(place, which_of(index, place), device, weights)
    if index.dim < model.dim:
        model = model.cut_to(index.dim, warn=False)
    index.check_model(model)
    return model


def run_of(index: Index, run: str | Path | None) -> Place:
    """Return where the run that made an index is: a folder or a file, or an address on the hub.

    Args:
        index: the index.
        run: the run; None: as the index says.

    Raises:
        ValueError: the run is unknown or missing.
    """
    source = index.manifest.run
    if run is None and not source.get("run"):
        raise ValueError(f"--run: got none, and {index.folder} does not say which run made it; expected a run")
    place = place_of(source["run"] if run is None else run)
    if not place.exists():
        raise ValueError(f"--run: {place}, which made {index.folder}, is missing; expected its new place with --run")
    return place


def which_of(index: Index, run: Place) -> str:
    """Return which model of a run made an index; a slim file and a shared model hold a single one."""
    return index.manifest.run.get("which", "best") if isinstance(run, RunFolder) else "best"
