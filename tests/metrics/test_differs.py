"""Items with the value of a query (its camera, its series) are left out of its ranking: against loops in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from oracles import metrics as oracle
from oracles.verification import equal_error_rate, fnmr_at_fmr, pair_scores
from proxymetric.metrics import breakdown, evaluate, left_out, rank

NAMES = ["R@1", "P@3", "MAP@R", "AP@5", "nDCG@4"]


def drawn(seed: int, count: int = 40, classes: int = 5, cameras: int = 3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, count)
    vectors = (rng.normal(size=(classes, 4))[labels] + rng.normal(size=(count, 4))).astype(np.float32)
    vectors[7] = vectors[3]  # equal vectors
    return vectors, labels, rng.integers(0, cameras, count)


def filtered(lists: list[list[int]], own: np.ndarray, others: np.ndarray) -> list[list[int]]:
    return [[j for j in ranked if others[j] != own[q]] for q, ranked in enumerate(lists)]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("block", [None, 7])
def test_each_against_all_others(seed, block):
    vectors, labels, cameras = drawn(seed)
    lists = filtered(oracle.results(vectors), cameras, cameras)
    values, missing = oracle.all_queries(NAMES, lists, labels)
    got = evaluate(vectors, labels, NAMES, differs=cameras, block=block)
    assert got == pytest.approx({name: np.mean(each) for name, each in values.items()})
    assert left_out(labels, differs=cameras) == missing
    ranking = rank(vectors, labels, 6, differs=cameras, block=block)
    assert ranking.left_out == missing
    for query, found in zip(ranking.queries.tolist(), ranking.neighbours.tolist(), strict=True):
        assert [row for row in found if row >= 0] == lists[query][:6]
    assert got != evaluate(vectors, labels, NAMES)


@pytest.mark.parametrize("seed", [0, 1])
def test_queries_against_a_gallery(seed):
    vectors, labels, cameras = drawn(seed)
    names = np.array(["left", "right", "top"])[cameras]
    parts = slice(0, 12), slice(12, 40)
    (queries, query_labels, own), (items, item_labels, others) = (
        (vectors[part], labels[part], names[part]) for part in parts
    )
    lists = filtered(oracle.results(queries, items), own, others)
    values, missing = oracle.all_queries(NAMES, lists, query_labels, item_labels)
    sides = {"gallery": items, "gallery_labels": item_labels, "differs": own, "gallery_differs": others}
    assert evaluate(queries, query_labels, NAMES, **sides) == pytest.approx(
        {name: np.mean(each) for name, each in values.items()}
    )
    assert left_out(query_labels, item_labels, own, others) == missing
    parts = breakdown(queries, query_labels, "MAP@R", worst=3, **sides)
    assert parts.scores["MAP@R"].tolist() == pytest.approx(values["MAP@R"])
    for query in parts.worst:
        assert query.neighbours == lists[query.query][: len(query.neighbours)]


def test_many_items_take_the_fast_way():
    """Shallow rankings of many items are screened in float32; deep ones are ranked by rows."""
    rng = np.random.default_rng(3)
    labels, series = rng.integers(0, 60, 3000), rng.integers(0, 800, 3000)
    vectors = torch.from_numpy(rng.normal(size=(60, 16))[labels] + rng.normal(size=(3000, 16))).float()
    ranking = rank(vectors, labels, 5, differs=series)
    unit = torch.nn.functional.normalize(vectors.double())
    similarities = unit @ unit.T
    similarities[torch.from_numpy(series)[:, None] == torch.from_numpy(series)] = -2
    assert torch.equal(ranking.neighbours, similarities.topk(5).indices[ranking.queries])


def test_a_query_whose_class_has_only_its_own_value_is_left_out():
    vectors = torch.eye(6)
    assert left_out([0, 0, 1, 1, 1, 2], differs=[1, 1, 1, 2, 2, 3]) == 3
    assert rank(vectors, [0, 0, 1, 1, 1, 2], 4, differs=[1, 1, 1, 2, 2, 3]).queries.tolist() == [2, 3, 4]
    with pytest.raises(ValueError, match="gallery_differs: got a value for only one of queries and gallery, expected"):
        evaluate(vectors, range(6), gallery=vectors, gallery_labels=range(6), differs=range(6))
    with pytest.raises(ValueError, match="differs: got 5 labels, expected 6, one for each row of embeddings"):
        evaluate(vectors, [0, 0, 1, 1, 2, 2], differs=range(5))


@pytest.mark.parametrize("has_gallery", [False, True])
def test_error_rates_are_those_of_pairs_with_different_values(has_gallery):
    vectors, labels, cameras = drawn(0, count=24)
    others, other_labels, other_cameras = drawn(1, count=15) if has_gallery else (None, None, None)
    genuine, impostor = [], []
    for camera in np.unique(cameras):
        # Each query with the items of other cameras; without a gallery each pair comes twice, which changes no rate.
        items = others if has_gallery else vectors
        item_labels, item_cameras = (other_labels, other_cameras) if has_gallery else (labels, cameras)
        own, rest = cameras == camera, item_cameras != camera
        found = pair_scores(vectors[own], list(labels[own]), items[rest], list(item_labels[rest]))
        genuine += found[0]
        impostor += found[1]
    names = ["EER", "FNMR@FMR=0.1"]
    sides = {"gallery": others, "gallery_labels": other_labels, "gallery_differs": other_cameras} if has_gallery else {}
    got = evaluate(vectors, labels, names, differs=cameras, **sides)
    expected = [float(equal_error_rate(genuine, impostor)), float(fnmr_at_fmr(genuine, impostor, 0.1)[0])]
    assert list(got.values()) == pytest.approx(expected)
    sides.pop("gallery_differs", None)
    assert got != evaluate(vectors, labels, names, **sides)


def test_without_pairs_of_different_values_the_sentence_says_so():
    vectors = np.eye(4, dtype=np.float32)
    with pytest.raises(ValueError, match=r"got no genuine pair, .* with different values of `differs`"):
        evaluate(vectors, [0, 0, 1, 1], "EER", differs=[0, 0, 1, 1])
    with pytest.raises(ValueError, match="without a relevant item of another value of `differs`"):
        evaluate(vectors, [0, 0, 1, 1], "R@1", differs=[0, 0, 1, 1])
