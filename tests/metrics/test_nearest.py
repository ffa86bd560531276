"""The exact search against its definition in float64."""

import pytest
import torch

from oracles.nearest import plain_topk
from proxymetric.metrics import rank

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
