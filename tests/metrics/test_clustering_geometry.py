"""Metrics of whole sets: clusters, covering radius, distance between classes."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oracles import metrics as oracle
from proxymetric.metrics import (
    adjusted_mutual_information,
    ami,
    covering_radius,
    estimate,
    evaluate,
    inter_class_distance,
    kmeans,
    mutual_information,
    names,
    nmi,
    per_query,
    rank,
)
from proxymetric.metrics.clustering import _Lloyd
from proxymetric.metrics.knn.distances import Euclidean
from sampled import examples


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: for small problems, more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


labellings = st.lists(st.tuples(st.integers(-2, 3), st.integers(0, 4)), min_size=1, max_size=40)


@settings(max_examples=examples(100), deadline=None)
@given(labellings)
def test_mutual_information_equals_scikit_learn(pairs: list[tuple[int, int]]) -> None:
    from sklearn.metrics import normalized_mutual_info_score

    a, b = (list(each) for each in zip(*pairs))
    assert mutual_information(a, b) == pytest.approx(normalized_mutual_info_score(a, b), abs=1e-9)


@settings(max_examples=examples(60), deadline=None)
@given(labellings)
def test_adjusted_mutual_information_equals_scikit_learn(pairs: list[tuple[int, int]]) -> None:
    from sklearn.metrics import adjusted_mutual_info_score

    a, b = (list(each) for each in zip(*pairs))
    if len(set(a)) == len(set(b)) == len(set(pairs)):
        assert adjusted_mutual_information(a, b) == 1  # scikit-learn divides two rounding errors if all are alone
    else:
        assert adjusted_mutual_information(a, b) == pytest.approx(adjusted_mutual_info_score(a, b), abs=1e-9)


@pytest.mark.parametrize(
    ("a", "b"),
    [([0, 0, 1, 1, 2, 2], [0, 0, 0, 1, 1, 2]), ([0, 0, 0, 0, 0, 1], [0, 1, 1, 2, 2, 2]), ([0, 1, 1], [0, 0, 1])],
)
def test_adjusted_mutual_information_is_adjusted_by_the_mean_of_all_orders(a: list[int], b: list[int]) -> None:
    assert adjusted_mutual_information(a, b) == pytest.approx(oracle.adjusted_mutual_information(a, b), abs=1e-12)
    assert adjusted_mutual_information(b, a) == pytest.approx(oracle.adjusted_mutual_information(a, b), abs=1e-12)


def test_random_clusters_have_no_adjusted_information_and_much_that_is_normalised() -> None:
    a, b = torch.randint(0, 300, (2, 1200), generator=torch.Generator().manual_seed(0))
    assert abs(adjusted_mutual_information(a, b)) < 0.02
    assert mutual_information(a, b) > 0.5


def blobs(clusters: int, each: int, noise: float, dim: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(clusters).repeat(each)
    return torch.randn(clusters, dim, generator=generator)[labels] + noise * torch.randn(
        len(labels), dim, generator=generator
    ), labels


@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
def test_as_good_as_scikit_learn(distance: str) -> None:
    from sklearn.cluster import KMeans
    from sklearn.metrics import normalized_mutual_info_score

    vectors, labels = blobs(20, 40, 0.6)
    given_to_them = torch.nn.functional.normalize(vectors) if distance == "cosine" else vectors
    theirs = KMeans(20, n_init=1, random_state=0).fit(given_to_them.numpy())
    ours = kmeans(vectors, 20, distance=distance)
    assert ours.inertia < 1.08 * theirs.inertia_ / len(vectors)
    assert 1 < ours.iterations <= 25
    agreement = normalized_mutual_info_score(labels, theirs.labels_)
    assert nmi(vectors, labels, distance=distance) > agreement - 0.05
    # The value is that of its clusters.
    assert nmi(vectors, labels, distance=distance) == pytest.approx(
        normalized_mutual_info_score(labels, ours.assignment), abs=1e-9
    )


def test_inertia_is_what_the_clusters_have_in_the_units_of_the_vectors() -> None:
    vectors = 1000 + 7 * blobs(5, 20, 0.5)[0]
    found = kmeans(vectors, 5, distance="euclidean", tolerance=0, iterations=100)
    spread = [
        (each - each.mean(dim=0)).square().sum() for n in range(5) for each in [vectors[found.assignment == n].double()]
    ]
    assert found.inertia == pytest.approx(float(sum(spread)) / len(vectors), rel=1e-4)


def test_more_clusters_than_rounds_of_seeding() -> None:
    """500 well separated clusters: seeding by rounds must put nearly every centre into a different cluster."""
    vectors, labels = blobs(500, 4, 0.05)
    assert nmi(vectors, labels) > 0.98
    once = kmeans(vectors, 500)
    again = kmeans(vectors, 500)
    assert torch.equal(once.assignment, again.assignment)
    assert not torch.equal(once.assignment, kmeans(vectors, 500, seed=1).assignment)


def test_little_memory_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors, _ = blobs(30, 10, 0.3)
    whole = kmeans(vectors, 30)
    monkeypatch.setattr("proxymetric.metrics.clustering.MEMORY_BYTES", 1000)
    assert torch.equal(kmeans(vectors, 30).assignment, whole.assignment)


def test_fewer_distinct_items_than_clusters() -> None:
    vectors = torch.eye(3)[[0, 0, 1, 1, 1, 2]]
    assert kmeans(vectors, 5).inertia == 0
    assert nmi(torch.ones(4, 2), [0, 0, 1, 1]) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("clusters", [90, 150])
def test_as_many_clusters_as_items(clusters: int) -> None:
    """Every item must be drawn once, although its distance from itself is not quite 0 in float32."""
    vectors = torch.randn(clusters, 40, generator=torch.Generator().manual_seed(0))
    assert len(kmeans(vectors, clusters).assignment.unique()) == clusters


def test_an_empty_cluster_is_put_on_the_item_farthest_from_its_centre() -> None:
    points = torch.tensor([[0.0, 0.0], [0.0, 1.0], [8.0, 0.0], [0.0, 2.0]])
    state = _Lloyd(Euclidean(points, points), torch.Generator())
    centres = state._centres(torch.zeros(4, dtype=torch.long), torch.tensor([0.0, 1.0, 9.0, 2.0]), 2)
    rows = state._rows(slice(0, 4))
    assert torch.allclose(centres, torch.stack([rows.mean(dim=0), rows[2]]), atol=1e-6)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"clusters": 0}, "clusters: got 0, expected a whole number from 1 to the 4 items"),
        ({"clusters": 5}, "clusters: got 5"),
        ({"iterations": 0}, "iterations: got 0"),
        ({"distance": "cosinus"}, "did you mean 'cosine'"),
    ],
)
def test_mistakes(wrong: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kmeans(**{"embeddings": torch.eye(4), "clusters": 2, **wrong})


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["cosine", "euclidean"]), st.sampled_from([0.0, 30.0]))
def test_geometry_like_the_oracle(seed: int, distance: str, far: float) -> None:
    draw = np.random.default_rng(seed)
    points = draw.normal(size=(draw.integers(3, 25), 3)) + far
    labels = draw.integers(-1, 4, len(points))
    labels[:2] = 0, 1
    assert covering_radius(points, labels, distance=distance) == pytest.approx(
        oracle.covering_radius(points, labels, distance), abs=1e-7
    )
    assert inter_class_distance(points, labels, distance=distance) == pytest.approx(
        oracle.inter_class_distance(points, labels, distance), rel=1e-5
    )
    unit = points / np.linalg.norm(points, axis=1, keepdims=True) if distance == "cosine" else points
    means = np.stack([unit[labels == label].mean(axis=0) for label in np.unique(labels)])
    wanted = oracle.inter_class_distance(means, np.arange(len(means)), "euclidean")
    assert inter_class_distance(points, labels, distance=distance, of="means") == pytest.approx(wanted, rel=1e-6)


def test_geometry_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors, labels = blobs(9, 7, 0.5)
    whole = [each(vectors, labels) for each in (covering_radius, inter_class_distance)]
    monkeypatch.setattr("proxymetric.metrics.geometry.MAX_NUMBERS", 1)
    monkeypatch.setattr("proxymetric.metrics.geometry.TILE_ROWS", 5)
    assert [each(vectors, labels) for each in (covering_radius, inter_class_distance)] == pytest.approx(whole, rel=1e-6)


def test_geometry_mistakes() -> None:
    with pytest.raises(ValueError, match="of: got 'medoids'"):
        inter_class_distance(torch.eye(3), [0, 1, 2], of="medoids")
    with pytest.raises(ValueError, match="labels: got one class"):
        inter_class_distance(torch.eye(3), [4, 4, 4])


def test_evaluate_knows_them_by_name() -> None:
    vectors, labels = blobs(6, 8, 0.8)
    wanted = ["inter_class_distance", "P@1", "NMI", "AMI", "covering_radius"]
    assert names(wanted) == tuple(wanted)
    found = evaluate(vectors, labels, wanted)
    assert list(found) == wanted
    assert found["NMI"] == nmi(vectors, labels)
    assert found["AMI"] == ami(vectors, labels)
    assert found["covering_radius"] == covering_radius(vectors, labels)
    assert found["inter_class_distance"] == inter_class_distance(vectors, labels)
    # Of queries and gallery together.
    split = {"gallery": vectors[20:], "gallery_labels": labels[20:]}
    assert evaluate(vectors[:20], labels[:20], "covering_radius", **split) == pytest.approx(
        {"covering_radius": found["covering_radius"]}
    )
    # Nothing to retrieve, still something to cluster.
    assert evaluate(torch.eye(3), [0, 1, 2], "NMI") == {"NMI": 1.0}


def test_they_are_no_means_over_queries() -> None:
    ranking = rank(torch.eye(4), [0, 0, 1, 1])
    with pytest.raises(ValueError, match="metrics: got NMI, expected metrics of a ranking"):
        per_query(ranking, ["P@1", "NMI"])
    with pytest.raises(ValueError, match="metrics: got covering_radius, expected means over queries"):
        estimate(torch.eye(4), [0, 0, 1, 1], "covering_radius")


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("nmi", "NMI"),
        ("Adjusted mutual information", "AMI"),
        ("mrr", "MRR"),
        ("mrr@5", "MRR@5"),
        ("ap", "AP"),
        ("Covering-Radius", "covering_radius"),
        ("interclass distance", "inter_class_distance"),
    ],
)
def test_a_wrong_name_is_told_the_nearest(wrong: str, right: str) -> None:
    with pytest.raises(ValueError, match=f"did you mean {right!r}"):
        names(wrong)
