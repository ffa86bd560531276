"""Scores among fewer classes of a gallery, against an enumeration of all sets of classes."""

import importlib
import itertools

import numpy as np
import pytest
import torch

from oracles import metrics as oracle
from proxymetric.metrics import evaluate, fewer_classes

MODULE = importlib.import_module("proxymetric.metrics.fewer_classes")
LABELS = np.array([3, 3, 3, 5, 5, 5, 5, 7, 7, 7, 8, 8, 9, 9, 9, 9, 2, 2, 2, 2])
"""six classes"""


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def drawn(copies: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Vectors of classes that overlap, some of them equal, and their labels."""
    labels = np.tile(LABELS, copies)
    vectors = np.random.default_rng(3).normal(size=(len(labels), 3)) + labels[:, None] / 3
    vectors[[4, 11]] = vectors[[0, 2]]
    return vectors, labels


def results(queries: np.ndarray, items: np.ndarray | None = None) -> list[list[int]]:
    """All items for each query, nearest first, equal ones by index; without `items`, the query itself is left out."""
    others = queries if items is None else items
    units = [rows / np.sqrt((rows * rows).sum(1, keepdims=True)) for rows in (queries, others)]
    order = (-(units[0][:, None] * units[1]).sum(-1)).argsort(1, kind="stable").tolist()
    return [[j for j in row if items is not None or j != q] for q, row in enumerate(order)]


def enumerated(lists, labels, item_labels, size: int) -> tuple[dict, dict]:
    """Mean of a query over all choices of the other classes, and the lowest and highest score of a set of classes."""
    classes = sorted(set(item_labels.tolist()))
    of_query: dict[str, list[float]] = {"R@1": [], "MAP@R": []}
    of_set: dict[str, list[float]] = {"R@1": [], "MAP@R": []}
    for name in of_query:
        by_set: dict[tuple, list[float]] = {}
        for query, items in enumerate(lists):
            own, values = labels[query], []
            relevant = int(sum(item_labels[j] == own for j in items))
            if not relevant:
                continue
            for others in itertools.combinations([c for c in classes if c != own], size - 1):
                kept = {own, *others}
                hits = [bool(item_labels[j] == own) for j in items if item_labels[j] in kept]
                values.append(oracle.one(name, hits, relevant))
                by_set.setdefault(tuple(sorted(kept)), []).append(values[-1])
            of_query[name].append(float(np.mean(values)))
        of_set[name] = [float(np.mean(values)) for values in by_set.values()]
    return {name: np.mean(values) for name, values in of_query.items()}, of_set


@pytest.mark.parametrize("case", ["all images", "gallery", "differs"])
def test_the_mean_and_the_range_are_those_of_all_sets_of_classes(case, monkeypatch):
    monkeypatch.setattr(MODULE, "DRAWS", 800)
    monkeypatch.setattr(MODULE, "MAX_CELLS", 5_000)  # several parts
    vectors, labels = drawn(2)
    arguments: dict = {"embeddings": vectors, "labels": labels}
    lists = results(vectors)
    item_labels = labels
    if case == "gallery":
        item_labels, labels = labels[20:], labels[:20]
        arguments = {"embeddings": vectors[:20], "labels": labels, "gallery": vectors[20:]}
        arguments["gallery_labels"] = item_labels
        lists = results(vectors[:20], vectors[20:])
    if case == "differs":
        arguments["differs"] = camera = np.arange(len(labels)) % 3
        lists = [[j for j in items if camera[j] != camera[q]] for q, items in enumerate(lists)]
    records = fewer_classes(**arguments)
    scores = evaluate(**arguments, metrics=["R@1", "MAP@R"])

    assert [record.classes for record in records] == ([4, 6] if case == "gallery" else [2, 4, 6])
    for record in records:
        means, sets = enumerated(lists, labels, item_labels, record.classes)
        assert record.scores["R@1"][0] == pytest.approx(means["R@1"], abs=1e-12), "the closed form is exact"
        assert record.scores["MAP@R"][0] == pytest.approx(means["MAP@R"], abs=0.006)
        for name, (_, low, high) in record.scores.items():
            assert (low, high) == pytest.approx((min(sets[name]), max(sets[name])), abs=1e-6), name
    assert all(values == pytest.approx([scores[name]] * 3) for name, values in records[-1].scores.items())


def test_a_score_falls_with_the_number_of_classes_and_other_vectors_have_the_same_draws():
    vectors, labels = drawn(2)
    records = fewer_classes(vectors, labels)
    for name in ("R@1", "MAP@R"):
        means = [record.scores[name][0] for record in records]
        assert means == sorted(means, reverse=True)
    as_text = fewer_classes(7 * vectors, labels.astype(str))
    for other, is_same in ((as_text, True), (fewer_classes(vectors, labels, seed=1), False)):
        assert [record.scores["R@1"][0] for record in other] == pytest.approx(
            [record.scores["R@1"][0] for record in records]
        ), "exact, so that it does not depend on the draws"
        assert ([record.scores["MAP@R"][0] for record in other] == pytest.approx(means)) == is_same


def test_of_many_queries_some_of_each_class_are_ranked(monkeypatch):
    monkeypatch.setattr(MODULE, "MAX_QUERIES", 60)
    labels = np.arange(300) % 6
    vectors = np.random.default_rng(0).normal(size=(300, 4)) + np.eye(6)[labels][:, :4]
    last = fewer_classes(vectors, labels)[-1].scores
    whole = evaluate(vectors, labels, ["R@1", "MAP@R"])
    assert last["MAP@R"][0] == pytest.approx(whole["MAP@R"], abs=0.02)
    assert last["MAP@R"][0] != whole["MAP@R"]


def test_too_few_classes_or_queries_have_no_scores():
    assert fewer_classes(torch.eye(4), [0, 0, 0, 0]) == []
    assert fewer_classes(torch.eye(4), [0, 1, 2, 3]) == []
    assert [record.classes for record in fewer_classes(torch.eye(12), torch.arange(12) % 4)] == [4]
