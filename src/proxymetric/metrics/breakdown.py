"""Where a score comes from: classes, queries, and classes taken for each other."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from proxymetric.metrics.inputs import Labels, Vectors
from proxymetric.metrics.names import names, parse
from proxymetric.metrics.ranking import Found, search
from proxymetric.metrics.scoring import of_queries

METRICS = ("MAP@R", "P@1", "P@R")
SHOWN = 5  # first results of a bad query


class ClassScore(NamedTuple):
    """Means over the queries of one class."""

    label: int
    queries: int
    scores: dict[str, float]


class BadQuery(NamedTuple):
    """A query that found little, and what came first."""

    query: int
    label: int
    scores: dict[str, float]
    neighbours: list[int]
    found: list[int]  # their labels


class Confusion(NamedTuple):
    """Results of class `found` among the first R of the queries of class `label`, R what each could have found."""

    label: int
    found: int
    times: int
    share: float  # of all the first R results of these queries


@dataclass(frozen=True)
class Breakdown:
    """The parts of a score; `as_dict` is ready for JSON."""

    queries: Tensor  # (Q,) indices of the queries, ascending
    scores: dict[str, Tensor]  # metric -> (Q,) float64
    classes: list[ClassScore]  # by label
    worst: list[BadQuery]  # worst first
    confused: list[Confusion]  # most often first

    def as_dict(self, class_names: Sequence[str] | None = None, per_query: bool = False) -> dict[str, Any]:
        """Plain lists and numbers; with the names of the classes beside their labels where given.

        >>> vectors = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.6, 0.5]])
        >>> breakdown(vectors, [0, 0, 1, 1], "P@1").as_dict(["cat", "dog"])["confused"]
        [{'label': 1, 'found': 0, 'times': 1, 'share': 0.5, 'class': 'dog', 'found_class': 'cat'}]
        """

        def named(row: NamedTuple) -> dict[str, Any]:
            plain: dict[str, Any] = row._asdict()
            if class_names is not None:
                plain["class"] = class_names[plain["label"]]
                if isinstance(row, Confusion):
                    plain["found_class"] = class_names[row.found]
                if isinstance(row, BadQuery):
                    plain["found_classes"] = [class_names[label] for label in row.found]
            return plain

        whole: dict[str, Any] = {
            "classes": [named(row) for row in self.classes],
            "worst": [named(row) for row in self.worst],
            "confused": [named(row) for row in self.confused],
        }
        if per_query:
            whole["queries"] = self.queries.tolist()
            whole["scores"] = {name: values.tolist() for name, values in self.scores.items()}
        return whole


def breakdown(
    embeddings: Vectors,
    labels: Labels,
    metrics: str | Sequence[str] = METRICS,
    *,
    worst: int = 20,
    pairs: int = 20,
    gallery: Vectors | None = None,
    gallery_labels: Labels | None = None,
    distance: str = "cosine",
    block: int | None = None,
    device: torch.device | str | None = None,
) -> Breakdown:
    """Scores of each class and each query, the worst queries, and the classes most often taken for each other.

    Args:
        metrics: means over queries; the first one says which queries are worst, equal ones in their order.
        worst: queries listed, from 0.
        pairs: pairs of classes listed, from 0.

    >>> vectors = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.6, 0.5]])
    >>> parts = breakdown(vectors, [0, 0, 1, 1], "P@1")
    >>> [(each.label, each.scores["P@1"]) for each in parts.classes]
    [(0, 1.0), (1, 0.5)]
    >>> parts.worst[0].query, parts.worst[0].found[0]
    (3, 0)
    """
    wanted = [parse(name) for name in names(metrics)]
    for metric in wanted:
        if metric.whole:
            raise ValueError(f"metrics: got {metric.name}, which has no value for a query; expected others")
    for name, number in (("worst", worst), ("pairs", pairs)):
        if number < 0:
            raise ValueError(f"{name}: got {number}, expected from 0")
    task = search(embeddings, labels, gallery, gallery_labels, distance, block, device)
    wrong: Counter[tuple[int, int]] = Counter()
    known = torch.cat([task.labels, task.item_labels]).unique()
    first = torch.full((len(task.labels), min(SHOWN, task.candidates)), -1)

    def see(found: Found) -> None:
        width = min(first.shape[1], found.neighbours.shape[1])
        first[found.queries.cpu(), :width] = found.neighbours[:, :width].cpu()
        place = torch.arange(found.hits.shape[1], device=found.hits.device)
        row, column = ((place < found.relevant[:, None]) & ~found.hits & (found.neighbours >= 0)).nonzero(as_tuple=True)
        own = torch.searchsorted(known, task.labels[found.queries[row]])
        other = torch.searchsorted(known, task.item_labels[found.neighbours[row, column]])
        keys, counts = (own * len(known) + other).unique(return_counts=True)
        a, b = known[keys // len(known)].tolist(), known[keys % len(known)].tolist()
        wrong.update(dict(zip(zip(a, b), counts.tolist())))

    # R results are looked at for confusions, and some to show, whatever the metrics need.
    needed = [*wanted, parse("P@R"), parse(f"P@{first.shape[1]}")]
    found = of_queries(task, needed, see)
    scores = {metric.name: found.scores[metric.name] for metric in wanted}
    own = task.labels.cpu()[found.queries]
    relevant = task.relevant.cpu()[found.queries]
    present, group, sizes = own.unique(return_inverse=True, return_counts=True)
    means = {
        name: torch.zeros(len(present)).double().index_add_(0, group, each) / sizes for name, each in scores.items()
    }
    looked = dict(zip(present.tolist(), torch.zeros_like(sizes).index_add_(0, group, relevant).tolist()))
    classes = [
        ClassScore(label, size, {name: float(each[i]) for name, each in means.items()})
        for i, (label, size) in enumerate(zip(present.tolist(), sizes.tolist()))
    ]
    order = scores[wanted[0].name].argsort(stable=True)[:worst].tolist()
    item_labels = task.item_labels.cpu()
    bad = []
    for row in order:
        query = int(found.queries[row])
        near = [item for item in first[query].tolist() if item >= 0]
        of = {name: float(each[row]) for name, each in scores.items()}
        bad.append(BadQuery(query, int(own[row]), of, near, item_labels[near].tolist()))
    ranked = sorted(wrong.items(), key=lambda pair: (-pair[1], pair[0]))[:pairs]
    confused = [Confusion(a, b, count, count / looked[a]) for (a, b), count in ranked]
    return Breakdown(found.queries, scores, classes, bad, confused)
