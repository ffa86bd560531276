"""Which class of an index is on an image, or none of them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from proxymetric.search.batches import unit_rows
from proxymetric.search.calibration import Impostors, Threshold, decide
from proxymetric.search.class_centres import ClassCentres
from proxymetric.search.items import LabelledItems
from proxymetric.search.manifest import Manifest
from proxymetric.search.run_knowledge import knowledge_stamp, run_knowledge
from proxymetric.system.files import replacing
from proxymetric.system.tensor_files import read_tensors, write_tensors

FILE = "identify.safetensors"
"""the classes of an index and their calibration, made again when the index has changed"""
FORMAT = 4
MAX_CHANGED = 0.1
"""share of the labelled items that may have changed since the calibration: their classes are followed, the threshold
stays"""
MAX_ITEMS = 5_000
"""labelled items that calibrate; of more, as many are taken at equal distances"""
MIN_HELD_OUT_CLASSES = 5
ROWS_AT_ONCE = 512
UNCERTAINTY_WEIGHTS = (-2.0, -1.0, -0.5, 0.5, 1.0)
"""weights of the classes' uncertainty that are tried; 1 accepts uncertain classes as readily as the others, and below 0
they are accepted less readily than without"""
CHOICE_RATE = 0.1
"""false-accept rate at which the weight is chosen"""
MAX_THRESHOLDS = 64
"""thresholds that are kept in memory"""


class Answer(NamedTuple):
    """The answer for one image."""

    label: str | None
    """the class; None: none of these"""
    score: float
    """of the best class: its similarity, less a part of that of the runner-up"""
    threshold: float
    """scores above it are accepted"""
    best: str
    """the best class, whether it is accepted or not"""
    similarity: float
    """of the image to the closest centre of the best class"""
    runner_up: str | None
    """the second best class; None in an index of one class"""
    runner_up_similarity: float | None
    uncertainty: float | None
    """of the method about the best class; None for a class without an estimate, such as every new class"""
    has_uncertainty: bool
    """whether the method estimates the uncertainty of its training classes"""


class IndexedQueries(NamedTuple):
    """Queries that are items of the index themselves: each is left out of its own class."""

    rows: Tensor
    """(Q,) their rows in the index; -1 for another image"""
    vectors: Tensor
    """(Q, dim) the vectors of these rows"""

    @classmethod
    def of(cls, index: LabelledItems, ids: Sequence[str | None]) -> IndexedQueries:
        """Find the items of some ids; None, or an id that the index does not have, is another image."""
        known = [item if item is not None and item in index else None for item in ids]
        rows = torch.tensor([-1 if item is None else index[item].row for item in known], dtype=torch.long)
        vectors = [torch.zeros(index.dim) if item is None else index.vector(item) for item in known]
        return cls(rows, torch.stack(vectors) if vectors else torch.empty(0, index.dim))


class Identifier:
    """The classes of an index, calibrated so that images of other classes are refused at a stated rate.

    Args:
        index: the index; at least one item has a label.
        run: the run that made it; None: as the index says.
        fresh: calibrate anew, although few items have changed since the last time.

    Raises:
        ValueError: no item of the index has a label.

    Example:
        >>> import tempfile
        >>> from proxymetric.search import Index
        >>> index = Index.create(Path(tempfile.mkdtemp()) / "shop.index", dim=4)
        >>> vectors = torch.eye(4)[:3].repeat_interleave(4, 0) + 0.1 * torch.arange(12).view(-1, 1) / 12
        >>> index.add([f"{i:02}" for i in range(12)], vectors, labels=[*"aaaabbbbcccc"])
        >>> identifier = Identifier(index)
        >>> [answer.label for answer in identifier(torch.eye(4)[[0, 3]], far=0.1)]
        ['a', None]
    """

    def __init__(self, index: LabelledItems, run: str | Path | None = None, *, fresh: bool = False) -> None:
        self.generation = index.manifest.generation
        place = run if run is not None else index.manifest.run.get("run")
        stored = None if fresh else _read(index.folder / FILE, index.manifest, place)
        followed = None if stored is None else _followed(index, *stored)
        if stored is None or followed is None:
            stored = _calibrate(index, place)
            # A folder that cannot be written is no error: the next process calibrates again.
            with contextlib.suppress(OSError):
                _write(index.folder / FILE, stored)
            followed = _followed(index, *stored)
        assert followed is not None
        tensors, facts = stored
        self.facts: dict[str, Any] = facts
        self.centres, self.changes = followed
        """the centres, and how many items were added, removed or relabelled since the calibration"""
        self.classes: list[str] = self.centres.names
        missing = len(self.classes) - len(tensors["offsets"])
        self.offsets = torch.nn.functional.pad(tensors["offsets"], (0, missing))
        self.genuine = tensors["genuine"].numpy()
        self.impostors = _impostors(tensors, facts, len(self.classes))
        self._thresholds: dict[float, Threshold] = {}

    def threshold(self, far: float) -> Threshold:
        """Return the threshold for a false-accept rate.

        Raises:
            ValueError: the rate is out of range, or there are too few classes to calibrate with.
        """
        if far not in self._thresholds:
            if len(self._thresholds) >= MAX_THRESHOLDS:
                self._thresholds.clear()
            self._thresholds[far] = self.impostors.threshold(far)
        return self._thresholds[far]

    def recognised(self, far: float) -> float:
        """Return the share of the labelled items that would be accepted and named rightly, were they new images."""
        return float((self.genuine > self.threshold(far).value).mean())

    def summary(self, far: float) -> str:
        """Say which scores are accepted at a false-accept rate, and how many new images of these classes are named."""
        threshold = self.threshold(far)
        rare = ", which is extrapolated: there are too few images to count so rare an event"
        return (
            f"false-accept rate {100 * far:g} %: scores above {threshold.value:.3f} ({threshold.low:.3f} to "
            f"{threshold.high:.3f}){rare if threshold.is_extrapolated else ''}; of the images of these classes, "
            f"{100 * self.recognised(far):.0f} % are named"
        )

    @property
    def note(self) -> str:
        """Say by which images the threshold was chosen, what that means, and whether the uncertainty is used."""
        if self.changes:
            items = f"{self.changes:,} item{'s' if self.changes > 1 else ''}"
            return f"{self._usual_note}; the threshold is that of before the last changes, of {items}"
        return self._usual_note

    @property
    def _usual_note(self) -> str:
        if not self.facts["uncertainty"]:
            return self._chosen_by
        if weight := self.facts["uncertainty_weight"]:
            harder = "more readily" if weight > 0 else "less readily"
            return f"{self._chosen_by}; classes with a high uncertainty are accepted {harder}, which names more images"
        return f"{self._chosen_by}; the uncertainty of classes is shown and not used: without it more images are named"

    @property
    def _chosen_by(self) -> str:
        known, total = self.facts["trained_classes"], len(self.classes)
        images, groups = len(self.impostors.groups), len(np.unique(self.impostors.groups))
        if self.facts["source"] == "held-out":
            return (
                f"{known} of the {total} classes were trained on, so that their own scores are optimistic; the "
                f"threshold was chosen with {images} images of {groups} held-out classes of the run"
            )
        chosen = (
            f"the threshold was chosen with {images} images of {groups} classes of the index, each left out in turn"
        )
        if known:
            return f"{known} of the {total} classes were trained on, so that the threshold is optimistic; {chosen}"
        return chosen if self.facts["run_is_known"] else f"{chosen}; whether they were trained on is not known"

    def __call__(self, queries: Tensor, far: float = 0.01, indexed: IndexedQueries | None = None) -> list[Answer]:
        """Say for each image which class it is, or none.

        Args:
            queries: (Q, dim).
            far: the false-accept rate: the share of images of other classes that are taken for one of these.
            indexed: which queries are items of the index; None: none of them.

        Raises:
            ValueError: see `threshold`.
        """
        threshold = self.threshold(far)
        values, codes = _closest(
            self.centres,
            self.offsets,
            torch.from_numpy(unit_rows(queries)),
            None if indexed is None else indexed.rows,
            2,
            members=None if indexed is None else indexed.vectors,
        )
        answers = []
        for row, code, score in zip(values.tolist(), codes.tolist(), decide(values).tolist(), strict=True):
            best, has_second = self.classes[code[0]], row[1] > -2
            answers.append(
                Answer(
                    best if score > threshold.value else None,
                    score,
                    threshold.value,
                    best,
                    max(row[0], -1.0),  # -2: the image is the only one of the only class
                    self.classes[code[1]] if has_second else None,
                    row[1] if has_second else None,
                    self.facts["uncertainty"].get(best),
                    bool(self.facts["uncertainty"]),
                )
            )
        return answers


def _closest(
    centres: ClassCentres,
    offsets: Tensor,
    queries: Tensor,
    own_rows: Tensor | None,
    k: int,
    masked: Tensor | None = None,
    members: Tensor | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The k best classes of each query: values (Q, k), -2 where there is none, and classes (Q, k).

    Args:
        centres: the classes.
        offsets: (C,) added to the similarities.
        queries: (Q, D) of unit length.
        own_rows: (Q,) rows of the queries among the vectors of the centres; None: they are not among them.
        k: classes for each query.
        masked: (Q,) a class that is not an answer; None: all are.
        members: (Q, D) the vectors of the rows `own_rows`; None: the queries.
    """
    values, codes = [], []
    for start in range(0, len(queries), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        similarities = centres.scores(
            queries[part], None if own_rows is None else own_rows[part], None if members is None else members[part]
        )
        similarities = torch.where(similarities > -2, similarities + offsets, -2.0)
        if masked is not None:
            similarities[torch.arange(len(similarities)), masked[part]] = -2.0
        missing = max(0, k - similarities.shape[1])
        best = torch.nn.functional.pad(similarities, (0, missing), value=-2.0).topk(k, dim=1)
        values.append(best.values.double().numpy())
        codes.append(best.indices.numpy())
    return np.concatenate(values), np.concatenate(codes)


def _calibrate(index: LabelledItems, run: str | Path | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Make the centres of the classes, and score the images that calibrate.

    The weight of the classes' uncertainty is the one with which most of the labelled items are named, at the
    false-accept rate `CHOICE_RATE`.
    """
    plain = _scored(index, run, weight=0.0)
    if not plain[1]["uncertainty"]:
        return plain
    return max([plain, *(_scored(index, run, weight) for weight in UNCERTAINTY_WEIGHTS)], key=_named)


def _named(stored: tuple[dict[str, Tensor], dict[str, Any]]) -> float:
    """The share of the labelled items that are named rightly at the rate `CHOICE_RATE`; 0 without a threshold."""
    try:
        return float(
            (
                stored[0]["genuine"].numpy()
                > _impostors(*stored, len(stored[1]["classes"])).threshold(CHOICE_RATE).value
            ).mean()
        )
    except ValueError:  # too few classes
        return 0.0


def _impostors(tensors: dict[str, Tensor], facts: dict[str, Any], classes: int) -> Impostors:
    groups, values, answers = (tensors[name].numpy() for name in ("groups", "values", "answers"))
    return Impostors(groups, values.astype(np.float64), answers, facts["candidates"], classes)


def _followed(
    index: LabelledItems, tensors: dict[str, Tensor], facts: dict[str, Any]
) -> tuple[ClassCentres, int] | None:
    """The centres of a calibration after the changes since, and their number; None if there were too many."""
    centre_of = tensors["centre_of"].long()
    centres = ClassCentres(facts["classes"], tensors["sums"], tensors["counts"], tensors["owner"], centre_of)
    numbers = index.row_numbers
    if numbers is None:
        return (centres, 0) if facts["generation"] == index.manifest.generation else None
    if facts["generation"] != index.manifest.generation:
        labels: list[str | None] = [None] * index.manifest.rows
        for number, label in zip(numbers.tolist(), index.labels, strict=True):
            labels[number] = label
        then = [None if centre < 0 else centres.names[centres.owner[centre]] for centre in centre_of.tolist()]
        then += [None] * (len(labels) - len(then))
        changes = sum(before != now for before, now in zip(then, labels, strict=True))
        if changes > MAX_CHANGED * max(1, int((centre_of >= 0).sum())):
            return None
        centres = centres.followed(index.vectors_at, labels)
    else:
        changes = 0
    return replace(centres, centre_of=centres.centre_of[numbers]), changes


def _scored(index: LabelledItems, run: str | Path | None, weight: float) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Make the centres of the classes, and score the images that calibrate, with a weight of the uncertainty."""
    labels, vectors = index.labels, index.vectors
    labelled = [row for row, label in enumerate(labels) if label is not None]
    if not labelled:
        raise ValueError(
            f"index: got {index.folder}, where no item has a class; expected labelled items: `index add-class`"
        )
    centres = ClassCentres.of(vectors, labels)
    code = {name: number for number, name in enumerate(centres.names)}
    stamp, knowledge = knowledge_stamp(run), run_knowledge(run)
    rows = torch.tensor(labelled)
    if len(rows) > MAX_ITEMS:
        rows = rows[torch.linspace(0, len(rows) - 1, MAX_ITEMS).long()]
    items, owners = vectors[rows], torch.tensor([code[str(labels[row])] for row in rows.tolist()])
    offsets = weight * _offsets(centres, knowledge.uncertainty if weight else {}, items, rows, owners)
    values, answers = _closest(centres, offsets, items, rows, 2)
    genuine = np.where(answers[:, 0] == owners.numpy(), decide(values), -2.0)
    has_others = np.bincount(owners.numpy(), minlength=len(centres.names))[owners.numpy()] > 1
    trained = [name for name in centres.names if name in set(knowledge.trained)]
    new = [row for row, label in enumerate(knowledge.labels) if label not in code]
    groups, candidates, source = owners.numpy(), len(centres.names) - 1, "index"
    usable = len({knowledge.labels[row] for row in new}) >= MIN_HELD_OUT_CLASSES
    if trained and usable and knowledge.vectors.shape[1] >= index.dim:
        # Vectors of an index may be cut (`--dim`): those of the run are cut as they were.
        unit = torch.from_numpy(unit_rows(knowledge.vectors[new, : index.dim]))
        values, answers = _closest(centres, offsets, unit, None, 3)
        held_out = np.unique([knowledge.labels[row] for row in new], return_inverse=True)[1]
        groups, candidates, source = len(centres.names) + held_out, len(centres.names), "held-out"
    else:
        values, answers = _closest(centres, offsets, items, rows, 3, masked=owners)
    centre_of = centres.centre_of
    if (numbers := index.row_numbers) is not None:
        centre_of = torch.full((index.manifest.rows,), -1)
        centre_of[numbers] = centres.centre_of
    tensors = {
        "sums": centres.sums,
        "counts": centres.counts,
        "owner": centres.owner,
        "centre_of": centre_of.int(),
        "offsets": offsets,
        "genuine": torch.from_numpy(genuine[has_others] if has_others.any() else np.array([-2.0])),
        "groups": torch.from_numpy(np.ascontiguousarray(groups)),
        "values": torch.from_numpy(values),
        "answers": torch.from_numpy(answers),
    }
    facts = {
        "format": FORMAT,
        "generation": index.manifest.generation,
        "store": [index.manifest.identity, index.manifest.store],
        "run": str(run),
        "stamp": stamp,
        "run_is_known": bool(knowledge.trained),
        "classes": centres.names,
        "candidates": candidates,
        "source": source,
        "trained_classes": len(trained),
        "uncertainty_weight": weight if offsets.any() else 0.0,
        "uncertainty": {name: knowledge.uncertainty[name] for name in centres.names if name in knowledge.uncertainty},
    }
    return tensors, facts


def _offsets(
    centres: ClassCentres, uncertainty: dict[str, float], items: Tensor, rows: Tensor, owners: Tensor
) -> Tensor:
    """What is added to the similarity to each class, (C,): images of uncertain classes are less similar to them.

    The slope is that of the similarity of labelled images to their own class over its uncertainty, so that an uncertain
    class is accepted as readily as the others. A class without an estimate gets nothing.
    """
    offsets = torch.zeros(len(centres.names))
    known = torch.tensor([name in uncertainty for name in centres.names])
    if known.sum() < MIN_HELD_OUT_CLASSES:
        return offsets
    doubt = torch.tensor([uncertainty.get(name, 0.0) for name in centres.names])
    doubt = torch.where(known, doubt - doubt[known].mean(), 0.0)
    use = known[owners]
    own_scores = torch.cat([
        centres.scores(items[part], rows[part]).gather(1, owners[part, None]).flatten()
        for part in torch.arange(len(items)).split(ROWS_AT_ONCE)
    ])  # fmt: skip
    x, y = doubt[owners[use & (own_scores > -2)]].double(), own_scores[use & (own_scores > -2)].double()
    spread = float((x - x.mean()).square().sum())
    if spread <= 0:
        return offsets
    slope = float(((x - x.mean()) * (y - y.mean())).sum()) / spread
    return (-min(slope, 0.0) * doubt).float()


def _write(file: Path, stored: tuple[dict[str, Tensor], dict[str, Any]]) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in stored[0].items()}
    with replacing(file) as temporary:
        write_tensors(temporary, tensors, {"facts": json.dumps(stored[1])})


def _read(file: Path, manifest: Manifest, run: str | Path | None) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Read the calibration of an index and of its run, if rows have the same numbers since; None if there is none."""
    try:
        tensors, header = read_tensors(file)
        facts = json.loads(header["facts"])
    except (OSError, ValueError, KeyError):
        return None
    expected = (FORMAT, [manifest.identity, manifest.store], str(run))
    is_current = (facts.get("format"), facts.get("store"), facts.get("run")) == expected
    if not is_current or facts["generation"] > manifest.generation:
        return None
    stamp = knowledge_stamp(run)  # the file keeps what it knows from a run that is no longer there
    return (tensors, facts) if stamp in (None, facts.get("stamp")) else None
