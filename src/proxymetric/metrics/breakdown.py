"""The parts of a score: its classes, its queries, and pairs of classes that are confused."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from proxymetric.arguments.vectors import Labels, Vectors
from proxymetric.metrics.names import names, parse
from proxymetric.metrics.ranking import ResultTable, search
from proxymetric.metrics.scoring import of_queries

METRICS = ("MAP@R", "P@1", "P@R")
RESULTS_SHOWN = 5
"""the number of results stored for each of the worst queries"""
JSON_KEYS = {"neighbour_labels": "found", "wrong_label": "found"}
"""fields that have another name in JSON"""


class ClassScore(NamedTuple):
    """Means over the queries of one class."""

    label: int
    queries: int
    scores: dict[str, float]


class BadQuery(NamedTuple):
    """A query with a low score, and its first results."""

    query: int
    label: int
    scores: dict[str, float]
    neighbours: list[int]
    neighbour_labels: list[int]


class Confusion(NamedTuple):
    """How often queries of class `label` have results of class `wrong_label` among their first R results.

    R is the number of relevant items of a query.
    """

    label: int
    wrong_label: int
    times: int
    share: float
    """`times` divided by the number of the first R results of these queries"""


@dataclass(frozen=True)
class Breakdown:
    """The parts of a score.

    Attributes:
        queries: (Q,) indices of the queries, ascending.
        scores: metric -> (Q,) float64.
        classes: the scores of each class, by label.
        worst: the queries with the lowest scores, lowest first.
        confused: pairs of confused classes, most frequent first.
    """

    queries: Tensor
    scores: dict[str, Tensor]
    classes: list[ClassScore]
    worst: list[BadQuery]
    confused: list[Confusion]

    def as_dict(self, class_names: Sequence[str] | None = None, per_query: bool = False) -> dict[str, Any]:
        """Convert to lists and numbers, ready for JSON.

        Args:
            class_names: names to add to the labels; None: labels only.
            per_query: whether to include the scores of every query.

        Example:
            >>> vectors = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.6, 0.5]])
            >>> breakdown(vectors, [0, 0, 1, 1], "P@1").as_dict(["cat", "dog"])["confused"]
            [{'label': 1, 'found': 0, 'times': 1, 'share': 0.5, 'class': 'dog', 'found_class': 'cat'}]
        """

        def with_class_names(row: NamedTuple) -> dict[str, Any]:
            content_of_row: dict[str, Any] = {JSON_KEYS.get(name, name): value for name, value in row._asdict().items()}
            if class_names is not None:
                content_of_row["class"] = class_names[content_of_row["label"]]
                if isinstance(row, Confusion):
                    content_of_row["found_class"] = class_names[row.wrong_label]
                if isinstance(row, BadQuery):
                    content_of_row["found_classes"] = [class_names[label] for label in row.neighbour_labels]
            return content_of_row

        content: dict[str, Any] = {
            "classes": [with_class_names(row) for row in self.classes],
            "worst": [with_class_names(row) for row in self.worst],
            "confused": [with_class_names(row) for row in self.confused],
        }
        if per_query:
            content["queries"] = self.queries.tolist()
            content["scores"] = {name: values.tolist() for name, values in self.scores.items()}
        return content


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
    differs: Labels | None = None,
    gallery_differs: Labels | None = None,
) -> Breakdown:
    """Compute the scores of each class and each query, the worst queries, and the most confused pairs of classes.

    Args:
        embeddings: (N, D); see `rank`.
        labels: (N,).
        metrics: metrics that are means over queries. The first one decides which queries are worst; ties keep the order
            of the queries.
        worst: the number of queries listed, at least 0.
        pairs: the number of pairs of classes listed, at least 0.
        gallery: (G, D) the items to search; None: each embedding is a query against all others.
        gallery_labels: (G,).
        distance: "cosine" or "euclidean".
        block: queries ranked at a time; None: chosen by the search.
        device: where to compute; by default where the embeddings are.
        differs: (N,); items with the value of a query, such as its camera, are left out of its results; see `rank`.
        gallery_differs: (G,) the same for the gallery.

    Returns:
        The breakdown.

    Example:
        >>> vectors = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.6, 0.5]])
        >>> parts = breakdown(vectors, [0, 0, 1, 1], "P@1")
        >>> [(score.label, score.scores["P@1"]) for score in parts.classes]
        [(0, 1.0), (1, 0.5)]
        >>> parts.worst[0].query, parts.worst[0].neighbour_labels[0]
        (3, 0)
    """
    parsed = [parse(name) for name in names(metrics)]
    for metric in parsed:
        if metric.whole:
            raise ValueError(f"metrics: got {metric.name}, expected means over queries")
    for name, number in (("worst", worst), ("pairs", pairs)):
        if number < 0:
            raise ValueError(f"{name}: got {number}, expected a number of at least 0")
    task = search(embeddings, labels, gallery, gallery_labels, distance, block, device, differs, gallery_differs)
    confusions: Counter[tuple[int, int]] = Counter()
    all_labels = torch.cat([task.labels, task.item_labels]).unique()
    first_results = torch.full((len(task.labels), min(RESULTS_SHOWN, task.candidates)), -1)

    def on_results(table: ResultTable) -> None:
        width = min(first_results.shape[1], table.neighbours.shape[1])
        first_results[table.queries.cpu(), :width] = table.neighbours[:, :width].cpu()
        positions = torch.arange(table.hits.shape[1], device=table.hits.device)
        row, column = ((positions < table.relevant[:, None]) & ~table.hits & (table.neighbours >= 0)).nonzero(
            as_tuple=True
        )
        actual = torch.searchsorted(all_labels, task.labels[table.queries[row]])
        confused_with = torch.searchsorted(all_labels, task.item_labels[table.neighbours[row, column]])
        keys, counts = (actual * len(all_labels) + confused_with).unique(return_counts=True)
        a, b = all_labels[keys // len(all_labels)].tolist(), all_labels[keys % len(all_labels)].tolist()
        confusions.update(dict(zip(zip(a, b), counts.tolist())))

    # Confusions need R results, and the worst queries need results to show, even if the metrics need fewer.
    needed_metrics = [*parsed, parse("P@R"), parse(f"P@{first_results.shape[1]}")]
    scored = of_queries(task, needed_metrics, on_results)
    scores = {metric.name: scored.scores[metric.name] for metric in parsed}
    query_labels = task.labels.cpu()[scored.queries]
    relevant = task.relevant.cpu()[scored.queries]
    present_labels, group, sizes = query_labels.unique(return_inverse=True, return_counts=True)
    means = {
        name: torch.zeros(len(present_labels)).double().index_add_(0, group, values) / sizes
        for name, values in scores.items()
    }
    result_counts = dict(zip(present_labels.tolist(), torch.zeros_like(sizes).index_add_(0, group, relevant).tolist()))
    classes = [
        ClassScore(label, size, {name: float(values[i]) for name, values in means.items()})
        for i, (label, size) in enumerate(zip(present_labels.tolist(), sizes.tolist()))
    ]
    order = scores[parsed[0].name].argsort(stable=True)[:worst].tolist()
    item_labels = task.item_labels.cpu()
    worst_queries = []
    for row in order:
        query = int(scored.queries[row])
        neighbours = [item for item in first_results[query].tolist() if item >= 0]
        query_scores = {name: float(values[row]) for name, values in scores.items()}
        worst_queries.append(
            BadQuery(query, int(query_labels[row]), query_scores, neighbours, item_labels[neighbours].tolist())
        )
    ranked_pairs = sorted(confusions.items(), key=lambda pair: (-pair[1], pair[0]))[:pairs]
    confused = [Confusion(a, b, count, count / result_counts[a]) for (a, b), count in ranked_pairs]
    return Breakdown(scored.queries, scores, classes, worst_queries, confused)
