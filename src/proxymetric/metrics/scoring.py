"""Metrics of a ranking.

With rel(i) = 1 if the i-th result has the query's class, R relevant items, and P(i) the precision of the first i
results:

    R@K     1 if any of the first K is relevant (a hit rate)
    P@K     P(K)                                           P@R     P(R)
    MAP@K   1/K * sum over i <= K of P(i) rel(i)           MAP@R   the same with K = R
    AP@K    1/min(K, R) * the same sum                     AP      1/R * the same sum over the whole ranking
    MRR@K   1/i of the first relevant result, 0 if i > K   MRR     the same for the whole ranking
    nDCG@K  sum over i <= K of (2^rel(i) - 1)/log2(i + 1), divided by its ideal: min(R, K) relevant results first

MAP@K is the definition of the papers of this field. It divides by K: a query with R < K relevant items reaches at most
R/K. AP@K divides by the number of relevant items that K results can hold: a perfect ranking has 1 for every query.
The `apk` of Kaggle's competitions is AP@K. Others divide the sum by R, even if R > K (pytorch-metric-learning's
mean_average_precision), or by the number of relevant items among the first K (map@k of open-metric-learning,
torchmetrics' RetrievalMAP with top_k), which ignores those that were not found.

Each metric is a mean over the queries that have a relevant item. NMI, AMI, covering_radius and inter_class_distance
describe a whole set: see `clustering` and `geometry`. EER and FNMR@FMR=F are error rates of all pairs: see
`verification`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from proxymetric.arguments.vectors import Labels, Vectors
from proxymetric.metrics.agreement import adjusted_mutual_information, mutual_information
from proxymetric.metrics.clustering import class_clusters
from proxymetric.metrics.geometry import covering_radius, inter_class_distance
from proxymetric.metrics.names import Metric, names, parse
from proxymetric.metrics.ranking import Ranking, ResultTable, Search, search
from proxymetric.metrics.verification import verification_scores

DEFAULT = ("R@1", "P@R", "MAP@R", "nDCG@8")
CLUSTER_METRICS: dict[str, Callable[[Labels, Labels], float]] = {
    "NMI": mutual_information,
    "AMI": adjusted_mutual_information,
}
"""metrics of classes and clusters"""
SET_METRICS: dict[str, Callable[..., float]] = {
    "covering_radius": covering_radius,
    "inter_class_distance": inter_class_distance,
}


def per_query(ranking: Ranking, metrics: str | Sequence[str] = DEFAULT) -> dict[str, Tensor]:
    """Compute each metric for each query of a ranking.

    Args:
        ranking: a ranking with as many results as the metrics need.
        metrics: names; see `evaluate`.

    Returns:
        Metric -> (Q,) float64.

    Raises:
        ValueError: a metric is unknown or describes a whole set, or the ranking is too short for it.

    Example:
        >>> from proxymetric.metrics import rank
        >>> ranking = rank(torch.eye(4)[[0, 0, 1, 0]], [0, 0, 0, 1])
        >>> per_query(ranking, "P@R")
        {'P@R': tensor([0.5000, 0.5000, 1.0000], dtype=torch.float64)}
    """
    parsed = [parse(name) for name in names(metrics)]
    for metric in parsed:
        if metric.whole:
            raise ValueError(
                f"metrics: got {metric.name}, expected metrics of a ranking; `evaluate` computes {metric.name}"
            )
    width = ranking.hits.shape[1]
    for metric in parsed:
        if metric.uncut:
            _check_whole(ranking, metric)
            continue
        depth = int(ranking.relevant.max()) if metric.cutoff is None and len(ranking.relevant) else metric.cutoff or 1
        if depth > width:
            raise ValueError(
                f"ranking: got {width} results for each query, expected at least {depth} for {metric.name}"
            )
    rows = max(1, 2**22 // width)
    parts = [
        [_score(metric, hits, relevant) for metric in parsed]
        for hits, relevant in zip(ranking.hits.split(rows), ranking.relevant.split(rows))
    ]
    return {metric.name: torch.cat(column) for metric, column in zip(parsed, zip(*parts))}


def scores(ranking: Ranking, metrics: str | Sequence[str] = DEFAULT) -> dict[str, float]:
    """Compute the mean of each metric over the queries of a ranking, as fractions.

    Args:
        ranking: a ranking with as many results as the metrics need.
        metrics: names; see `evaluate`.

    Returns:
        Metric -> mean.

    Raises:
        ValueError: see `per_query`; or the ranking has no query.

    Example:
        >>> hits = torch.tensor([[1, 0, 1, 0, 0, 0, 1, 0, 0, 1]], dtype=torch.bool)
        >>> neighbours = torch.arange(1, 11)[None]
        >>> ranking = Ranking(hits, torch.tensor([4]), neighbours, torch.tensor([0]), left_out=0)
        >>> {name: round(100 * value, 1) for name, value in scores(ranking, ["P@10", "MAP@R", "nDCG@10"]).items()}
        {'P@10': 40.0, 'MAP@R': 41.7, 'nDCG@10': 82.9}
        >>> {name: round(100 * value, 1) for name, value in scores(ranking, ["MAP@10", "AP@10"]).items()}
        {'MAP@10': 25.0, 'AP@10': 62.4}
    """
    names(metrics)
    if len(ranking.queries) == 0:
        raise ValueError(_no_relevant_items(ranking.left_out))
    return {name: float(values.mean()) for name, values in per_query(ranking, metrics).items()}


def evaluate(
    embeddings: Vectors,
    labels: Labels,
    metrics: str | Sequence[str] = DEFAULT,
    *,
    gallery: Vectors | None = None,
    gallery_labels: Labels | None = None,
    distance: str = "cosine",
    block: int | None = None,
    device: torch.device | str | None = None,
    differs: Labels | None = None,
    gallery_differs: Labels | None = None,
) -> dict[str, float]:
    """Compute metrics of embeddings, as fractions.

    Memory use does not grow with the number of queries. Queries without a relevant item are left out; `left_out` counts
    them.

    Args:
        embeddings: (N, D); see `rank`.
        labels: (N,) whole numbers or text.
        metrics: names such as "R@1", "P@1", "P@R", "MAP@R", "MAP@10", "AP@10", "MRR@10", "nDCG@8", with any cutoff from
            1; "AP" and "MRR", which rank the whole gallery for each query; "NMI", "AMI", "covering_radius" and
            "inter_class_distance", which describe embeddings and gallery together; and the error rates of pairs "EER"
            and "FNMR@FMR=0.001", with any false-match rate F. With fewer than 1 / F pairs of different classes the
            figure is left out, with a warning.
        gallery: (G, D) the items to search; None: each embedding is a query against all others.
        gallery_labels: (G,).
        distance: "cosine" or "euclidean".
        block: queries ranked at a time; None: chosen by the search.
        device: where to compute; by default where the embeddings are.
        differs: (N,); items with the value of a query, such as its camera, are left out of its results; see `rank`.
            So are pairs with the same value, of the error rates of pairs. The metrics that describe embeddings and
            gallery together ignore it.
        gallery_differs: (G,) the same for the gallery.

    Returns:
        Metric -> value.

    Raises:
        ValueError: an argument is out of range, or no query has a relevant item.

    Example:
        >>> vectors = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.6, 0.5]])
        >>> evaluate(vectors, [0, 0, 1, 1], ["R@1", "MAP@R", "R@2"])
        {'R@1': 0.75, 'MAP@R': 0.75, 'R@2': 0.75}
    """
    parsed = [parse(name) for name in names(metrics)]
    task = search(embeddings, labels, gallery, gallery_labels, distance, block, device, differs, gallery_differs)
    query_metrics = [metric for metric in parsed if not metric.whole]
    values = (
        {name: float(query_values.mean()) for name, query_values in of_queries(task, query_metrics).scores.items()}
        if query_metrics
        else {}
    )
    if pair_metrics := [metric for metric in parsed if metric.of_pairs]:
        values |= verification_scores(task, pair_metrics)
    set_metrics = [metric for metric in parsed if metric.whole and not metric.of_pairs]
    vectors, groups = task.vectors, task.labels
    if set_metrics and not task.leave_one_out:
        common_dtype = torch.promote_types(task.vectors.dtype, task.items.dtype)
        vectors = torch.cat([task.vectors.to(common_dtype), task.items.to(common_dtype)])
        groups = torch.cat([task.labels, task.item_labels])
    if any(metric.kind in CLUSTER_METRICS for metric in set_metrics):
        clusters = class_clusters(vectors, groups, distance=distance)
        values |= {name: agreement(groups, clusters) for name, agreement in CLUSTER_METRICS.items()}
    for metric in set_metrics:
        if metric.kind in SET_METRICS:
            values[metric.name] = SET_METRICS[metric.kind](vectors, groups, distance=distance)
    return {metric.name: values[metric.name] for metric in parsed if metric.name in values}


class QueryScores(NamedTuple):
    """Each metric for each query that has a relevant item, on the CPU."""

    queries: Tensor
    """(Q,) ascending"""
    scores: dict[str, Tensor]
    """metric -> (Q,) float64"""


def of_queries(
    task: Search, metrics: Sequence[Metric], on_results: Callable[[ResultTable], None] | None = None
) -> QueryScores:
    """Run a search and score every query; `on_results` receives each table of results."""
    if int(task.relevant.max()) < 1:
        raise ValueError(_no_relevant_items(len(task.labels), task.differs is not None))
    max_cutoff = max((metric.cutoff or 1) for metric in metrics)
    has_cutoff_at_r = any(metric.cutoff is None for metric in metrics)
    depths = task.relevant.clamp(min=max_cutoff) if has_cutoff_at_r else torch.full_like(task.relevant, max_cutoff)
    queries: list[Tensor] = []
    values: list[list[Tensor]] = []
    for table in task.run(depths, only_hits=on_results is None):
        queries.append(table.queries.cpu())
        values.append([_score(metric, table.hits, table.relevant).cpu() for metric in metrics])
        if on_results is not None:
            on_results(table)
    rows = torch.cat(queries)
    order = rows.argsort()
    columns = [torch.cat(column)[order] for column in zip(*values)]
    return QueryScores(rows[order], {metric.name: column for metric, column in zip(metrics, columns)})


def _score(metric: Metric, hits: Tensor, relevant: Tensor) -> Tensor:
    """One metric for hits (Q, k); results after the k-th count as misses."""
    k = hits.shape[1]
    positions = torch.arange(1, k + 1, device=hits.device)
    cutoffs = relevant if metric.cutoff is None else torch.full_like(relevant, metric.cutoff)
    counted_hits = hits & (positions <= cutoffs[:, None])
    if metric.kind == "R":
        return counted_hits.any(dim=1).double()
    if metric.kind == "P":
        return counted_hits.sum(dim=1) / cutoffs.double()
    if metric.kind in ("MAP", "AP"):
        precision = counted_hits.cumsum(dim=1) / positions.double()
        return (precision * counted_hits).sum(dim=1) / (
            cutoffs if metric.kind == "MAP" else torch.minimum(cutoffs, relevant)
        )
    if metric.kind == "MRR":
        first = counted_hits.double().argmax(dim=1)  # the first of equal values
        return counted_hits.any(dim=1) / (first + 1).double()
    assert metric.cutoff is not None, metric
    max_depth = int(torch.minimum(relevant, cutoffs).max()) if len(relevant) else 1
    gain = 1 / torch.log2(torch.arange(2, max(k, max_depth) + 2, dtype=torch.float64))
    # The cumulative sum runs on the CPU, because it is not deterministic on a GPU.
    ideal = gain.cumsum(dim=0).to(hits.device)[torch.minimum(relevant, cutoffs) - 1]
    return (counted_hits * gain[:k].to(hits.device)).sum(dim=1) / ideal


def _check_whole(ranking: Ranking, metric: Metric) -> None:
    """Refuse a ranking that ends before the relevant items that the metric needs: all of them, or the first one."""
    hit_counts = ranking.hits.sum(dim=1)
    missing = (hit_counts < ranking.relevant) if metric.kind == "AP" else (hit_counts == 0)
    if missing.any():
        raise ValueError(
            f"ranking: got {ranking.hits.shape[1]} results for each query, too few for {metric.name} of "
            f"{int(missing.sum())} queries, expected the whole gallery: rank(..., k=number of items)"
        )


def _no_relevant_items(queries: int, differs: bool = False) -> str:
    others = " of another value of `differs`" if differs else ""
    return (
        f"labels: got {queries} queries without a relevant item{others}, expected at least one query with a relevant "
        f"item{others}"
    )
