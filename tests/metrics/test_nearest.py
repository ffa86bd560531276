"""The exact search against its definition in float64."""

import functools

import pytest
import torch

from oracles.nearest import plain_topk
from proxymetric.metrics import evaluate, rank
from proxymetric.metrics.knn import search

SCREENED = {"MIN_ITEMS_PER_RESULT": 0, "TILE_ROWS": {"cpu": 7}}
BY_ROWS = {"MIN_ITEMS_PER_RESULT": 10**6}


def vectors(count: int, seed: int, whole: bool) -> torch.Tensor:
    """Random vectors; small whole numbers have many equal distances, all exact in float64."""
    generator = torch.Generator().manual_seed(seed)
    if whole:
        return torch.randint(-2, 3, (count, 3), generator=generator).float()
    return torch.randn(count, 8, generator=generator)


@pytest.mark.parametrize("inside", [SCREENED, BY_ROWS])
@pytest.mark.parametrize("gallery", [False, True])
@pytest.mark.parametrize(("distance", "whole"), [("cosine", False), ("euclidean", False), ("euclidean", True)])
def test_the_search_is_its_definition(distance, whole, gallery, inside, monkeypatch):
    for name, value in inside.items():
        monkeypatch.setattr(f"proxymetric.metrics.knn.search.{name}", value)
    queries = vectors(60, 0, whole)
    items = vectors(45, 1, whole) if gallery else None
    options = {"gallery": items, "gallery_labels": [0] * 45} if gallery else {}
    for k in (1, 5, 44):
        neighbours = rank(queries, [0] * 60, k, distance=distance, **options).neighbours
        assert torch.equal(neighbours, plain_topk(queries, items, k, distance, block=7))


def test_a_zero_vector_is_equally_similar_to_all():
    items = torch.tensor([[-1.0, 0.0], [0.0, 0.0], [1.0, 0.0]])
    assert plain_topk(items, None, 2).tolist() == [[1, 2], [0, 2], [1, 0]]
    assert rank(items, [0] * 3, k=2).neighbours.tolist() == plain_topk(items, None, 2).tolist()


def test_it_can_differ_from_a_wrong_order():
    """The oracle distinguishes: a search with the sign of the scores reversed would fail."""
    queries = vectors(20, 0, False)
    assert not torch.equal(plain_topk(queries, None, 3), plain_topk(-queries, queries, 3))


@pytest.mark.parametrize("inside", [SCREENED, BY_ROWS])
@pytest.mark.parametrize(
    ("items", "order"),
    [
        ([[0.0, 1.0], [0.0, 0.0]], [0, 1]),  # both similarities are 0: the order of the items
        ([[0.0, 0.0], [1e-17, 1.0]], [1, 0]),  # less apart than float64 resolves near 1
        ([[-1e-17, 1.0], [0.0, 0.0]], [1, 0]),
    ],
)
def test_near_ties_with_a_zero_item_are_ranked_by_their_similarity(items, order, inside, monkeypatch):
    for name, value in inside.items():
        monkeypatch.setattr(f"proxymetric.metrics.knn.search.{name}", value)
    query = torch.tensor([[1.0, 0.0]])
    neighbours = rank(query, [0], 2, gallery=torch.tensor(items), gallery_labels=[0, 0]).neighbours
    assert neighbours.tolist() == [order] == plain_topk(query, torch.tensor(items), 2).tolist()


def with_copies(kind: str) -> torch.Tensor:
    """60 vectors of few values, some of them once: bits have ties between different vectors, too, and a zero vector."""
    generator = torch.Generator().manual_seed(3)
    values = torch.tensor([[i >> bit & 1 for bit in range(3)] for i in range(8)]).float()
    if kind == "real":
        values = torch.randn(8, 5, generator=generator)
    some = values[torch.randint(0, 8, (57,), generator=generator)]
    return torch.cat([some, torch.randn(3, values.shape[1], generator=generator)])[
        torch.randperm(60, generator=generator)
    ]


def sides_of(gallery: bool, kind: str) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """Queries, items, and the arguments of the items."""
    vectors = with_copies(kind)
    queries, items = (vectors[:25], vectors[25:]) if gallery else (vectors, vectors)
    return queries, items, {"gallery": items, "gallery_labels": [0] * len(items)} if gallery else {}


@functools.cache
def each_alone(distance: str, gallery: bool, kind: str) -> torch.Tensor:
    """All items of each query as it is ranked without the others."""
    queries, items, _ = sides_of(gallery, kind)
    alone = []
    for i, query in enumerate(queries):
        others = torch.arange(len(items))
        others = others if gallery else others[others != i]
        labels = [0] * len(others)
        one = rank(query[None], [0], len(others), gallery=items[others], gallery_labels=labels, distance=distance)
        alone.append(others[one.neighbours[0]])
    return torch.stack(alone)


@pytest.mark.parametrize("copies", [1, 3, 10**6], ids=["all at once", "some at once", "deep ones at once"])
@pytest.mark.parametrize("kind", ["bits", "real"])
@pytest.mark.parametrize("gallery", [False, True])
@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
def test_equal_queries_are_ranked_as_if_each_were_alone(distance, gallery, kind, copies, monkeypatch):
    alone = each_alone(distance, gallery, kind)
    monkeypatch.setattr("proxymetric.metrics.knn.search.MIN_COPIES", copies)
    queries, _, sides = sides_of(gallery, kind)
    for k in (1, 4, 9, alone.shape[1]):
        for block in (None, 7):
            found = rank(queries, [0] * len(queries), k, distance=distance, block=block, **sides).neighbours
            assert torch.equal(found, alone[:, :k]), (k, block)


@pytest.mark.parametrize("budget", [2**28, 2**11])
@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
def test_scores_of_equal_queries_are_those_of_their_ranking(distance, budget, monkeypatch):
    """Queries of one vector have different labels, different numbers of relevant items, and values that differ."""
    monkeypatch.setattr("proxymetric.metrics.knn.search.MEMORY_BYTES", budget)
    vectors, labels, values = with_copies("bits"), [i % 7 % 4 for i in range(60)], torch.arange(60) % 11
    metrics = ["R@1", "P@R", "MAP@R", "nDCG@8", "AP"]
    at_once = [evaluate(vectors, labels, metrics, distance=distance, differs=each) for each in (None, values)]
    monkeypatch.setattr("proxymetric.metrics.knn.search.MIN_COPIES", 1)
    again = [evaluate(vectors, labels, metrics, distance=distance, differs=each) for each in (None, values)]
    ranked = rank(vectors, labels, 59, distance=distance)
    hits = torch.tensor(labels)[ranked.neighbours] == torch.tensor(labels)[ranked.queries, None]
    assert torch.equal(ranked.hits, hits)
    precision = hits.cumsum(1) / torch.arange(1, 60)
    expected = float(((precision * hits).sum(1) / hits.sum(1)).double().mean())
    assert at_once == again
    assert at_once[0]["AP"] == pytest.approx(expected, rel=1e-6)


def test_of_equal_queries_one_row_is_ranked(monkeypatch):
    """600 vectors of 8 values; before, each query was ranked by a whole row, which took quadratic time."""
    rows, topk = [], search.topk

    def counted(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows.append(len(scores))
        return topk(scores, k)

    monkeypatch.setattr(search, "topk", counted)
    vectors = torch.tensor([[i >> bit & 1 for bit in range(3)] for i in range(8)]).float()[torch.arange(600) % 8]
    evaluate(vectors, torch.arange(600) % 5, ["MAP@R"])
    assert 0 < sum(rows) <= 4 * 8, "up to four times with more columns, until the ties are separated"
