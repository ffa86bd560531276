"""The parts of a score, and its uncertainty."""

import json
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from oracles import metrics as oracle
from proxymetric.metrics import breakdown, estimate, evaluate, interval, rank


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: for small problems, more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def points() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(7)
    labels = np.array([5, -3, 5, 9, 9, -3, 5, 9, 40, -3] * 5)
    vectors = draw.normal(size=(50, 3)) + labels[:, None] / 20
    vectors[30:] = vectors[10:30]  # ties, also between results of one class
    return {"embeddings": vectors, "labels": labels}


@pytest.mark.parametrize("parted", [False, True])
def test_like_the_oracle(points: dict, parted: bool) -> None:
    gallery = None
    if parted:
        gallery, gallery_labels = points["embeddings"][30:], points["labels"][30:]
        points = {name: each[:30] for name, each in points.items()}
        points |= {"gallery": gallery, "gallery_labels": gallery_labels}
    item_labels = points.get("gallery_labels", points["labels"])
    lists = oracle.results(points["embeddings"], gallery)
    scores, _ = oracle.all_queries(["MAP@R", "P@2"], lists, points["labels"], points.get("gallery_labels"))
    found = breakdown(**points, metrics=["MAP@R", "P@2"], worst=7, pairs=100)

    for name, values in found.scores.items():
        assert values.tolist() == pytest.approx(scores[name])
    own = points["labels"][found.queries]
    assert [each.label for each in found.classes] == sorted(set(own.tolist()))
    for each in found.classes:
        mine = own == each.label
        assert each.queries == mine.sum()
        for name, value in each.scores.items():
            assert value == pytest.approx(np.array(scores[name])[mine].mean())

    order = sorted(range(len(own)), key=lambda row: (scores["MAP@R"][row], row))[:7]
    assert [each.query for each in found.worst] == found.queries[order].tolist()
    for each, row in zip(found.worst, order):
        assert each.scores["P@2"] == pytest.approx(scores["P@2"][row])
        assert each.neighbours == lists[each.query][:5]
        assert each.neighbour_labels == [int(item_labels[j]) for j in lists[each.query][:5]]
        assert each.label == points["labels"][each.query]

    wanted = oracle.confusions(lists, points["labels"], item_labels)
    assert {(each.label, each.wrong_label): each.times for each in found.confused} == wanted
    assert [each.times for each in found.confused] == sorted(wanted.values(), reverse=True)
    for each in found.confused:
        queries = [q for q, label in enumerate(points["labels"]) if label == each.label]
        looked = sum(sum(item_labels[j] == each.label for j in lists[q]) for q in queries)
        assert each.share == pytest.approx(each.times / looked)


def test_what_is_shown_is_ranked_exactly_also_where_scores_need_not_be() -> None:
    """Ties between results of one class do not change scores, but they change the order of the results."""
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(30, 5, generator=generator)[torch.randint(30, (500,), generator=generator)]
    labels = torch.arange(500) % 2
    ranking = rank(vectors, labels, 5)
    found = breakdown(vectors, labels, worst=500)
    assert {each.query: each.neighbours for each in found.worst} == dict(enumerate(ranking.neighbours.tolist()))


def test_it_is_ready_for_json(points: dict) -> None:
    labels = np.unique(points["labels"], return_inverse=True)[1]
    found = breakdown(points["embeddings"], labels, worst=2, pairs=3)
    names = ["ant", "bee", "cat", "dog"]
    plain = json.loads(json.dumps(found.as_dict(names, per_query=True)))
    assert [len(plain[part]) for part in ("worst", "confused", "classes", "queries")] == [2, 3, 4, 50]
    assert plain["worst"][0]["class"] == names[plain["worst"][0]["label"]]
    assert plain["worst"][0]["found_classes"] == [names[label] for label in plain["worst"][0]["found"]]
    assert plain["confused"][0]["found_class"] == names[plain["confused"][0]["found"]]
    assert np.mean(plain["scores"]["MAP@R"]) == pytest.approx(evaluate(points["embeddings"], labels, "MAP@R")["MAP@R"])
    assert "scores" not in found.as_dict()


def test_few_items() -> None:
    found = breakdown(torch.eye(3), [0, 0, 1], worst=0, pairs=0)
    assert (found.worst, found.confused, found.queries.tolist()) == ([], [], [0, 1])
    with pytest.raises(ValueError, match="worst: got -1"):
        breakdown(torch.eye(3), [0, 0, 1], worst=-1)
    with pytest.raises(ValueError, match="metrics: got NMI, expected means over queries"):
        breakdown(torch.eye(3), [0, 0, 1], "NMI")


def test_interval_of_independent_values_is_the_textbook_one() -> None:
    values = np.random.default_rng(1).normal(3, 2, size=400)
    low, high = interval(values, repeats=4000)
    half = 1.96 * values.std() / 20
    assert low == pytest.approx(values.mean() - half, abs=0.02)
    assert high == pytest.approx(values.mean() + half, abs=0.02)
    narrow = interval(values, level=0.5)
    assert low < narrow[0] < narrow[1] < high
    assert interval(values, seed=0) == interval(torch.from_numpy(values)) != interval(values, seed=1)


def test_values_that_hang_together_make_it_wider() -> None:
    """30 classes of 20 equal values are 30 values, not 600; means are over values, so that large classes count more."""
    draw = np.random.default_rng(2)
    of_class = draw.normal(size=30)
    groups = np.repeat(np.arange(30), 20)
    low, high = interval(of_class[groups], groups, repeats=4000)
    assert (high - low) / 2 == pytest.approx(1.96 * of_class.std() / np.sqrt(30), rel=0.08)
    alone = interval(of_class[groups])
    assert alone[1] - alone[0] < (high - low) / 3
    # Unequal classes, by hand: a resample of classes a (3 values of 1) and b (1 value of 0) has mean 1, 0.75 or 0.
    assert interval([1, 1, 1, 0], [7, 7, 7, 2], level=0.4) == (0.75, 0.75)
    assert interval([1, 1, 1, 0], [7, 7, 7, 2], level=0.9) == (0.0, 1.0)


def test_it_does_not_draw_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(3).normal(size=50)
    whole = interval(values, repeats=300)
    monkeypatch.setattr("proxymetric.metrics.intervals.MAX_DRAWS", 130)
    assert interval(values, repeats=300) == whole


def test_estimates_are_the_scores_with_intervals(points: dict) -> None:
    wanted = evaluate(**points)
    found = estimate(**points)
    assert {name: each.value for name, each in found.items()} == wanted
    assert all(each.low <= each.value <= each.high for each in found.values())
    by_query = estimate(**points, metrics="MAP@R", by="query", level=0.8, repeats=50, seed=3)["MAP@R"]
    scores = breakdown(**points).scores["MAP@R"]
    assert by_query[1:] == interval(scores, level=0.8, repeats=50, seed=3)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"values": [[1.0]]}, r"values: got shape \(1, 1\)"),
        ({"values": []}, "values: got shape"),
        ({"values": [1.0]}, "values: got one, expected at least two"),
        ({"groups": [1, 1, 1]}, "groups: got one, expected at least two"),
        ({"groups": [1, 2]}, "groups: got 2 groups, expected 3, one for each value"),
        ({"level": 1.0}, "level: got 1.0"),
        ({"repeats": 0}, "repeats: got 0"),
    ],
)
def test_mistakes(wrong: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        interval(**{"values": [1.0, 2.0, 3.0], **wrong})
    with pytest.raises(ValueError, match="by: got 'image'"):
        estimate(torch.eye(3), [0, 0, 1], by="image")
